// Words of bits. PTX ISA, "Integer Arithmetic Instructions: bmsk".
#pragma once

#include <cstdint>

namespace onepass::ptx {

/// A word whose `count` lowest bits are 1; all from 32 on.
__device__ __forceinline__ std::uint32_t low_bits(std::uint32_t count) {
  std::uint32_t r;
  asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(r) : "r"(count));
  return r;
}

}  // namespace onepass::ptx
