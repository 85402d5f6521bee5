// Launches of the emulator, in place of src/cuda/host/launch.h.
#pragma once

#include <cstring>
#include <tuple>
#include <utility>

#include "core/problem.h"
#include "core/status.h"
#include "cuda_language.h"

namespace onepass::cuda {

// Of the CUDA runtime, as the launching code calls it.
using cudaStream_t = void*;
inline Status cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t) {
  std::memset(data, value, bytes);
  return {};
}
inline Status status_of(Status status, const char*) {
  return status;
}

class DeviceScope {
 public:
  explicit DeviceScope(int) {}
  Status status() const { return {}; }
};

inline int multiprocessors(int) {
  return 3;
}

template <bool kEarly = false, class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), std::int64_t blocks, int threads, std::int64_t shared_bytes, const Launch&,
              Arguments&&... arguments) {
  const std::tuple<std::decay_t<Parameters>...> parameters(std::forward<Arguments>(arguments)...);
  return emulator::run_grid(blocks, threads, shared_bytes, [&] { std::apply(kernel, parameters); });
}

}  // namespace onepass::cuda
