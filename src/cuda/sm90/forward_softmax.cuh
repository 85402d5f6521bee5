// Softmax of a consumer thread: two rows of the tile, row_of(0) and row_of(1),
// each shared by the four lanes of a quad. A row's scores are taken relative to
// a reference, which cancels in O / sum and is added back to the LSE.
//  - The first block of a tile sets it to the row's maximum in a few columns
//  that all rows see, else in the block.
//  - In blocks before which a row may have seen no key it follows the maximum
//  where that grew by more than 2^8.
//  - Else it stays. A sum beyond 2^24 (float16: 2^15) scales sum, O and
//  reference by a power of 2; one beyond 2^96 (float16: 2^128), from one block
//  that outgrew all before it, marks the rows for repair.
#pragma once

#include "cuda/device/quad.cuh"
#include "cuda/ptx/bits.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm90/forward_config.cuh"

namespace onepass::cuda::sm90 {

inline constexpr float kLazyGrowth = 8;             // log2
inline constexpr float kScaleSum = 16777216.f;      // 2^24
inline constexpr float kScaleNarrowSum = 32768.f;   // 2^15, which no probability then passes
inline constexpr float kRepairSum = 7.9228163e28f;  // 2^96

struct RowState {
  float reference[2];  // log2, of scaled scores; -inf: the row has seen no key
  float sum[2];        // this thread's part
};

// A thread holds, for each group of 8 columns, two of row 0 and two of row 1;
// kUsed of its kCount scores are looked at.

/// Largest of the thread's scores in row r.
template <int kCount>
__device__ __forceinline__ float row_max(const float (&r_s)[kCount], int r) {
  float even = r_s[2 * r], odd = r_s[2 * r + 1];
#pragma unroll
  for (int i = 4; i < kCount; i += 4) {
    even = fmaxf(even, r_s[i + 2 * r]);
    odd = fmaxf(odd, r_s[i + 2 * r + 1]);
  }
  return fmaxf(even, odd);
}

/// Scores to probabilities, and their sums. kMayBeEmpty: a reference may be
/// -inf, with scores -inf.
template <bool kMayBeEmpty, int kUsed, int kCount>
__device__ __forceinline__ void exponentiate(float (&r_s)[kCount], RowState& rows, float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float reference = kMayBeEmpty && rows.reference[r] == -INFINITY ? 0.f : rows.reference[r];
    float even = 0, odd = 0;
#pragma unroll
    for (int i = 2 * r; i < kUsed; i += 4) {
      r_s[i] = ptx::exp2_approx(fmaf(r_s[i], scale_log2, -reference));
      r_s[i + 1] = ptx::exp2_approx(fmaf(r_s[i + 1], scale_log2, -reference));
      even += r_s[i];
      odd += r_s[i + 1];
    }
    rows.sum[r] += even + odd;
  }
#pragma unroll
  for (int i = kUsed; i < kCount; ++i) r_s[i] = 0;  // hidden
}

/// References of a tile's first block: the rows' maxima.
template <int kCount>
__device__ __forceinline__ void start_rows(const float (&r_s)[kCount], RowState& rows, float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.reference[r] = quad_max(row_max(r_s, r)) * scale_log2;
    rows.sum[r] = 0;
  }
}

/// The same where every row sees the first column: the
/// maxima of the four scores beside it that one lane has. Any score would do; a
/// higher one makes the sums smaller.
template <int kCount>
__device__ __forceinline__ void start_rows_at_first_column(const float (&r_s)[kCount], RowState& rows,
                                                           float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float high = fmaxf(fmaxf(r_s[2 * r], r_s[2 * r + 1]), fmaxf(r_s[4 + 2 * r], r_s[4 + 2 * r + 1]));
    rows.reference[r] = __shfl_sync(~0u, high, threadIdx.x & 28u) * scale_log2;
    rows.sum[r] = 0;
  }
}

/// Lets the references follow the maxima; true if `factor` (of sum, already
/// applied, and of O) is not 1.
template <int kCount>
__device__ __forceinline__ bool follow_maximum(const float (&r_s)[kCount], RowState& rows, float scale_log2,
                                               float (&factor)[2]) {
  const float high[2] = {row_max(r_s, 0) * scale_log2, row_max(r_s, 1) * scale_log2};
  if (!__any_sync(~0u, high[0] > rows.reference[0] + kLazyGrowth || high[1] > rows.reference[1] + kLazyGrowth)) {
    return false;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float reference = fmaxf(quad_max(high[r]), rows.reference[r]);
    const float by = reference == -INFINITY ? 1.f : ptx::exp2_approx(rows.reference[r] - reference);
    factor[r] *= by;
    rows.sum[r] *= by;
    rows.reference[r] = reference;
  }
  return true;
}

/// Whether one of the thread's sums has reached `limit`.
__device__ __forceinline__ bool outgrown(const RowState& rows, float limit) {
  return !(fmaxf(rows.sum[0], rows.sum[1]) < limit);
}

/// Brings large sums back to 2^kTo by powers of 2, `factor`.
template <int kTo>
__device__ __forceinline__ void scale_down(RowState& rows, float (&factor)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float high = quad_max(rows.sum[r]);
    const int exponent = high > 1.f ? clamp_to((__float_as_int(high) >> 23) - 127 - kTo, 0, 126) : 0;
    const float by = __int_as_float((127 - exponent) << 23);
    factor[r] = by;
    rows.sum[r] *= by;
    rows.reference[r] += exponent;
  }
}

/// float16: scales sums beyond 2^15 down, with the probabilities in hand, so
/// that none overflows when packed; to 2^8, since small ones lose bits below
/// 2^-14. True if what O holds of the row needs `factor`.
template <int kCount>
__device__ __forceinline__ bool fit_narrow(float (&r_s)[kCount], RowState& rows, float (&factor)[2]) {
  if (!__any_sync(~0u, outgrown(rows, kScaleNarrowSum))) return false;
  float by[2];
  scale_down<8>(rows, by);
#pragma unroll
  for (int i = 0; i < kCount; ++i) r_s[i] *= by[i / 2 % 2];
  factor[0] *= by[0], factor[1] *= by[1];
  return true;
}

}  // namespace onepass::cuda::sm90
