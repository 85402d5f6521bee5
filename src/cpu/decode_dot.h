// The decode's two products for a few packed rows, lanes = head_dim: scores Q K^T, and O += P V. K and V are read in
// place, once, while the lines that follow are prefetched.
#pragma once

#include "cpu/decode_plan.h"
#include "cpu/pack.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Keys that all rows see are read as kRuns runs side by side, a multiple of kStepRun keys each: memory serves several
/// streams in different pages faster than one.
inline constexpr int kRuns = 4;
inline constexpr std::int64_t kStepRun = kStepKeys / kRuns, kStepRunOfHeads = 4;

/// Keys of a tile: `keys` from `first` on in the first run, the others `apart` from it.
struct KeyRuns {
  std::int64_t first = 0, keys = 0, apart = 0;
  int runs = kRuns;
};

/// Rows of K or V of one tile.
struct Rows {
  const char* data = nullptr;          // null: none
  std::int64_t stride = 0, bytes = 0;  // from row to row, of a row
};

/// What is prefetched beside each line that is read: the line `far` bytes further into the second-level cache, the one
/// `near` bytes further from there into the first. Either alone, both into the first, or prefetches in bursts leave a
/// fifth of the memory's speed unused on Zen 4. Processors with AMX do better with one, into the first.
#if defined(ONEPASS_ISA_amx) || defined(ONEPASS_ISA_amx_emulated)
inline constexpr bool kOnePrefetch = true;
#else
inline constexpr bool kOnePrefetch = false;
#endif
struct Ahead {
  std::int64_t near = 0;
  std::int64_t same = 0, next = 0;  // far: within a run; from its end to the run's first rows in the tile read next
  std::int64_t turn = 0;            // the row of a run from which on far is `next`

  ONEPASS_INLINE Ahead() = default;
  /// `heads` side by side: rows of each in turn, so that distances count in whole keys.
  ONEPASS_INLINE Ahead(const Rows& rows, const Rows& after, std::int64_t near_rows, const KeyRuns& keys,
                       std::int64_t heads) {
    const std::int64_t far_rows = heads > 1 ? (kOnePrefetch ? 1 : 8) : rows_of(kOnePrefetch ? 1024 : 4096, rows);
    const std::int64_t distance = clamp_to<std::int64_t>(far_rows, 1, max_of<std::int64_t>(keys.keys, 1));
    near = near_rows * rows.stride;
    turn = keys.first + keys.keys - distance;
    same = distance * rows.stride;
    if (after.data != nullptr && after.stride == rows.stride) {
      next = (after.data - rows.data) + same - (keys.first + keys.keys) * rows.stride;
    }
  }
  static ONEPASS_INLINE Ahead of_keys(const Rows& k, const Rows& v, const KeyRuns& keys, std::int64_t heads) {
    return Ahead(k, v, heads > 1 ? 1 : rows_of(1024, k), keys, heads);
  }
  static ONEPASS_INLINE Ahead of_values(const Rows& v, const Rows& next_k, const KeyRuns& keys, std::int64_t heads) {
    return Ahead(v, next_k, heads > 1 ? 0 : rows_of(512, v), keys, heads);
  }
  /// Far, for row j of the first run.
  ONEPASS_INLINE std::int64_t far(std::int64_t j) const { return j < turn ? same : next; }

 private:
  static ONEPASS_INLINE std::int64_t rows_of(std::int64_t bytes, const Rows& rows) {
    return max_of<std::int64_t>(bytes / max_of<std::int64_t>(rows.bytes, 1), 1);
  }
};

/// A line and what is prefetched beside it. kLevels: 1 near, 2 far.
template <int kLevels>
ONEPASS_INLINE void prefetch(const void* line, std::int64_t near, std::int64_t far) {
  const char* p = static_cast<const char*>(line);
  if constexpr ((kLevels & 1) != 0 && !kOnePrefetch) __builtin_prefetch(p + near, 0, 3);
  if constexpr ((kLevels & 2) != 0) __builtin_prefetch(p + far, 0, kOnePrefetch ? 3 : 1);
}

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

/// Sums of kR rows and kLanes / kR keys, which lie in kParts parts of the row of scores, `apart` from one to the next.
template <int kR, int kParts>
ONEPASS_INLINE void store_scores(float* s, std::int64_t apart, const Vec (&acc)[kLanes], float scale) {
  constexpr int kKeys = kLanes / kR, kPart = kKeys / kParts;
  const Vec sums = sums_of(acc) * scale;
#pragma GCC unroll 4
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      __builtin_memcpy(s + r * kScoreRow + part * apart,
                       reinterpret_cast<const float*>(&sums) + r * kKeys + part * kPart, kPart * sizeof(float));
    }
  }
}

/// Arithmetic in float32 from any storage type. Policy of decode_tasks.h.
template <class StoreType>
struct FloatProducts {
  static constexpr bool kPairs = false, kColumnPairs = false;
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

  /// acc[r][e] += products of kR rows and the kLanes / kR keys at k[e]; prefetches as Ahead says.
  template <int kR>
  static ONEPASS_INLINE void dot(const Element* const* k, std::int64_t near, std::int64_t far, const float* q,
                                 std::int64_t pitch, std::int64_t dim, Vec (&acc)[kLanes]) {
    constexpr int kKeys = kLanes / kR;
    const auto add = [&](std::int64_t q_at, auto load_k) __attribute__((always_inline)) {
      Vec query[kR];
#pragma GCC unroll 4
      for (int r = 0; r < kR; ++r) query[r] = load(q + r * pitch + q_at);
#pragma GCC unroll 16
      for (int e = 0; e < kKeys; ++e) {
        const Vec key = load_k(k[e]);
#pragma GCC unroll 4
        for (int r = 0; r < kR; ++r) acc[r * kKeys + e] = multiply_add(key, query[r], acc[r * kKeys + e]);
      }
    };
    const std::int64_t rest = dim % kLanes, whole = dim - rest;
    for (std::int64_t c = 0; c < whole; c += kLanes) {
      add(
          c, [ c, near, far ](const Element* p) __attribute__((always_inline)) {
            prefetch<3>(p + c, near, far);
            return load_as_float<Store>(p + c);
          });
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
  }
};

/// The sums of four steps of 4 rows and one key of each run: s[r][run][4 keys].
ONEPASS_INLINE void store_transposed_scores([[maybe_unused]] float* s, [[maybe_unused]] std::int64_t apart,
                                            [[maybe_unused]] const Vec* sums) {
#if defined(__AVX512F__)
  const Vec t0 = _mm512_unpacklo_ps(sums[0], sums[1]), t1 = _mm512_unpackhi_ps(sums[0], sums[1]);
  const Vec t2 = _mm512_unpacklo_ps(sums[2], sums[3]), t3 = _mm512_unpackhi_ps(sums[2], sums[3]);
  const Vec run[kRuns] = {_mm512_shuffle_ps(t0, t2, 0x44), _mm512_shuffle_ps(t0, t2, 0xee),
                          _mm512_shuffle_ps(t1, t3, 0x44), _mm512_shuffle_ps(t1, t3, 0xee)};
#pragma GCC unroll 4
  for (int x = 0; x < kRuns; ++x) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      __builtin_memcpy(s + r * kScoreRow + x * apart, reinterpret_cast<const float*>(&run[x]) + 4 * r, 16);
    }
  }
#endif
}

/// Keys of each run that one step of kR rows takes.
template <int kR>
inline constexpr int kStepPart = max_of(1, kLanes / kR / kRuns);

/// True if four steps' sums are stored together.
template <int kR>
inline constexpr bool kTransposed = kLanes == 16 && kR == 4;

/// Scores of a block of kR rows for the keys [j, j + kStepPart) of each run, into s or, if kTransposed, *sums.
template <class Products, int kR>
inline void score_step(const typename Products::Element* k, std::int64_t stride, const KeyRuns& keys, std::int64_t j,
                       const typename Products::Query* q, std::int64_t pitch, std::int64_t dim, float scale, float* s,
                       Vec* sums, const Ahead& ahead) {
  constexpr int kKeys = kLanes / kR, kParts = min_of(kRuns, kKeys), kPart = kKeys / kParts;
#pragma GCC unroll 4
  for (int run = 0; run < kRuns; run += kParts) {
    const typename Products::Element* key[kKeys];
#pragma GCC unroll 16
    for (int e = 0; e < kKeys; ++e) key[e] = k + ((run + e / kPart) * keys.apart + j + e % kPart) * stride;
    Vec acc[kLanes] = {};
    Products::template dot<kR>(key, ahead.near, ahead.far(j), q, pitch, dim, acc);
    if constexpr (kTransposed<kR>) {
      *sums = sums_of(acc) * scale;
    } else {
      store_scores<kR, kParts>(s + run * keys.apart + j, keys.apart, acc, scale);
    }
  }
}

/// The same for `keys` keys in a row; writes up to kLanes keys more.
template <class Products, int kR>
inline void score_keys(const typename Products::Element* k, std::int64_t stride, std::int64_t keys,
                       const typename Products::Query* q, std::int64_t pitch, std::int64_t dim, float scale, float* s) {
  constexpr int kKeys = kLanes / kR;
  for (std::int64_t j = 0; j < keys; j += kKeys) {
    const typename Products::Element* key[kKeys];
#pragma GCC unroll 16
    for (int e = 0; e < kKeys; ++e) key[e] = k + min_of(j + e, keys - 1) * stride;
    Vec acc[kLanes] = {};
    Products::template dot<kR>(key, 0, 0, q, pitch, dim, acc);
    store_scores<kR, 1>(s + j, 0, acc, scale);
  }
}

/// A number as a type, for templates.
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

/// O[kR][kN vectors] += P V, the last vector's columns `last` behind the first one's. v and p: the tile's first key.
/// kPass: which of two passes over the same rows this is, that share the prefetches; -1: the only one.
template <class Store, int kR, int kN, int kPass>
ONEPASS_INLINE void value_tile(const typename Store::Element* v, std::int64_t stride, std::int64_t last,
                               const KeyRuns& range, const float* p, float* o, std::int64_t o_row, const Ahead& ahead) {
  constexpr int kLine = max_of(1, 64 / static_cast<int>(kLanes * sizeof(typename Store::Element)));  // vectors
  Vec acc[kR][kN];
#pragma GCC unroll 4
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) acc[r][n] = load(o + r * o_row + n * kLanes);
  }
  for (std::int64_t j = range.first; j < range.first + range.keys; ++j) {
    const std::int64_t near = ahead.near, far = ahead.far(j) + (kPass == 1 ? 64 : 0);
    for (std::int64_t n_run = 0, run = 0; n_run < range.runs; ++n_run, run += range.apart) {
      const typename Store::Element* row = v + (run + j) * stride;
      Vec value[kN];
#pragma GCC unroll 8
      for (int n = 0; n < kN; ++n) {
        value[n] = load_as_float<Store>(row + (n == kN - 1 ? last : n * kLanes));
        if (n % kLine == 0 && kPass != 1) prefetch<1>(row + n * kLanes, near, far);
        if (n % ((kPass < 0 ? 1 : 2) * kLine) == 0) prefetch<2>(row + n * kLanes, near, far);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kR; ++r) {
        const Vec weight = broadcast(p[r * kScoreRow + run + j]);
#pragma GCC unroll 8
        for (int n = 0; n < kN; ++n) acc[r][n] = multiply_add(weight, value[n], acc[r][n]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) store(o + r * o_row + n * kLanes, acc[r][n]);
  }
}

/// Most rows of P for one pass over V: with them a whole row of V of 128 elements needs no second pass on AVX-512.
/// Memory reads whole rows faster than parts of them.
inline constexpr std::int64_t kValueRows = 2;

/// O[kR][head_dim_v] += P V, from vector `n` on; `pass` as above.
template <class Store, int kR>
inline void value_rows(const typename Store::Element* v, std::int64_t stride, const ValueColumns& columns,
                       const KeyRuns& range, const float* p, float* o, std::int64_t o_row, const Ahead& ahead, int pass,
                       std::int64_t n = 0) {
  if (columns.dim_v < kLanes) {
    for (std::int64_t j = range.first; j < range.first + range.keys && columns.dim_v > 0; ++j) {
      for (std::int64_t n_run = 0, x = j; n_run < range.runs; ++n_run, x += range.apart) {
        const Vec value = load_part<Store>(v + x * stride, columns.dim_v);
        for (int r = 0; r < kR; ++r) store(o + r * o_row, load(o + r * o_row) + p[r * kScoreRow + x] * value);
      }
    }
    return;
  }
  constexpr int kMost = kLanes == 16 ? 8 : 8 / kR;  // as many accumulators as leave registers for the row of V
  const auto tile = [&](auto size) __attribute__((always_inline)) {
    constexpr int kN = decltype(size)::value;
    const std::int64_t first = columns.at(n), last = columns.at(n + kN - 1) - first;
    const auto run = [&](auto which) __attribute__((always_inline)) {
      value_tile<Store, kR, kN, decltype(which)::value>(v + first, stride, last, range, p, o + n * kLanes, o_row,
                                                        ahead);
    };
    pass < 0 ? run(Size<-1>{}) : pass == 0 ? run(Size<0>{}) : run(Size<1>{});
    n += kN;
  };
  while (columns.vectors - n >= kMost) tile(Size<kMost>{});
  if (columns.vectors - n >= 4) tile(Size<4>{});
  if (columns.vectors - n >= 2) tile(Size<2>{});
  if (columns.vectors - n >= 1) tile(Size<1>{});
}

/// O += P V by Tiles::value_tile<kR, kN, kPass>, 32 kN columns at a time. Weight: what P comes as.
template <class Tiles, class Element, class Weight>
struct ValueBlocks {
  /// For as many columns as there are multiples of 32; returns the first vector that is left.
  template <int kR>
  static inline std::int64_t values(const Element* v, std::int64_t stride, std::int64_t dim_v, const KeyRuns& part,
                                    const Weight* p, float* o, std::int64_t o_row, const Ahead& ahead, int pass) {
    std::int64_t n = 0;
    const auto tile = [&](auto size) __attribute__((always_inline)) {
      constexpr int kN = decltype(size)::value;
      const auto run = [&](auto which) __attribute__((always_inline)) {
        Tiles::template value_tile<kR, kN, decltype(which)::value>(v + 32 * n, stride, part, p, o + 32 * n, o_row,
                                                                   ahead);
      };
      pass < 0 ? run(Size<-1>{}) : pass == 0 ? run(Size<0>{}) : run(Size<1>{});
      n += kN;
    };
    const std::int64_t count = dim_v / 32;
    while (count - n >= 4) tile(Size<4>{});
    if (count - n >= 2) tile(Size<2>{});
    if (count - n >= 1) tile(Size<1>{});
    return 2 * n;
  }
};

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
