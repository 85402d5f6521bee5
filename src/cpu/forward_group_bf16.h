// One group of 64 query rows against a block of keys, in bfloat16. Scores are transposed, a query row is a lane, so
// that the softmax needs no horizontal reduction:
//   for a piece of keys:  S^T = K Q^T in float32, P^T = 2^(S^T - reference) rounded to bfloat16
//   O^T += V^T P^T, once for the whole block
// A row's reference is its maximum over the first piece in which it sees a key. Unlike the running maximum it is kept,
// until a block's sum of weights shows that it was too low; then that block is done again with a higher one.
#pragma once

#include "core/problem.h"
#include "cpu/pack_bf16.h"
#include "cpu/score.h"
#include "cpu/values_bf16.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

static_assert(kWidth == 64);

/// A block's sum of weights above this, or NaN, asks for a new reference.
inline constexpr float kSumLimit = 0x1p60f;

/// A multiply-add takes a rounded reference from an exact product: from here on what is left over may be no weight of
/// a row's maximum.
inline constexpr float kLargeReference = 0x1p20f;

/// Rows i0 ... i0 + rows - 1 of one head, one a lane, and their running results. Lanes at or past `rows` hold zeros.
struct RowGroup {
  std::int64_t i0, rows;
  Interval any, all;  // keys seen by at least one, by every row
  const Bf16* q;      // packed
  float* out;         // O^T[dim_v][kWidth], not divided by the sum
  float* reference;   // [kWidth], -inf until a row has seen a key
  float* sum;         // [kWidth] of the weights before they were rounded
  bool unset;         // some row has no reference yet
  bool large;         // some row's reference is above kLargeReference
};

/// Memory of a worker for the group at hand.
struct GroupScratch {
  float* s;  // [piece][kWidth]
  Bf16* p;   // [block] keys, packed
  Bf16* v;   // [block] keys, packed
};

/// Keys of a block, whose first is key `start` of the sequence; row 0 of k and v is that key.
struct KeyBlock {
  std::int64_t start;
  const Bf16 *k, *v;
  std::int64_t k_stride, v_stride;
  bool special_values;  // elements of V that were packed as 0
};

/// kN: vectors of lanes in use. Plain scores stay as the product gives them, so that 2^(log2e scale s - reference) is
/// one multiply-add. Modified ones are in natural units and the reference comes off first: a bias near float's limits
/// stays finite.
template <class Tiles, int kN, bool kModified>
struct GroupStep {
  const Problem& problem;
  const HeadScore& head;
  const GroupScratch& scratch;
  std::int64_t dim;  // padded
  RowGroup& g;
  const KeyBlock& block;

  // Weights of a piece are evenly spaced rows of the right operand.
  static_assert(Tiles::kPiece <= 32 || Tiles::kRight.pair_group == 16 * Tiles::kRight.row);
  static constexpr float kBase = kModified ? kLog2e : 1.0f;  // natural or base-2 units to base 2

  ONEPASS_INLINE Vec factor() const {
    return broadcast(kModified ? 1.0f : static_cast<float>(problem.score.scale * 1.4426950408889634));
  }

  /// Scores of the keys [j, j + keys), ready for the softmax; returns the padded number of keys.
  ONEPASS_INLINE std::int64_t make_scores(std::int64_t j, std::int64_t keys) const {
    float* s = scratch.s;
    if (dim > 0) {
      Tiles::template scores<kN>(block.k + (j - block.start) * block.k_stride, block.k_stride, keys, g.q, dim, s);
    } else {
      for (std::int64_t x = 0; x < keys * kWidth; x += kLanes) store(s + x, Vec{});
    }
    if constexpr (kModified) {
      const float scale = static_cast<float>(problem.score.scale);
      for (std::int64_t x = 0; x < keys * kWidth; x += kLanes) store(s + x, load(s + x) * scale);
      modify_scores(head, s, keys, g.i0, g.rows, j);
    }
    if (j < g.all.begin || j + keys > g.all.end) mask_scores(*head.sequence, s, keys, g.i0, j);
    const std::int64_t padded = round_up(keys, Tiles::kKeyStep);
    for (std::int64_t x = keys * kWidth; x < padded * kWidth; x += kLanes) store(s + x, broadcast(-kInf));
    return padded;
  }

  /// Raises `largest` to the scores at hand.
  ONEPASS_INLINE void row_maxima(std::int64_t keys, Vec (&largest)[kN]) const {
    const Vec f = factor();
    for (std::int64_t j = 0; j < keys; ++j) {
#pragma GCC unroll 4
      for (int x = 0; x < kN; ++x) largest[x] = max(largest[x], load(scratch.s + j * kWidth + x * kLanes) * f);
    }
  }

  /// Gives rows without a reference the maximum of the scores at hand.
  __attribute__((noinline)) void set_references(std::int64_t keys) const {
    Vec largest[kN];
    for (int x = 0; x < kN; ++x) largest[x] = broadcast(-kInf);
    row_maxima(keys, largest);
    g.unset = false;
    for (int x = 0; x < kN; ++x) {
      const Vec old = load(g.reference + x * kLanes), now = select(old == -kInf, largest[x], old);
      store(g.reference + x * kLanes, now);
      g.unset = g.unset || any(now == -kInf);
    }
    mark_large();
  }

  ONEPASS_INLINE IntVec is_large(Vec reference) const {
    const Vec magnitude = as_float(as_int(reference) & 0x7fffffff);
    return kModified ? IntVec{} : (magnitude > kLargeReference) & (magnitude < kInf);
  }
  ONEPASS_INLINE void mark_large() const {
    for (int x = 0; x < kN; ++x) g.large = g.large || any(is_large(load(g.reference + x * kLanes)));
  }

  /// Takes large references from the rounded products, so that the scores are what the multiply-add makes of them
  /// without a reference.
  __attribute__((noinline)) void subtract_large(std::int64_t keys, Vec (&reference)[kN]) const {
    for (int x = 0; x < kN; ++x) {
      const IntVec large = is_large(reference[x]);
      for (std::int64_t j = 0; j < keys; ++j) {
        float* s = scratch.s + j * kWidth + x * kLanes;
        store(s, select(large, (load(s) * factor() - reference[x]) / factor(), load(s)));
      }
      reference[x] = select(large, Vec{}, reference[x]);
    }
  }

  /// Makes weights of the scores at hand, [j, j + keys), in the place of the packed weights from `at` on.
  ONEPASS_INLINE void make_weights(std::int64_t j, std::int64_t at, std::int64_t keys, Vec (&sums)[kN]) const {
    const Vec f = factor();
    Vec reference[kN];
    for (int x = 0; x < kN; ++x) {
      const Vec r = load(g.reference + x * kLanes);
      reference[x] = select(r == -kInf, Vec{}, r);
    }
    if (__builtin_expect(g.large, 0)) subtract_large(keys, reference);
    const auto weight = [&](const float* s, int x) __attribute__((always_inline)) {
      return exp2<true>(kModified ? (load(s + x * kLanes) - reference[x]) * kLog2e
                                  : multiply_add(load(s + x * kLanes), f, -reference[x]));
    };
    constexpr PairLayout to = Tiles::kRight;
    float* s = scratch.s;
    Bf16* p = scratch.p + at / 32 * to.pair_group + at / 2 % 16 * to.row;
    if (kModified && problem.score.dropout.threshold != 0) {
      for (std::int64_t i = 0; i < keys; ++i) {
        for (int x = 0; x < kN; ++x) {
          const Vec w = weight(s + i * kWidth, x);
          sums[x] += w;
          store(s + i * kWidth + x * kLanes, w);
        }
      }
      drop_tile(head, s, keys, g.i0, j);
      for (std::int64_t i = 0; i < keys; i += 2) {
        for (int x = 0; x < kN; ++x) {
          const float* even = s + i * kWidth + x * kLanes;
          _mm512_storeu_si512(p + i / 2 * to.row + x * to.lane_group, round_to_pairs(load(even), load(even + kWidth)));
        }
      }
      return;
    }
    for (std::int64_t i = 0; i < keys; i += 2) {
#pragma GCC unroll 4
      for (int x = 0; x < kN; ++x) {
        const Vec even = weight(s + i * kWidth, x), odd = weight(s + (i + 1) * kWidth, x);
        sums[x] += even + odd;
        _mm512_storeu_si512(p + i / 2 * to.row + x * to.lane_group, round_to_pairs(even, odd));
      }
    }
  }

  /// Raises the references of the rows whose sum of weights over the keys [begin, end) is out of bounds.
  __attribute__((noinline)) void raise_references(std::int64_t begin, std::int64_t end, const Vec (&sums)[kN]) const {
    Vec largest[kN];
    for (int x = 0; x < kN; ++x) largest[x] = broadcast(-kInf);
    for (std::int64_t j = begin; j < end; j += Tiles::kPiece) {
      const std::int64_t keys = min_of(Tiles::kPiece, end - j);
      make_scores(j, keys);
      row_maxima(keys, largest);
    }
    for (int x = 0; x < kN; ++x) {
      const auto scale_by = [x](float* p, Vec v) { store(p + x * kLanes, load(p + x * kLanes) * v); };
      // A row within bounds keeps every bit: what happens to its neighbours is not its concern.
      const IntVec in_bounds = sums[x] <= kSumLimit;
      const Vec old = load(g.reference + x * kLanes), now = select(in_bounds, old, max(largest[x], old));
      const Vec shrink = select(in_bounds, broadcast(1), exp2((old - now) * kBase));
      store(g.reference + x * kLanes, now);
      scale_by(g.sum, shrink);
      for (std::int64_t c = 0; c < problem.head_dim_v; ++c) scale_by(g.out + c * kWidth, shrink);
    }
    mark_large();
  }

  /// Adds the keys [begin, end) of the block.
  inline void run(std::int64_t begin, std::int64_t end) const {
    Vec sums[kN];
    std::int64_t padded_end = end;
    for (bool again = false;; again = true) {
      for (int x = 0; x < kN; ++x) sums[x] = Vec{};
      for (std::int64_t j = begin; j < end; j += Tiles::kPiece) {
        const std::int64_t keys = min_of(Tiles::kPiece, end - j), padded = make_scores(j, keys);
        if (__builtin_expect(g.unset, 0)) set_references(keys);
        make_weights(j, j - block.start, padded, sums);
        padded_end = j + padded;
      }
      IntVec out_of_bounds{};  // and not lost to NaN before
      for (int x = 0; x < kN; ++x) {
        const Vec before = load(g.sum + x * kLanes);
        out_of_bounds |= ~(sums[x] <= kSumLimit) & (before == before);
      }
      if (__builtin_expect(again || !any(out_of_bounds), 1)) break;
      raise_references(begin, end, sums);
    }
    for (int x = 0; x < kN; ++x) {
      store(g.sum + x * kLanes, load(g.sum + x * kLanes) + sums[x]);
    }
    if (problem.head_dim_v == 0) return;
    Tiles::template values<kN>(scratch.v, scratch.p, begin - block.start, padded_end - block.start, problem.head_dim_v,
                               g.out);
    if (__builtin_expect(block.special_values, 0)) {
      add_special_values(block.v + (begin - block.start) * block.v_stride, block.v_stride, end - begin,
                         problem.head_dim_v, scratch.p, begin - block.start, Tiles::kRight, *head.sequence, g.i0, begin,
                         g.out);
    }
  }
};

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
