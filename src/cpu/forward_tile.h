// One group of query rows against one block of keys: scores, online softmax, weighted sum. Everything is transposed,
// S^T[key][row] = K Q^T and O^T[dim][row] += V^T P^T with one query row a lane, so that the softmax needs no
// horizontal reduction and K and V are read in place, as broadcast operands.
#pragma once

#include "cpu/product.h"
#include "cpu/score.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Rows i0 ... i0 + rows - 1 of one head, one a lane, and their running results.
struct RowGroup {
  std::int64_t i0, rows;  // rows <= kWidth
  Interval any, all;      // keys seen by at least one, by every row
  const float* q_t;       // [head_dim][kWidth]
  float* out_t;           // [head_dim_v][kWidth], unnormalised
  float* m;               // [kWidth] running maximum of the scores, in their units; -inf at first
  float* l;               // [kWidth] running sum of the weights
  bool fresh = true;      // no block seen: out_t and l hold nothing yet
};

/// Units of the scores in a tile. Plain: raw q.k, scaled only as exponents, which costs nothing and rounds nothing
/// twice; with modifiers: natural, scale applied. A score's weight is 2^((s - m) * exponent). Raw scores rise with the
/// weight: a negative scale's sign is in Q, a zero scale's zero too.
struct Units {
  float q_factor, exponent, natural;  // natural: times this, a raw score is scale q.k

  ONEPASS_INLINE explicit Units(const ScoreSpec& spec) {
    const float scale = static_cast<float>(spec.scale), magnitude = scale < 0 ? -scale : scale;
    q_factor = scale > 0 ? 1.0f : scale < 0 ? -1.0f : 0.0f;
    natural = scale == 0 ? 1.0f : magnitude;
    exponent = spec.modified() ? kLog2e : natural * kLog2e;
  }
};

/// Keys [j0, j0 + keys) with their rows of K and V in float32, `k_row` and `v_row` elements apart.
struct KeyBlock {
  std::int64_t j0, keys;
  const float *k, *v;
  std::int64_t k_row, v_row;
  std::int64_t dim, dim_v;
};

/// S^T = K Q^T, and the maximum of each row on the way.
template <int kN>
ONEPASS_INLINE void scores(const RowGroup& g, const KeyBlock& block, float* s, Vec (&largest)[kN]) {
  for (int v = 0; v < kN; ++v) largest[v] = broadcast(-kInf);
  for_row_tiles(
      block.keys, [&](std::int64_t j, auto count) __attribute__((always_inline)) {
        product_tile<count.value, kN>(
            block.k + j * block.k_row, block.k_row, 1, g.q_t, kWidth, block.dim,
            [](int, int) __attribute__((always_inline)) { return Vec{}; },
            [&](int r, int v, Vec x) __attribute__((always_inline)) {
              store(s + (j + r) * kWidth + v * kLanes, x);
              largest[v] = max(largest[v], x);
            });
      });
}

template <int kN>
ONEPASS_INLINE void row_maxima(const float* s, std::int64_t keys, Vec (&largest)[kN]) {
  for (int v = 0; v < kN; ++v) largest[v] = broadcast(-kInf);
  for (std::int64_t j = 0; j < keys; ++j) {
    for (int v = 0; v < kN; ++v) largest[v] = max(largest[v], load(s + j * kWidth + v * kLanes));
  }
}

/// True if every element is finite: x - x is NaN where it is not.
ONEPASS_INLINE bool all_finite(const float* rows, std::int64_t pitch, std::int64_t count, std::int64_t dim) {
  Vec wrong{};
  for (std::int64_t r = 0; r < count; ++r) {
    const float* row = rows + r * pitch;
    std::int64_t c = 0;
    for (; c + kLanes <= dim; c += kLanes) wrong += load(row + c) - load(row + c);
    for (; c < dim; ++c) wrong[0] += row[c] - row[c];
  }
  return !any(wrong != wrong);
}

/// O^T = O^T * alpha + V^T P^T. With `guarded`, elements of V that a row does not see count as 0 for that row: a
/// product with its weight, 0, would make NaN of NaN and Inf. Same operations in the same order, so the same bits
/// otherwise.
template <int kN>
ONEPASS_INLINE void weighted_sum(const RowGroup& g, const KeyBlock& block, const float* p, const Vec (&alpha)[kN]) {
  for_row_tiles(
      block.dim_v, [&](std::int64_t c, auto count) __attribute__((always_inline)) {
        product_tile<count.value, kN>(
            block.v + c, 1, block.v_row, p, kWidth, block.keys,
            [&](int r, int v) __attribute__((always_inline)) {
              return g.fresh ? Vec{} : load(g.out_t + (c + r) * kWidth + v * kLanes) * alpha[v];
            },
            [&](int r, int v, Vec x)
                __attribute__((always_inline)) { store(g.out_t + (c + r) * kWidth + v * kLanes, x); });
      });
}

template <int kN>
__attribute__((noinline)) void weighted_sum_guarded(const RowGroup& g, const KeyBlock& block, const Sequence& sequence,
                                                    const float* p, const Vec (&alpha)[kN]) {
  for (int v = 0; v < kN; ++v) {
    IntVec lo, hi;  // keys of the block that lane sees
    for (int lane = 0; lane < kLanes; ++lane) {
      const Interval seen = sequence.visible(g.i0 + v * kLanes + lane);
      lo[lane] = static_cast<std::int32_t>(clamp_to<std::int64_t>(seen.begin - block.j0, 0, block.keys));
      hi[lane] = static_cast<std::int32_t>(clamp_to<std::int64_t>(seen.end - block.j0, 0, block.keys));
    }
    for (std::int64_t c = 0; c < block.dim_v; ++c) {
      float* out = g.out_t + c * kWidth + v * kLanes;
      Vec acc = g.fresh ? Vec{} : load(out) * alpha[v];
      for (std::int64_t j = 0; j < block.keys; ++j) {
        const std::int32_t key = static_cast<std::int32_t>(j);
        const Vec x = select((lo <= key) & (hi > key), broadcast(block.v[j * block.v_row + c]), Vec{});
        acc += x * load(p + j * kWidth + v * kLanes);
      }
      store(out, acc);
    }
  }
}

/// Algorithm 1 of FlashAttention-2 (Dao 2023), lines 8 to 10, for one key block. kN vectors of rows; kModified: with
/// score modifiers. `s`: [keys][kWidth].
template <int kN, bool kModified>
ONEPASS_INLINE void attend_block(RowGroup& g, const KeyBlock& block, const HeadScore& h, const Units& units, float* s) {
  const Sequence& sequence = *h.sequence;
  const bool masked = block.j0 < g.all.begin || block.j0 + block.keys > g.all.end;
  Vec largest[kN];
  scores<kN>(g, block, s, largest);
  if constexpr (kModified) {
    for (std::int64_t x = 0; x < block.keys * kWidth; x += kLanes) store(s + x, load(s + x) * units.natural);
    modify_scores(h, s, block.keys, g.i0, g.rows, block.j0);
  }
  if (masked) mask_scores(sequence, s, block.keys, g.i0, block.j0);
  if (kModified || masked) row_maxima<kN>(s, block.keys, largest);

  // m = max(m, row maximum); the exponent's reference is m, or 0 while a row has seen nothing but -inf.
  Vec reference[kN], alpha[kN], sum[kN];
  for (int v = 0; v < kN; ++v) {
    const Vec before = load(g.m + v * kLanes), now = max(before, largest[v]);
    reference[v] = select(now == -kInf, Vec{}, now);
    alpha[v] = exp2((before - reference[v]) * units.exponent);
    sum[v] = Vec{};
    store(g.m + v * kLanes, now);
  }
  for (std::int64_t j = 0; j < block.keys; ++j) {
#pragma GCC unroll 4
    for (int v = 0; v < kN; ++v) {
      float* at = s + j * kWidth + v * kLanes;
      const Vec p = exp2((load(at) - reference[v]) * units.exponent);
      sum[v] += p;
      store(at, p);
    }
  }
  for (int v = 0; v < kN; ++v) {
    float* l = g.l + v * kLanes;
    store(l, g.fresh ? sum[v] : load(l) * alpha[v] + sum[v]);
  }
  if (kModified && h.spec->dropout.threshold != 0) drop_tile(h, s, block.keys, g.i0, block.j0);

  if (masked && !all_finite(block.v, block.v_row, block.keys, block.dim_v)) {
    weighted_sum_guarded<kN>(g, block, sequence, s, alpha);
  } else {
    weighted_sum<kN>(g, block, s, alpha);
  }
  g.fresh = false;
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
