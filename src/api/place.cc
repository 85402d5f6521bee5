#include "api/place.h"

#include <vector>

#include "core/support.h"
#if defined(ONEPASS_CUDA)
#include "cuda/host/device.h"
#endif

namespace onepass::api {
namespace {

bool in_cuda_memory(const DLDevice& device) {
  return device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged;
}

}  // namespace

Status find_place(std::initializer_list<NamedTensor> tensors, Problem* problem, Launch* launch) {
  const NamedTensor* first = nullptr;
  for (const NamedTensor& one : tensors) {
    if (one.tensor == nullptr) continue;
    const DLDevice& device = one.tensor->device;
    const bool cuda = in_cuda_memory(device);
    if (!cuda && device.device_type != kDLCPU && device.device_type != kDLCUDAHost) {
      return unsupported(
          "%s lives on DLPack device %d: supported are host memory (1) and CUDA memory (2); move it there", one.name,
          static_cast<int>(device.device_type));
    }
#if !defined(ONEPASS_CUDA)
    if (cuda) {
      return unsupported("%s lives on DLPack device %d: this build computes on the CPU (1) only; move it there",
                         one.name, static_cast<int>(device.device_type));
    }
#endif
    if (first == nullptr) {
      first = &one;
      problem->on_device = cuda;
      launch->device = cuda ? device.device_id : 0;
    } else if (cuda != problem->on_device) {
      return invalid_argument("%s is in %s memory, %s in %s memory: move all tensors to one device", first->name,
                              problem->on_device ? "CUDA" : "host", one.name, cuda ? "CUDA" : "host");
    } else if (cuda && device.device_id != launch->device) {
      return invalid_argument("%s is on CUDA device %d, %s on %d: move all tensors to one device", first->name,
                              launch->device, one.name, device.device_id);
    }
  }
  return {};
}

Status check_device_lengths(const Problem& problem, const Launch& launch) {
#if defined(ONEPASS_CUDA)
  Problem p = problem;
  const std::int32_t** arrays[] = {&p.mask.cu_seqlens_q, &p.mask.cu_seqlens_k, &p.mask.q_length,
                                   &p.mask.k_start,      &p.mask.k_length,     &p.mask.q_position};
  std::vector<std::int32_t> copies[6];
  for (int i = 0; i < 6; ++i) {
    if (*arrays[i] == nullptr) continue;
    copies[i].resize(static_cast<std::size_t>(p.batch + (i < 2 ? 1 : 0)));
    ONEPASS_RETURN_IF_ERROR(cuda::copy_to_host(copies[i].data(), *arrays[i], 4 * copies[i].size(), launch));
    *arrays[i] = copies[i].data();
  }
  return check_lengths(p);
#else
  (void)problem, (void)launch;
  return {};
#endif
}

}  // namespace onepass::api
