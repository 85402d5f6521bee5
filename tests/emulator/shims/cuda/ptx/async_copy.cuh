// In place of src/cuda/ptx/async_copy.cuh. From its issue on, what a copy will write is NaN until it has happened.
#pragma once

#include <cstring>

#include "cuda/ptx/shared.cuh"

namespace onepass::ptx {

inline void copy_later(std::uint32_t shared, const void* global, int size, int bytes) {
  if (bytes < 0 || bytes > size) emulator::fault("cp.async of %d bytes of %d", bytes, size);
  unsigned char* to = emulator::shared(shared, size, size);
  if (bytes > 0) emulator::check_global(global, bytes, size, "cp.async");
  std::memset(to, 0xff, static_cast<std::size_t>(size));
  emulator::lane().copies.add([=] {
    if (bytes > 0) std::memcpy(to, global, static_cast<std::size_t>(bytes));
    std::memset(to + bytes, 0, static_cast<std::size_t>(size - bytes));
  });
}
inline void cp_async_16(std::uint32_t shared, const void* global, std::uint32_t bytes = 16) {
  copy_later(shared, global, 16, static_cast<int>(bytes));
}
inline void cp_async_16_or_zeros(std::uint32_t shared, const void* global, bool copy) {
  copy_later(shared, global, 16, copy ? 16 : 0);
}
template <int kBytes>
void cp_async_small(std::uint32_t shared, const void* global, std::uint32_t bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8);
  copy_later(shared, global, kBytes, static_cast<int>(bytes));
}
inline void cp_async_commit() {
  emulator::lane().copies.commit();
}
template <int kPending>
void cp_async_wait() {
  emulator::lane().copies.wait(kPending);
}

}  // namespace onepass::ptx
