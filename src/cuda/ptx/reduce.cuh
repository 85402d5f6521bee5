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

/// The same with 64 bits.
__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* global) {
  unsigned long long x;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(global) : "memory");
  return x;
}
__device__ __forceinline__ void reduce_add_release(unsigned long long* global, unsigned long long x) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(global), "l"(x) : "memory");
}
/// Adds, and reads the old value as load_acquire does.
__device__ __forceinline__ unsigned long long fetch_add_acquire(unsigned long long* global, unsigned long long x) {
  unsigned long long old;
  asm volatile("atom.acquire.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(global), "l"(x) : "memory");
  return old;
}

}  // namespace onepass::ptx
