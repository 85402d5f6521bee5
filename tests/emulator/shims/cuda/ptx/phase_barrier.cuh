// In place of src/cuda/ptx/phase_barrier.cuh.
#pragma once

#include "cuda_language.h"
#include "emulator/machine/mbarrier.h"

namespace onepass::ptx {

inline void phase_barrier_init(std::uint32_t barrier, int count) {
  emulator::mbarrier_init(barrier, count);
}
inline void phase_barrier_arrive(std::uint32_t barrier) {
  emulator::mbarrier_arrive(barrier);
}
inline void phase_barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  emulator::mbarrier_wait(barrier, parity);
}

}  // namespace onepass::ptx
