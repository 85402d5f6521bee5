// What the compiler must be told about registers: how many a warpgroup may hold (setmaxnreg, sm_90), and that those of
// an asynchronous product may not move across its start or its end.
#pragma once

#include <cstdint>

namespace onepass::ptx {

/// Gives registers back, or takes them; executed by all warps of a warpgroup. The launch's allocation is only
/// redistributed: asking for more than the others gave back waits for ever.
template <int kRegisters>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Reads and writes of `r` before this stay before it, those after it after it.
template <int kCount>
__device__ __forceinline__ void keep(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void keep(std::uint32_t (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

/// `x`, from here on: what is computed from it is not computed before and kept.
__device__ __forceinline__ int recomputed(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ std::int64_t recomputed(std::int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

/// x + 1, in a loop whose end value the compiler shall not compute from the number of rounds: a count that only ever
/// grows by one stays in a uniform register, where descriptors are built.
__device__ __forceinline__ unsigned successor(unsigned x) {
  asm volatile("add.u32 %0, %0, 1;" : "+r"(x));
  return x;
}

}  // namespace onepass::ptx
