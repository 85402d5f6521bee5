// The bfloat16 backward's matrix products by vdpbf16ps: register tiles of 6 rows by 64 lanes, the left operand by
// broadcast of pairs.
#pragma once

#include "cpu/backward_plan_bf16.h"
#include "cpu/product.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// C[kM][kN vectors] (+)= A B over `pairs`. Pair k of A's row i is at a[i a_row + k a_pair]; B's row of pairs k at
/// b[k b_pair].
template <int kM, int kN>
ONEPASS_INLINE void dot_tile(float* c, std::int64_t c_row, const Bf16* a, std::int64_t a_row, std::int64_t a_pair,
                             const Bf16* b, std::int64_t b_pair, std::int64_t pairs, bool accumulate) {
  __m512 acc[kM][kN];
#pragma GCC unroll 8
  for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kN; ++j)
      acc[i][j] = accumulate ? (__m512)load(c + i * c_row + j * kLanes) : _mm512_setzero_ps();
  }
  for (std::int64_t k = 0; k < pairs; ++k) {
    __m512bh right[kN];
#pragma GCC unroll 4
    for (int j = 0; j < kN; ++j) right[j] = (__m512bh)_mm512_loadu_si512(b + k * b_pair + j * 2 * kLanes);
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
    for (int j = 0; j < kN; ++j) store(c + i * c_row + j * kLanes, (Vec)acc[i][j]);
  }
}

/// The same for any number of rows and vectors.
__attribute__((noinline)) void dot_product(float* c, std::int64_t c_row, const Bf16* a, std::int64_t a_row,
                                           std::int64_t a_pair, const Bf16* b, std::int64_t b_pair, std::int64_t rows,
                                           std::int64_t vectors, std::int64_t pairs, bool accumulate) {
  for (std::int64_t v = 0; v < vectors; v += kVectors) {
    float* out = c + v * kLanes;
    const Bf16* right = b + v * 2 * kLanes;
    const auto columns = [&](auto vector_count) __attribute__((always_inline)) {
      for_row_tiles(rows, [&](std::int64_t i, auto row_count) {
        dot_tile<decltype(row_count)::value, decltype(vector_count)::value>(
            out + i * c_row, c_row, a + i * a_row, a_row, a_pair, right, b_pair, pairs, accumulate);
      });
    };
    switch (vectors - v) {
      case 1: columns(RowCount<1>{}); break;
      case 2: columns(RowCount<2>{}); break;
      case 3: columns(RowCount<3>{}); break;
      default: columns(RowCount<4>{}); break;
    }
  }
}

/// What backward_bf16.h needs of a way to multiply.
struct DotProducts {
  struct Scope {};
  static constexpr std::int64_t kDepth = 2, kColumns = 16;  // contracted lengths and head dims are padded to multiples
  static constexpr std::int64_t kBlockQ = 128;              // query rows packed at a time
  static constexpr std::int64_t kMostKeys = 512;            // of a task
  static constexpr std::int64_t kFewestKeys = 64;           // of a task, unless there are fewer
  static constexpr std::int64_t kCachedElements = 131072;   // of dK and dV together: they stay in the L2 cache
  static constexpr double kSmallWork = 1e6;                 // multiply-adds not worth a second thread

  static constexpr PairLayout right_layout(std::int64_t lanes) { return flat_layout(lanes); }

  /// S^T[keys][64] = K Q^T and dP^T = V dO^T for 64 of `lanes` query rows.
  static ONEPASS_INLINE void scores(const ScoreOperands& x, std::int64_t lanes, std::int64_t keys) {
    dot_product(x.s, kWidth, x.k, x.dim, 2, x.q, 2 * lanes, keys, kVectors, x.depth / 2, false);
    dot_product(x.dp, kWidth, x.v, x.dim_v, 2, x.dout, 2 * lanes, keys, kVectors, x.depth_v / 2, false);
  }

  /// dV += P^T dO and dK += dS^T Q over the query rows [begin, end). P^T's and dS^T's rows are `lanes` apart.
  static ONEPASS_INLINE void add_key_gradients(const KeyGradientOperands& x, std::int64_t lanes, std::int64_t keys,
                                               std::int64_t begin, std::int64_t end) {
    dot_product(x.dv, x.dim_v, x.p + begin, lanes, 2, x.dout + begin * x.dim_v, 2 * x.dim_v, keys, x.dim_v / kLanes,
                (end - begin) / 2, true);
    dot_product(x.dk, x.dim, x.ds + begin, lanes, 2, x.q + begin * x.dim, 2 * x.dim, keys, x.dim / kLanes,
                (end - begin) / 2, true);
  }

  /// K as dQ = dS K wants it, [key pair][dim][2].
  static void pack_keys(const Bf16* k, std::int64_t keys, std::int64_t dim, Bf16* out) {
    pack_lanes_of_columns(k, dim, keys, dim, out, flat_layout(dim));
  }

  /// Where the query rows from `lane` on begin in a block's dQ, `width` rows of `dim` in a layout that only these
  /// functions know.
  static constexpr std::int64_t query_at(std::int64_t lane, std::int64_t dim) { return lane * dim; }
  /// dQ (+)= dS K over the keys [begin, end), for `rows` query rows from `lane` on; dS as [key pair][lanes][2].
  static ONEPASS_INLINE void add_query_gradient(float* dq, std::int64_t, std::int64_t dim, const Bf16* k, std::int64_t,
                                                const Bf16* ds, std::int64_t lanes, std::int64_t lane,
                                                std::int64_t rows, std::int64_t begin, std::int64_t end,
                                                bool accumulate) {
    dot_product(dq, dim, ds + begin * lanes + 2 * lane, 2, 2 * lanes, k + begin * dim, 2 * dim, rows, dim / kLanes,
                (end - begin) / 2, accumulate);
  }
  static void clear_query_gradient(float* dq, std::int64_t, std::int64_t dim, std::int64_t rows) {
    __builtin_memset(dq, 0, static_cast<std::size_t>(4 * rows * dim));
  }
  /// grad_q = dQ * scale.
  static void store_query_gradient(const Tensor& to, std::int64_t b, std::int64_t seq, std::int64_t head,
                                   std::int64_t rows, std::int64_t dim, const float* dq, std::int64_t,
                                   std::int64_t padded_dim, float scale) {
    store_rows(to, b, seq, head, rows, dim, dq, padded_dim, scale);
  }
};

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
