// In place of src/cuda/ptx/barrier.cuh.
#pragma once

#include "cuda_language.h"

namespace onepass::ptx {

inline void named_barrier_sync(int id, int threads) {
  emulator::barrier(id, threads, true);
}
inline void named_barrier_arrive(int id, int threads) {
  emulator::barrier(id, threads, false);
}

}  // namespace onepass::ptx
