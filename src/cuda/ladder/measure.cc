#include "cuda/ladder/measure.h"

#include <cuda_profiler_api.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cmath>

#include "check/device.h"
#include "cpu/parallel.h"
#include "cuda/host/launch.h"

namespace onepass::cuda::ladder {
namespace {

namespace cpu = onepass::ladder;

constexpr double kTimed = 0.02;  // seconds of runs in a row

}  // namespace

template <class T>
Status Bench::reserve(T** array, std::int64_t count) {
  const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
  const std::shared_ptr<void> memory = check::device_memory(bytes);
  if (memory == nullptr)
    return Status(ONEPASS_OUT_OF_MEMORY, "CUDA: no " + std::to_string(bytes) +
                                             " bytes for the ladder; a smaller --seq "
                                             "or fewer --heads");
  memory_.push_back(memory);
  *array = static_cast<T*>(memory.get());
  return status_of(cudaMemset(memory.get(), 0xff, bytes), "memory");  // NaN
}

Status Bench::upload(std::uint64_t seed, bool squares, std::vector<cpu::Arrays>& heads) {
  const std::int64_t all = shape_.heads * shape_.N, each = shape_.N * shape_.d;
  for (std::int64_t n = 0; n < min_of(shape_.heads, kDistinctHeads); ++n)
    heads.push_back(cpu::make_arrays(one_head(shape_), seed + static_cast<std::uint64_t>(n)));
  for (const auto& [array, device] : {std::pair{cpu::Array::Q, &arrays_.Q},
                                      {cpu::Array::K, &arrays_.K},
                                      {cpu::Array::V, &arrays_.V},
                                      {cpu::Array::dO, &arrays_.dO}}) {
    std::vector<std::uint16_t> bits;
    for (std::int64_t n = 0; n < shape_.heads; ++n) {
      for (const float x : heads[static_cast<std::size_t>(n % kDistinctHeads)][array]) bits.push_back(float_to_bf16(x));
    }
    Bf16* memory = nullptr;
    ONEPASS_RETURN_IF_ERROR(reserve(&memory, all * shape_.d));
    ONEPASS_RETURN_IF_ERROR(
        status_of(cudaMemcpy(memory, bits.data(), 2 * bits.size(), cudaMemcpyHostToDevice), "upload"));
    *device = memory;
  }
  for (Bf16** array : {&arrays_.O, &arrays_.dQ, &arrays_.dK, &arrays_.dV})
    ONEPASS_RETURN_IF_ERROR(reserve(array, shape_.heads * each));
  for (float** array : {&arrays_.m, &arrays_.l, &arrays_.L, &arrays_.D}) ONEPASS_RETURN_IF_ERROR(reserve(array, all));
  ONEPASS_RETURN_IF_ERROR(reserve(&arrays_.dQ_sum, shape_.heads * each));
  for (Bf16** array : {&arrays_.S, &arrays_.P})
    if (squares) ONEPASS_RETURN_IF_ERROR(reserve(array, all * shape_.pitch()));
  return {};
}

Status Bench::make(const Shape& shape, bool squares, bool check, int threads, std::uint64_t seed,
                   std::unique_ptr<Bench>* made) {
  std::unique_ptr<Bench> bench(new Bench(shape));
  std::vector<cpu::Arrays> heads;
  ONEPASS_RETURN_IF_ERROR(bench->upload(seed, squares, heads));
  std::vector<Status> status(heads.size());
  if (check) {
    bench->exact_.resize(heads.size());
    std::atomic<std::size_t> next = 0;
    onepass::cpu::parallel(threads, [&](int) {
      for (std::size_t n; (n = next.fetch_add(1)) < heads.size();)
        status[n] = cpu::exact_of(one_head(shape), heads[n], true, bench->exact_[n]);
    });
  }
  for (const Status& one : status) ONEPASS_RETURN_IF_ERROR(one);
  *made = std::move(bench);
  return {};
}

Status Bench::run(const Rung& rung) {
  const Launch here;
  if (rung.backward) ONEPASS_RETURN_IF_ERROR(flash_v2(shape_, arrays_, here));
  ONEPASS_RETURN_IF_ERROR(status_of(cudaDeviceSynchronize(), "the run before"));
  cudaProfilerStart();  // nothing to hear of it where no profiler waits
  const Status status = rung.run(shape_, arrays_, here);
  const Status done = status_of(cudaDeviceSynchronize(), rung.name);
  cudaProfilerStop();
  return status.ok() ? done : status;
}

Status Bench::worst(const Bf16* g_result, std::vector<double> cpu::Exact::*exact, double* error) const {
  std::vector<std::uint16_t> bits(static_cast<std::size_t>(shape_.heads * shape_.N * shape_.d));
  ONEPASS_RETURN_IF_ERROR(
      status_of(cudaMemcpy(bits.data(), g_result, 2 * bits.size(), cudaMemcpyDeviceToHost), "download"));
  const std::size_t each = static_cast<std::size_t>(shape_.N * shape_.d);
  for (std::size_t n = 0; n < bits.size() && !std::isnan(*error); ++n) {
    const std::vector<double>& head = exact_[n / each % exact_.size()].*exact;
    const double distance = std::abs(static_cast<double>(bf16_to_float(bits[n])) - head[n % each]);
    if (!(distance <= *error)) *error = distance;
  }
  return {};
}

Status Bench::error(const Rung& rung, double* error) const {
  *error = 0;
  if (!rung.backward) return worst(arrays_.O, &cpu::Exact::O, error);
  ONEPASS_RETURN_IF_ERROR(worst(arrays_.dQ, &cpu::Exact::dQ, error));
  ONEPASS_RETURN_IF_ERROR(worst(arrays_.dK, &cpu::Exact::dK, error));
  return worst(arrays_.dV, &cpu::Exact::dV, error);
}

double Bench::largest(const Rung& rung) const {
  double most = 0;
  const auto take = [&](const std::vector<double>& exact) {
    for (const double x : exact) most = max_of(most, std::abs(x));
  };
  for (const cpu::Exact& head : exact_) {
    if (!rung.backward) take(head.O);
    if (rung.backward) take(head.dQ), take(head.dK), take(head.dV);
  }
  return most;
}

Status Bench::time(const Rung& rung, double* seconds) const {
  const auto call = [&](void* stream) {
    Launch there;
    there.stream = stream;
    return rung.run(shape_, arrays_, there);
  };
  ONEPASS_RETURN_IF_ERROR(check::time_on_device(call, 1, seconds));
  const int calls = static_cast<int>(clamp_to(kTimed / max_of(*seconds, 1e-7), 1.0, 200.0));
  return check::time_on_device(call, calls, seconds);
}

}  // namespace onepass::cuda::ladder
