// The decode's two products for a few packed rows, lanes = head_dim: scores Q K^T, and O += P V. K and V are read in
// place, once, while the lines that follow are prefetched.
#pragma once

#include "cpu/decode_plan.h"
#include "cpu/pack.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Rows that will be read next: a prefetch of row r each time row r of the current ones is read.
struct Ahead {
  const char* data = nullptr;
  std::int64_t stride = 0, bytes = 0;  // of a row; bytes 0: nothing to prefetch

  ONEPASS_INLINE void prefetch(std::int64_t row) const {
    const char* p = data + row * stride;
    for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at);
  }
};

/// Lane i of the result is the sum over the lanes of a[i].
ONEPASS_INLINE Vec sums_of(const Vec (&a)[kLanes]) {
  // Four rows at a time, inside each 128 bits: lane i of quad[g] is a part of the sum of a[4 g + i].
  Vec quad[kLanes / 4];
#pragma GCC unroll 4
  for (int g = 0; g < kLanes / 4; ++g) {
    const Vec* x = a + 4 * g;
#if defined(__AVX512F__)
    const Vec t0 = _mm512_unpacklo_ps(x[0], x[1]) + _mm512_unpackhi_ps(x[0], x[1]);
    const Vec t1 = _mm512_unpacklo_ps(x[2], x[3]) + _mm512_unpackhi_ps(x[2], x[3]);
    quad[g] = _mm512_shuffle_ps(t0, t1, 0x44) + _mm512_shuffle_ps(t0, t1, 0xee);
#elif defined(__AVX2__)
    quad[g] = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
#else
    for (int i = 0; i < 4; ++i) quad[g][i] = (x[i][0] + x[i][2]) + (x[i][1] + x[i][3]);
#endif
  }
#if defined(__AVX512F__)
  const Vec u0 = _mm512_shuffle_f32x4(quad[0], quad[1], 0x44) + _mm512_shuffle_f32x4(quad[0], quad[1], 0xee);
  const Vec u1 = _mm512_shuffle_f32x4(quad[2], quad[3], 0x44) + _mm512_shuffle_f32x4(quad[2], quad[3], 0xee);
  return _mm512_shuffle_f32x4(u0, u1, 0x88) + _mm512_shuffle_f32x4(u0, u1, 0xdd);
#elif defined(__AVX2__)
  return _mm256_permute2f128_ps(quad[0], quad[1], 0x20) + _mm256_permute2f128_ps(quad[0], quad[1], 0x31);
#else
  return quad[0];
#endif
}

/// s[r][e] = sums[r * kKeys + e] * scale
template <int kR>
ONEPASS_INLINE void store_scores(float* s, const Vec (&acc)[kLanes], float scale) {
  constexpr int kKeys = kLanes / kR;
  const Vec sums = sums_of(acc) * scale;
#pragma GCC unroll 4
  for (int r = 0; r < kR; ++r) {
    __builtin_memcpy(s + r * kScoreRow, reinterpret_cast<const float*>(&sums) + r * kKeys, kKeys * sizeof(float));
  }
}

/// Scores in float32 from any storage type. Policy of decode_tasks.h.
template <class StoreType>
struct FloatScores {
  using Store = StoreType;
  using Element = typename Store::Element;
  using Query = float;

  /// A row of Q, widened. A last, incomplete vector holds the last kLanes elements, 0 where they came before.
  static inline void load_query(float* to, std::int64_t pitch, const Tensor& q, std::int64_t b, std::int64_t seq,
                                std::int64_t head, std::int64_t dim) {
    widen_rows(to, pitch, q, b, seq, head, 1, dim);
    const std::int64_t rest = dim % kLanes, whole = dim - rest;
    if (whole == 0 || rest == 0) return;
    for (std::int64_t c = rest; c-- > 0;) to[whole + kLanes - rest + c] = to[whole + c];
    for (std::int64_t c = 0; c < kLanes - rest; ++c) to[whole + c] = 0;
  }

  /// Scores of kR rows and kLanes / kR keys.
  template <int kR>
  static ONEPASS_INLINE void step(const Element* const* k, const float* q, std::int64_t pitch, std::int64_t dim,
                                  float scale, float* s) {
    constexpr int kKeys = kLanes / kR;
    Vec acc[kLanes] = {};
    const auto add = [&](std::int64_t q_at, auto load_k) __attribute__((always_inline)) {
      Vec query[kR];
#pragma GCC unroll 4
      for (int r = 0; r < kR; ++r) query[r] = load(q + r * pitch + q_at);
#pragma GCC unroll 16
      for (int e = 0; e < kKeys; ++e) {
        const Vec key = load_k(k[e]);
#pragma GCC unroll 4
        for (int r = 0; r < kR; ++r) acc[r * kKeys + e] += key * query[r];
      }
    };
    const std::int64_t rest = dim % kLanes, whole = dim - rest;
    for (std::int64_t c = 0; c < whole; c += kLanes) {
      add(
          c, [c](const Element* p) __attribute__((always_inline)) { return load_as_float<Store>(p + c); });
    }
    if (rest != 0 && whole != 0) {
      const IntVec counted = lane_index() >= static_cast<std::int32_t>(kLanes - rest);
      add(
          whole, [ dim, counted ](const Element* p) __attribute__((always_inline)) {
            return as_float(as_int(load_as_float<Store>(p + dim - kLanes)) & counted);
          });
    } else if (rest != 0) {
      add(
          0, [rest](const Element* p) __attribute__((always_inline)) { return load_part<Store>(p, rest); });
    }
    store_scores<kR>(s, acc, scale);
  }
};

/// Scores of `rows` (a block of up to 4) for `keys` keys; writes up to kLanes keys more.
template <class Scores, int kR>
ONEPASS_INLINE void score_block(const typename Scores::Element* k, std::int64_t stride, std::int64_t keys,
                                const typename Scores::Query* q, std::int64_t pitch, std::int64_t dim, float scale,
                                float* s, const Ahead& ahead) {
  constexpr int kKeys = kLanes / kR;
  for (std::int64_t j = 0; j < keys; j += kKeys) {
    const typename Scores::Element* key[kKeys];
#pragma GCC unroll 16
    for (int e = 0; e < kKeys; ++e) {
      key[e] = k + min_of(j + e, keys - 1) * stride;
      ahead.prefetch(j + e);
    }
    Scores::template step<kR>(key, q, pitch, dim, scale, s + j);
  }
}

template <int kN>
struct Size {
  static constexpr int value = kN;
};

/// Columns of V in vectors; the last one ends at head_dim_v and may overlap the one before. O keeps them apart.
struct ValueColumns {
  std::int64_t dim_v, vectors;

  ONEPASS_INLINE explicit ValueColumns(std::int64_t dim) : dim_v(dim), vectors(ceil_div(dim, kLanes)) {}
  ONEPASS_INLINE std::int64_t at(std::int64_t vector) const {
    return max_of<std::int64_t>(0, min_of<std::int64_t>(vector * kLanes, dim_v - kLanes));
  }
};

/// O[kR][kN vectors] += P[kR][keys] V, the last vector's columns `last` behind the first one's.
template <class Store, int kR, int kN>
ONEPASS_INLINE void value_tile(const typename Store::Element* v, std::int64_t stride, std::int64_t last,
                               std::int64_t keys, const float* p, float* o, std::int64_t o_row, const Ahead& ahead) {
  Vec acc[kR][kN];
#pragma GCC unroll 4
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) acc[r][n] = load(o + r * o_row + n * kLanes);
  }
  for (std::int64_t j = 0; j < keys; ++j) {
    Vec value[kN];
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) value[n] = load_as_float<Store>(v + j * stride + (n == kN - 1 ? last : n * kLanes));
    ahead.prefetch(j);
#pragma GCC unroll 4
    for (int r = 0; r < kR; ++r) {
      const Vec weight = broadcast(p[r * kScoreRow + j]);
#pragma GCC unroll 8
      for (int n = 0; n < kN; ++n) acc[r][n] += weight * value[n];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) store(o + r * o_row + n * kLanes, acc[r][n]);
  }
}

/// O[kR][head_dim_v] += P V.
template <class Store, int kR>
inline void value_rows(const typename Store::Element* v, std::int64_t stride, const ValueColumns& columns,
                       std::int64_t keys, const float* p, float* o, std::int64_t o_row, Ahead ahead) {
  if (columns.vectors == 0) return;
  if (columns.dim_v < kLanes) {
    for (std::int64_t j = 0; j < keys; ++j) {
      const Vec value = load_part<Store>(v + j * stride, columns.dim_v);
      for (int r = 0; r < kR; ++r) store(o + r * o_row, load(o + r * o_row) + p[r * kScoreRow + j] * value);
    }
    return;
  }
  // As many accumulators as leave registers for a row of V.
  constexpr int kRegisters = kLanes == 16 ? 16 : 8;
  constexpr int kMost = kR == 1 ? 8 : kRegisters / (kR == 2 ? 2 : 4);
  std::int64_t n = 0;
  const auto tile = [&](auto size) __attribute__((always_inline)) {
    constexpr int kN = decltype(size)::value;
    const std::int64_t first = columns.at(n);
    if constexpr (kN <= kMost) {
      value_tile<Store, kR, kN>(v + first, stride, columns.at(n + kN - 1) - first, keys, p, o + n * kLanes, o_row,
                                ahead);
    }
    n += kN;
    ahead.bytes = 0;
  };
  while (kMost >= 8 && columns.vectors - n >= 8) tile(Size<8>{});
  while (kMost >= 4 && columns.vectors - n >= 4) tile(Size<4>{});
  while (columns.vectors - n >= 2) tile(Size<2>{});
  while (columns.vectors - n >= 1) tile(Size<1>{});
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
