// In place of src/cuda/ptx/global.cuh.
#pragma once

#include <utility>

#include "cuda_language.h"

namespace onepass::ptx {

/// Read in a loop until it changes: the others get their turn first.
inline float load_relaxed(const float* global) {
  emulator::check_global(global, 4, 4, "ld.relaxed");
  emulator::pause();
  return *global;
}
inline float add_relaxed(float* global, float x) {
  emulator::check_global(global, 4, 4, "atom.add");
  emulator::progress();
  return std::exchange(*global, *global + x);
}
inline unsigned exchange_relaxed(unsigned* global, unsigned x) {
  emulator::check_global(global, 4, 4, "atom.exch");
  emulator::progress();
  return std::exchange(*global, x);
}

}  // namespace onepass::ptx
