// Which columns of a block of keys the rows of a warp see.
#pragma once

#include "cuda/ptx/bits.cuh"
#include "cuda/sm90/forward_config.cuh"

namespace onepass::cuda::sm90 {

/// Columns of a block that the 16 rows of a warp see: all of them [begin, end), none from any_end on.
struct Seen {
  int begin, end, any_end;
};

/// How many of this lane's columns, 8 j + c + `first` for c = 0 and 1, lie before `end`; for large and negative ones as
/// if there were more.
__device__ __forceinline__ int columns_before(int end, int first) {
  end -= first;
  return 2 * (end >> 3) + min(end & 7, 2);
}

/// Hides the columns that this lane's rows do not see: row r of the warp sees [lo + r, min(hi + r, length)). A half of
/// the block that all of the warp's rows see is left alone. A row's columns are bits of a word, from which the compiler
/// sets seven predicates by one instruction.
template <int kBlockK>
__device__ __forceinline__ void hide_unseen(float (&r_s)[kBlockK / 2], const Seen& seen, int lo, int hi, int length,
                                            int lane) {
  static_assert(kBlockK <= 128, "a row's columns of a lane are the bits of a word");
  constexpr int kHalf = kBlockK / 8;  // of a lane's columns
  const int row = lane / 4, first = 2 * (lane & 3);
  const int before = columns_before(hi + row, first), all = columns_before(length, first);
  std::uint32_t visible[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) visible[r] = ptx::low_bits(max(min(before + 2 * r, all), 0));  // 8 rows on: 8 columns
  if (seen.begin > 0) {
    const int hidden = columns_before(lo + row, first);
#pragma unroll
    for (int r = 0; r < 2; ++r) visible[r] &= ~ptx::low_bits(max(hidden + 2 * r, 0));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (seen.end >= (half + 1) * kBlockK / 2 && seen.begin <= half * kBlockK / 2) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = half * kHalf; i < (half + 1) * kHalf; ++i) {
        if (!(visible[r] >> i & 1)) r_s[i / 2 * 4 + 2 * r + i % 2] = -INFINITY;
      }
    }
  }
}

}  // namespace onepass::cuda::sm90
