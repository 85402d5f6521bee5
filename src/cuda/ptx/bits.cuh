// Words of bits. PTX ISA, "Integer Arithmetic Instructions: bmsk, max".
#pragma once

#include <cstdint>

namespace onepass::ptx {

/// A word whose `count` lowest bits are 1; all from 32 on.
__device__ __forceinline__ std::uint32_t low_bits(std::uint32_t count) {
  std::uint32_t r;
  asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(r) : "r"(count));
  return r;
}

/// Largest of x and the bits of two floats, as signed integers, which for floats from 0 on have the floats' order. Two
/// such comparisons are one instruction.
__device__ __forceinline__ std::int32_t largest_bits(std::int32_t x, float a, float b) {
  std::int32_t r;
  asm("{\n.reg .s32 a, b;\n"
      "mov.b32 a, %2;\n"
      "mov.b32 b, %3;\n"
      "max.s32 a, a, b;\n"
      "max.s32 %0, a, %1;\n}"
      : "=r"(r)
      : "r"(x), "f"(a), "f"(b));
  return r;
}

}  // namespace onepass::ptx
