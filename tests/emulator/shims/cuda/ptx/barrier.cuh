// In place of src/cuda/ptx/barrier.cuh.
#pragma once

#include "cuda_language.h"
#include "emulator/machine/mbarrier.h"
#include "emulator/machine/units.h"

namespace onepass::ptx {

inline void mbarrier_init(std::uint32_t barrier, int count) {
  emulator::mbarrier_init(barrier, count);
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(std::uint32_t barrier) {
  emulator::mbarrier_arrive(barrier);
}
inline void mbarrier_arrive_expect(std::uint32_t barrier, int bytes) {
  emulator::mbarrier_arrive(barrier, bytes);
}
inline void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  emulator::mbarrier_wait(barrier, parity);
}
/// Asked in a loop until it is so: the others get their turn first.
inline bool mbarrier_test(std::uint32_t barrier, std::uint32_t parity) {
  emulator::pause();
  return emulator::mbarrier_test(barrier, parity);
}

inline void named_barrier_sync(int id, int threads) {
  emulator::barrier(id, threads, true);
}
inline void named_barrier_arrive(int id, int threads) {
  emulator::barrier(id, threads, false);
}

inline void fence_async_shared() {
  emulator::fence_stores();
}
inline void fence_async_global() {}

}  // namespace onepass::ptx
