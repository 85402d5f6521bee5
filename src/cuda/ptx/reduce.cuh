// Additions in global memory whose old value nobody wants, and the order between threads that share it.
// PTX ISA, "Parallel Synchronization and Communication Instructions: red".
#pragma once

namespace onepass::ptx {

__device__ __forceinline__ void reduce_add(float* global, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(x) : "memory");
}

/// Reads a counter that other thread blocks release.
__device__ __forceinline__ unsigned load_acquire(const unsigned* global) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
}
/// Adds to a counter after everything this thread has done, and seen others do, in memory.
__device__ __forceinline__ void reduce_add_release(unsigned* global, unsigned x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}

/// Counters of 64 bits, in no order with other accesses: the old value of one that grows by x, one that grows, and one
/// as it is.
__device__ __forceinline__ unsigned long long fetch_add(unsigned long long* global, unsigned long long x) {
  unsigned long long old;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(global), "l"(x) : "memory");
  return old;
}
__device__ __forceinline__ void reduce_add(unsigned long long* global, unsigned long long x) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(global), "l"(x) : "memory");
}
__device__ __forceinline__ unsigned long long load_relaxed(const unsigned long long* global) {
  unsigned long long x;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(global) : "memory");
  return x;
}

}  // namespace onepass::ptx
