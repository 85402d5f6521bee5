// Division by a number that the host knows.
#pragma once

#include <bit>
#include <cstdint>

namespace onepass::cuda {

/// n / divisor for n < 2^31 by one product: multiplier = ceil(2^shift / divisor), 2^31 times as exact as the divisor is
/// large. After Granlund and Montgomery, "Division by invariant integers using multiplication" (1994).
struct Divisor {
  std::uint32_t divisor = 1, multiplier = 1u << 31;
  int shift = 31;

  Divisor() = default;
  explicit Divisor(std::uint32_t d) : divisor(d), shift(31 + std::bit_width(d - 1)) {
    multiplier = static_cast<std::uint32_t>(((std::uint64_t{1} << shift) + d - 1) / d);
  }
  __host__ __device__ std::uint32_t quotient(std::uint32_t n) const {
    return static_cast<std::uint32_t>(std::uint64_t{n} * multiplier >> shift);
  }
};

}  // namespace onepass::cuda
