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

inline unsigned long long load_acquire(const unsigned long long* global) {
  emulator::check_global(global, 8, 8, "ld.acquire");
  emulator::pause();
  return *global;
}
inline unsigned long long fetch_add_acquire(unsigned long long* global, unsigned long long x) {
  emulator::check_global(global, 8, 8, "atom.add");
  emulator::progress();
  const unsigned long long old = *global;
  *global += x;
  return old;
}
inline void reduce_add_release(unsigned long long* global, unsigned long long x) {
  fetch_add_acquire(global, x);
}

}  // namespace onepass::ptx
