// In place of src/cuda/ptx/reduce.cuh.
#pragma once

#include "cuda_language.h"

namespace onepass::ptx {

inline void reduce_add(float* global, float x) {
  emulator::check_global(global, 4, 4, "red");
  emulator::add_flushed(*global, x);
}
/// Read in a loop until it changes: the others get their turn first.
inline unsigned load_acquire(const unsigned* global) {
  emulator::check_global(global, 4, 4, "ld.acquire");
  emulator::pause();
  return *global;
}
inline void reduce_add_release(unsigned* global, unsigned x) {
  emulator::check_global(global, 4, 4, "red.release");
  emulator::progress();
  *global += x;
}

}  // namespace onepass::ptx
