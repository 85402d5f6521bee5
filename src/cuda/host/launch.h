// The only place that launches kernels.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "core/problem.h"
#include "core/status.h"

namespace onepass::cuda {

/// OK, or what failed, as CUDA words it.
Status status_of(cudaError_t error, const char* what);

/// Makes `device` current for this thread, and the former one again at the end.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  const Status& status() const { return status_; }

 private:
  int former_ = -1;  // -1: nothing to undo
  Status status_;
};

/// Multiprocessors of the device.
int multiprocessors(int device);

/// Launches `blocks` thread blocks of `threads` threads with `shared_bytes` of dynamic shared memory on where.stream.
/// The caller holds a DeviceScope. No block: nothing to do. kEarly: its blocks may start as those of the kernel before
/// end; the kernel itself awaits that one (ptx/grid.cuh).
template <bool kEarly = false, class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), std::int64_t blocks, int threads, std::int64_t shared_bytes,
              const Launch& where, Arguments&&... arguments) {
  if (blocks == 0) return {};
  constexpr std::int64_t kMaxBlocks = 0x7fffffff, kWithoutAsking = 48 * 1024;
  if (blocks > kMaxBlocks) {
    return unsupported("this problem needs %lld thread blocks; a grid holds at most %lld: split the batch",
                       static_cast<long long>(blocks), static_cast<long long>(kMaxBlocks));
  }
  if (shared_bytes > kWithoutAsking) {
    ONEPASS_RETURN_IF_ERROR(status_of(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        "shared memory"));
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(where.stream);
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = kEarly ? 1 : 0;
  return status_of(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), "launch");
}

}  // namespace onepass::cuda
