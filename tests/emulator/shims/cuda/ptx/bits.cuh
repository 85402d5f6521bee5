// In place of src/cuda/ptx/bits.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda_language.h"

namespace onepass::ptx {

inline std::uint32_t low_bits(std::uint32_t count) {
  return count >= 32 ? ~std::uint32_t{0} : (std::uint32_t{1} << count) - 1;
}
inline std::int32_t largest_bits(std::int32_t x, float a, float b) {
  return std::max({x, __float_as_int(a), __float_as_int(b)});
}

}  // namespace onepass::ptx
