// In place of src/cuda/ptx/bits.cuh.
#pragma once

#include <cstdint>

#include "cuda_language.h"

namespace onepass::ptx {

inline std::uint32_t low_bits(std::uint32_t count) {
  return count >= 32 ? ~std::uint32_t{0} : (std::uint32_t{1} << count) - 1;
}

}  // namespace onepass::ptx
