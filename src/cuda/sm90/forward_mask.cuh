// Which columns of a block of keys the rows of a warp see.
#pragma once

#include "cuda/sm90/forward_config.cuh"

namespace onepass::cuda::sm90 {

/// Columns of a block that the 16 rows of a warp see: all of them [begin, end), none from any_end on.
struct Seen {
  int begin, end, any_end;
};

/// Hides the columns that this lane's rows do not see: row r of the warp sees [lo + r, min(hi + r, length)). Groups of
/// 32 that all of the warp's rows see are left alone.
template <int kBlockK>
__device__ __forceinline__ void hide_unseen(float (&r_s)[kBlockK / 2], const Seen& seen, int lo, int hi, int length,
                                            int lane) {
  const int row = lane / 4, column = 2 * (lane & 3);
#pragma unroll
  for (int group = 0; group < kBlockK; group += 32) {
    if (seen.end < group + 32) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int end = min(hi + row + 8 * r, length) - column;
#pragma unroll
        for (int j = group; j < min(group + 32, kBlockK); j += 8) {
          if (j >= end) r_s[j / 2 + 2 * r] = -INFINITY;
          if (j + 1 >= end) r_s[j / 2 + 2 * r + 1] = -INFINITY;
        }
      }
    }
    if (seen.begin > group) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int begin = lo + row + 8 * r - column;
#pragma unroll
        for (int j = group; j < min(group + 32, kBlockK); j += 8) {
          if (j < begin) r_s[j / 2 + 2 * r] = -INFINITY;
          if (j + 1 < begin) r_s[j / 2 + 2 * r + 1] = -INFINITY;
        }
      }
    }
  }
}

}  // namespace onepass::cuda::sm90
