// Which columns of a block of keys the rows of a warp see.
#pragma once

#include "cuda/sm90/forward_config.cuh"

namespace onepass::cuda::sm90 {

/// Columns of a block that the 16 rows of a warp see: all of them [begin, end), none from any_end on.
struct Seen {
  int begin, end, any_end;
};

/// A lane's columns of a block are 8 j + c (c 0 or 1) less its first one: bits 2 j + c of a word. Those below `end`.
__device__ __forceinline__ unsigned columns_below(int end) {
  const int count = clamp_to(2 * (end >> 3) + min(end & 7, 2), 0, 32);
  return static_cast<unsigned>((1ull << count) - 1);
}

/// Hides the columns that this lane's rows do not see: row r of the warp sees [lo + r, min(hi + r, length)). From words
/// of bits the compiler sets seven predicates by one instruction.
template <int kBlockK>
__device__ __forceinline__ void hide_unseen(float (&r_s)[kBlockK / 2], int lo, int hi, int length, int lane) {
  static_assert(kBlockK <= 128, "a row's columns of a lane are bits of a word");
  const int row = lane / 4, column = 2 * (lane & 3);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const unsigned seen =
        columns_below(min(hi + row + 8 * r, length) - column) & ~columns_below(lo + row + 8 * r - column);
#pragma unroll
    for (int i = 0; i < kBlockK / 4; ++i) {
      if (!(seen & (1u << i))) r_s[i / 2 * 4 + 2 * r + i % 2] = -INFINITY;
    }
  }
}

}  // namespace onepass::cuda::sm90
