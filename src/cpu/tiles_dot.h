// The bfloat16 forward's matrix products by vdpbf16ps: register tiles of up to 6 rows by 64 query lanes, K rows in
// place and V as pairs of keys, both by broadcast.
#pragma once

#include "cpu/pack_bf16.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// C[kM][kN vectors] (+)= A[kM][2 depth] B: pairs of A with free strides (in elements), B as [depth][64][2], C's rows
/// kWidth apart.
template <int kM, int kN, bool kAccumulate>
ONEPASS_INLINE void pair_tile(const Bf16* a, std::int64_t a_row, std::int64_t a_pair, const Bf16* b, float* c,
                              std::int64_t depth) {
  __m512 acc[kM][kN];
#pragma GCC unroll 8
  for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kN; ++j) {
      acc[i][j] = kAccumulate ? (__m512)load(c + i * kWidth + j * kLanes) : _mm512_setzero_ps();
    }
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    __m512bh right[kN];
#pragma GCC unroll 4
    for (int j = 0; j < kN; ++j) right[j] = (__m512bh)_mm512_loadu_si512(b + k * 2 * kWidth + j * 2 * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kM; ++i) {
      std::int32_t pair;
      __builtin_memcpy(&pair, a + i * a_row + k * a_pair, sizeof pair);
      const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int j = 0; j < kN; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], right[j], left);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kN; ++j) store(c + i * kWidth + j * kLanes, (Vec)acc[i][j]);
  }
}

/// The same for any number of rows. The last ones are split evenly: tiles of 1 or 2 rows wait for their own sums.
template <int kN, bool kAccumulate>
inline void pair_product(const Bf16* a, std::int64_t a_row, std::int64_t a_pair, const Bf16* b, float* c,
                         std::int64_t rows, std::int64_t depth) {
  while (rows > 0) {
    const std::int64_t take = rows >= 2 * kRows ? kRows : rows > kRows ? (rows + 1) / 2 : rows;
    switch (take) {
      case 1: pair_tile<1, kN, kAccumulate>(a, a_row, a_pair, b, c, depth); break;
      case 2: pair_tile<2, kN, kAccumulate>(a, a_row, a_pair, b, c, depth); break;
      case 3: pair_tile<3, kN, kAccumulate>(a, a_row, a_pair, b, c, depth); break;
      case 4: pair_tile<4, kN, kAccumulate>(a, a_row, a_pair, b, c, depth); break;
      case 5: pair_tile<5, kN, kAccumulate>(a, a_row, a_pair, b, c, depth); break;
      default: pair_tile<kRows, kN, kAccumulate>(a, a_row, a_pair, b, c, depth); break;
    }
    a += take * a_row;
    c += take * kWidth;
    rows -= take;
  }
}

/// What forward_bf16.h needs of a way to multiply.
struct DotTiles {
  static constexpr std::int64_t kPiece = 48;   // keys whose scores are in float32 at a time: 12 KB
  static constexpr std::int64_t kBlock = 192;  // keys whose weights are kept for one product with V: 24 KB
  static constexpr std::int64_t kKeyRows = 1;  // K is read in whole groups of so many rows
  static constexpr std::int64_t kKeyStep = 2, kDimStep = 2, kDimVStep = 16;  // operands are padded to multiples
  static constexpr int kFewestVectors = 1;                // narrowest products, for groups of few rows
  static constexpr std::int64_t kFewestRows = 64;         // of a task
  static constexpr double kSmallWork = 2e6;               // multiply-adds not worth a second thread
  static constexpr std::int64_t kCachedElements = 65536;  // of Q and of O, kept by a task in the L2 cache
  static constexpr PairLayout kRight = flat_layout(kWidth);

  struct Scope {};

  /// S[keys][kN vectors] = K[keys][dim] Q^T.
  template <int kN>
  static ONEPASS_INLINE void scores(const Bf16* k, std::int64_t k_stride, std::int64_t keys, const Bf16* q,
                                    std::int64_t dim, float* s) {
    pair_product<kN, false>(k, k_stride, 2, q, s, keys, dim / 2);
  }

  /// V as [key pair][dim_v][2], for the keys from `begin` on of a block.
  template <class Observer>
  static ONEPASS_INLINE void pack_values(const Bf16* v, std::int64_t v_stride, std::int64_t begin, std::int64_t keys,
                                         std::int64_t dim_v, Bf16* out, Observer&& observe) {
    const std::int64_t dim = round_up(dim_v, kDimVStep);
    pack_lanes_of_columns(v, v_stride, keys, dim_v, out + begin * dim, flat_layout(dim), observe);
  }

  /// O^T[dim_v][kN vectors] += V^T P^T over the keys [begin, end) of a block, both even.
  template <int kN>
  static ONEPASS_INLINE void values(const Bf16* v, const Bf16* p, std::int64_t begin, std::int64_t end,
                                    std::int64_t dim_v, float* out) {
    const std::int64_t dim = round_up(dim_v, kDimVStep);
    pair_product<kN, true>(v + begin * dim, 2, 2 * dim, p + begin * kWidth, out, dim_v, (end - begin) / 2);
  }
};

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
