// The mask inside one tile of scores: the interval of core/mask.h in 32-bit offsets from the tile's corner.
#pragma once

#include <cstdint>

#include "core/mask.h"

namespace onepass::cuda {

/// Row i0 + r sees column j0 + c exactly if lo + r <= c < min(end, hi + r).
struct EdgeMask {
  int lo, hi, end;

  __device__ EdgeMask(const Sequence& s, std::int64_t i0, std::int64_t j0)
      : lo(near(i0 + s.lo_shift - j0)), hi(near(i0 + s.hi_shift - j0)), end(near(s.k_length - j0)) {}

  __device__ bool sees(int row, int column) const { return column >= lo + row && column < min(end, hi + row); }

 private:
  // Far beyond any tile is as good as the exact bound.
  __device__ static int near(std::int64_t x) {
    return static_cast<int>(clamp_to<std::int64_t>(x, -(1 << 30), 1 << 30));
  }
};

}  // namespace onepass::cuda
