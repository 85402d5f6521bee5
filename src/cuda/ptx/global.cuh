// Loads and counters in global memory by which thread blocks of a grid wait for each other. PTX ISA, "Memory
// Consistency Model".
#pragma once

#include <cstdint>

namespace onepass::ptx {

/// From where all blocks see it, but in no order with other accesses; so are the next two.
__device__ __forceinline__ float load_relaxed(const float* global) {
  float x;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(global) : "memory");
  return x;
}
/// *global += x; the old value. (An addition of integers would be summed up over the warp first, whose lanes then wait
/// for the answer.)
__device__ __forceinline__ float add_relaxed(float* global, float x) {
  float old;
  asm volatile("atom.relaxed.gpu.global.add.f32 %0, [%1], %2;" : "=f"(old) : "l"(global), "f"(x) : "memory");
  return old;
}
/// *global = x; the old value.
__device__ __forceinline__ unsigned exchange_relaxed(unsigned* global, unsigned x) {
  unsigned old;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(old) : "l"(global), "r"(x) : "memory");
  return old;
}

}  // namespace onepass::ptx
