// What the emulated device has, in place of src/cuda/host/device.h.
#pragma once

#include <cstdint>

namespace onepass {

namespace emulator {
/// Shared memory of a multiprocessor, as on 9.0; tests change it.
inline std::int64_t shared_bytes = 228 * 1024;
}  // namespace emulator

namespace cuda {
inline std::int64_t multiprocessor_shared_bytes(int) {
  return emulator::shared_bytes;
}
}  // namespace cuda

}  // namespace onepass
