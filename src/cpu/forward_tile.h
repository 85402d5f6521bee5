// One group of query rows against one block of keys: scores, online softmax, weighted sum. Everything is transposed,
// S^T[key][row] = K Q^T and O^T[dim][row] += V^T P^T with one query row a lane, so that the softmax needs no
// horizontal reduction and K and V are read in place, as broadcast operands.
#pragma once

#include "cpu/product.h"
#include "cpu/score.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Keys of a block. 96 rows of 64 scores are 24 KB, which stay in the first-level cache.
constexpr std::int64_t kBlockK = 96;

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

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
/// twice. With modifiers: natural, q.k * score_scale. A score's weight is 2^((s - m) * exponent). Raw scores must rise
/// with the weight and survive a division by the scale: so a negative sign is in Q, and a tiny scale as a whole.
struct Units {
  float q_factor, score_scale, exponent;
  float natural;  // turns the units into natural ones

  ONEPASS_INLINE explicit Units(const ScoreSpec& spec) {
    const double magnitude = spec.scale < 0 ? -spec.scale : spec.scale;
    const bool in_q = magnitude < 1e-30;
    const double left = in_q ? 1 : magnitude;  // to be applied after the product
    q_factor = in_q ? static_cast<float>(spec.scale) : spec.scale < 0 ? -1.0f : 1.0f;
    score_scale = static_cast<float>(left);
    natural = spec.modified() ? 1.0f : score_scale;
    exponent = spec.modified() ? kLog2e : static_cast<float>(left * 1.4426950408889634);
  }
};

/// Keys [j0, j0 + keys) with their rows of K and V in float32, `k_row` and `v_row` elements apart.
struct KeyBlock {
  std::int64_t j0, keys;
  const float *k, *v;
  std::int64_t k_row, v_row;
  std::int64_t dim, dim_v;
  std::int64_t ahead = 0;  // the first `ahead` keys ask for the rows of K and V one block further on
};

/// The hardware's own prefetch does not cross pages and stops between heads.
ONEPASS_INLINE void prefetch_row(const float* row, std::int64_t dim) {
  for (std::int64_t c = 0; c < dim; c += 16) __builtin_prefetch(row + c, 0, 2);
}

/// Where the mask cuts a block: vector v of the group sees none of its keys before begin[v] and from end[v] on, and
/// both rise with v. Inside the mask that is 0 and block.keys; at its edges the vectors form stairs, and nothing
/// outside them is computed or read.
template <int kN>
struct Stairs {
  std::int64_t begin[kN], end[kN];

  ONEPASS_INLINE Stairs(const RowGroup& g, const KeyBlock& block, const Sequence& sequence) {
    for (int v = 0; v < kN; ++v) {
      const std::int64_t first = g.i0 + v * kLanes, last = g.i0 + min_of<std::int64_t>((v + 1) * kLanes, g.rows) - 1;
      begin[v] = clamp_to<std::int64_t>(sequence.visible(first).begin - block.j0, 0, block.keys);
      end[v] = clamp_to<std::int64_t>(sequence.visible(last).end - block.j0, 0, block.keys);
    }
    // In a window narrower than the group the stairs up and down meet: then only those down are followed.
    if (begin[kN - 1] > end[0]) {
      for (int v = 0; v < kN; ++v) begin[v] = 0;
    }
  }

  /// range(begin, end, first, last) for every range of keys in order, which the vectors first ... last - 1 (integral
  /// constants) see.
  template <int kV = 0, class Range>
  ONEPASS_INLINE void for_ranges(Range&& range) const {
    if constexpr (kV + 1 < kN) {
      range(begin[kV], begin[kV + 1], Constant<0>{}, Constant<kV + 1>{});
      for_ranges<kV + 1>(range);
    } else {
      range(begin[kN - 1], end[0], Constant<0>{}, Constant<kN>{});
      for_last_ranges<1>(range);
    }
  }
  /// step(key, first, last) for every key in order.
  template <class Step>
  ONEPASS_INLINE void for_keys(Step&& step) const {
    for_ranges([&](std::int64_t from, std::int64_t to, auto first, auto last) __attribute__((always_inline)) {
      for (std::int64_t j = from; j < to; ++j) step(j, first, last);
    });
  }

 private:
  template <int kV, class Range>
  ONEPASS_INLINE void for_last_ranges(Range&& range) const {
    if constexpr (kV < kN) {
      range(end[kV - 1], end[kV], Constant<kV>{}, Constant<kN>{});
      for_last_ranges<kV + 1>(range);
    }
  }
};

/// S^T = K Q^T for the keys [begin, end) and kN vectors of rows, and the rows' maxima. Pointers are to the first
/// vector.
template <int kN>
__attribute__((noinline)) void scores(const float* q_t, const KeyBlock& block, std::int64_t begin, std::int64_t end,
                                      float* s, float* largest) {
  Vec top[kN];
  for (int v = 0; v < kN; ++v) top[v] = load(largest + v * kLanes);
  // Long dot products in up to four parts, each rounded by itself.
  const std::int64_t depth = max_of<std::int64_t>(ceil_div(block.dim, 4), 4);
  for_row_tiles(
      end - begin, [&](std::int64_t row, auto count) __attribute__((always_inline)) {
        const std::int64_t j = begin + row;
        for (std::int64_t x = j; x < min_of(j + count.value, block.ahead); ++x) {
          prefetch_row(block.k + (x + kBlockK) * block.k_row, block.dim);
        }
        const float* k = block.k + j * block.k_row;
        const auto product = [&](std::int64_t c, std::int64_t terms, auto&& take) __attribute__((always_inline)) {
          product_tile<count.value, kN>(
              k + c, block.k_row, 1, q_t + c * kWidth, kWidth, terms,
              [](int, int) __attribute__((always_inline)) { return Vec{}; }, take);
        };
        const auto put = [&](int r, int v, Vec x) __attribute__((always_inline)) {
          store(s + (j + r) * kWidth + v * kLanes, x);
        };
        const auto put_last = [&](int r, int v, Vec x) __attribute__((always_inline)) {
          put(r, v, x);
          top[v] = max(top[v], x);
        };
        const auto onto = [&](int r, int v, Vec x) __attribute__((always_inline)) {
          return x + load(s + (j + r) * kWidth + v * kLanes);
        };
        if (block.dim <= depth) return product(0, block.dim, put_last);
        product(0, depth, put);
        std::int64_t c = depth;
        for (; c + depth < block.dim; c += depth) {
          product(
              c, depth, [&](int r, int v, Vec x) __attribute__((always_inline)) { put(r, v, onto(r, v, x)); });
        }
        product(
            c,
            block.dim - c, [&](int r, int v, Vec x) __attribute__((always_inline)) { put_last(r, v, onto(r, v, x)); });
      });
  for (int v = 0; v < kN; ++v) store(largest + v * kLanes, top[v]);
}

/// O^T = O^T * alpha + V^T P^T. The product is summed by itself: the rounding of a long row's sum grows with the
/// blocks, not with the keys.
template <int kN>
__attribute__((noinline)) void weighted_sum(const RowGroup& g, const KeyBlock& block, const Stairs<kN>& stairs,
                                            const float* p, const float* alpha) {
  for_row_tiles(
      block.dim_v, [&](std::int64_t c, auto count) __attribute__((always_inline)) {
        constexpr int kM = count.value;
        float* out = g.out_t + c * kWidth;
        const float* values = block.v + c;
        Vec acc[kM][kN];
#pragma GCC unroll 16
        for (int r = 0; r < kM; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < kN; ++v) acc[r][v] = Vec{};
        }
        stairs.for_keys([&](std::int64_t j, auto first, auto last) __attribute__((always_inline)) {
          Vec weight[kN];
#pragma GCC unroll 4
          for (int v = first.value; v < last.value; ++v) weight[v] = load(p + j * kWidth + v * kLanes);
#pragma GCC unroll 16
          for (int r = 0; r < kM; ++r) {
            const Vec x = broadcast(values[j * block.v_row + r]);
#pragma GCC unroll 4
            for (int v = first.value; v < last.value; ++v) acc[r][v] = multiply_add(x, weight[v], acc[r][v]);
          }
        });
        if (!g.fresh) {
#pragma GCC unroll 4
          for (int v = 0; v < kN; ++v) {
            const Vec factor = load(alpha + v * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < kM; ++r) {
              acc[r][v] = multiply_add(load(out + r * kWidth + v * kLanes), factor, acc[r][v]);
            }
          }
        }
#pragma GCC unroll 16
        for (int r = 0; r < kM; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < kN; ++v) store(out + r * kWidth + v * kLanes, acc[r][v]);
        }
      });
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

/// The same operations in the same order, but elements of V that a row does not see count as 0 for that row: their
/// product with its weight, 0, would make NaN of NaN and Inf.
template <int kN>
__attribute__((noinline)) void weighted_sum_guarded(const RowGroup& g, const KeyBlock& block, const Sequence& sequence,
                                                    const Stairs<kN>& stairs, const float* p, const float* alpha) {
  for (int v = 0; v < kN; ++v) {
    IntVec begin, end;  // keys of the block that the lane sees
    for (int lane = 0; lane < kLanes; ++lane) {
      const Interval seen = sequence.visible(g.i0 + v * kLanes + lane);
      begin[lane] = static_cast<std::int32_t>(clamp_to<std::int64_t>(seen.begin - block.j0, 0, block.keys));
      end[lane] = static_cast<std::int32_t>(clamp_to<std::int64_t>(seen.end - block.j0, 0, block.keys));
    }
    for (std::int64_t c = 0; c < block.dim_v; ++c) {
      float* out = g.out_t + c * kWidth + v * kLanes;
      Vec acc{};
      for (std::int64_t j = stairs.begin[v]; j < stairs.end[v]; ++j) {
        const std::int32_t key = static_cast<std::int32_t>(j);
        const Vec x = select((begin <= key) & (end > key), broadcast(block.v[j * block.v_row + c]), Vec{});
        acc = multiply_add(x, load(p + j * kWidth + v * kLanes), acc);
      }
      store(out, g.fresh ? acc : multiply_add(load(out), load(alpha + v * kLanes), acc));
    }
  }
}

/// Line 9: m = max(m, row maximum), P = exp(S - m) in place of S, l = l * exp(m before - m) + row sum of P.
/// alpha is that last factor of l, which O needs too.
template <int kN>
ONEPASS_INLINE void online_softmax(RowGroup& g, const KeyBlock& block, const Stairs<kN>& stairs, float exponent,
                                   const float* largest, float* s, float* alpha) {
  Vec reference[kN], sum[kN];
  for (int v = 0; v < kN; ++v) {
    const Vec before = load(g.m + v * kLanes), now = max(before, load(largest + v * kLanes));
    store(g.m + v * kLanes, now);
    // While a row has seen nothing but -inf, its exponents are taken from 0: -inf minus -inf would be NaN.
    reference[v] = select(now == -kInf, Vec{}, now);
    store(alpha + v * kLanes, exp2((before - reference[v]) * exponent));
    sum[v] = Vec{};
  }
  stairs.for_keys([&](std::int64_t j, auto first, auto last) __attribute__((always_inline)) {
    if (j < block.ahead) prefetch_row(block.v + (j + kBlockK) * block.v_row, block.dim_v);
#pragma GCC unroll 4
    for (int v = first.value; v < last.value; ++v) {
      float* at = s + j * kWidth + v * kLanes;
      const Vec p = exp2((load(at) - reference[v]) * exponent);
      sum[v] += p;
      store(at, p);
    }
  });
  for (int v = 0; v < kN; ++v) {
    float* l = g.l + v * kLanes;
    store(l, g.fresh ? sum[v] : multiply_add(load(l), load(alpha + v * kLanes), sum[v]));
  }
}

/// Algorithm 1 of FlashAttention-2 (Dao 2023), lines 8 to 10, for one group and one key block. `s`: [keys][kWidth].
template <int kN, bool kModified>
void attend_block(RowGroup& g, const KeyBlock& block, const HeadScore& h, const Units& units, float* s) {
  const Sequence& sequence = *h.sequence;
  const bool masked = block.j0 < g.all.begin || block.j0 + block.keys > g.all.end;
  const Stairs<kN> stairs(g, block, sequence);
  alignas(64) float largest[kWidth], alpha[kWidth];
  for (int v = 0; v < kN; ++v) store(largest + v * kLanes, broadcast(-kInf));

  stairs.for_ranges([&](std::int64_t begin, std::int64_t end, auto first, auto last) __attribute__((always_inline)) {
    constexpr int kFirst = first.value * kLanes;
    if (begin < end) scores<last.value - first.value>(g.q_t + kFirst, block, begin, end, s + kFirst, largest + kFirst);
  });
  if constexpr (kModified) {
    for (std::int64_t x = 0; x < block.keys * kWidth; x += kLanes) store(s + x, load(s + x) * units.score_scale);
    modify_scores(h, s, block.keys, g.i0, g.rows, block.j0);
  }
  if (masked) mask_scores(sequence, s, block.keys, g.i0, block.j0);
  if (kModified || masked) {
    Vec top[kN];
    for (int v = 0; v < kN; ++v) top[v] = broadcast(-kInf);
    stairs.for_keys([&](std::int64_t j, auto first, auto last) __attribute__((always_inline)) {
      for (int v = first.value; v < last.value; ++v) top[v] = max(top[v], load(s + j * kWidth + v * kLanes));
    });
    for (int v = 0; v < kN; ++v) store(largest + v * kLanes, top[v]);
  }
  online_softmax<kN>(g, block, stairs, units.exponent, largest, s, alpha);
  if (kModified && h.spec->dropout.threshold != 0) drop_tile(h, s, block.keys, g.i0, block.j0);

  if (masked && !all_finite(block.v, block.v_row, block.keys, block.dim_v)) {
    weighted_sum_guarded<kN>(g, block, sequence, stairs, s, alpha);
  } else {
    weighted_sum<kN>(g, block, stairs, s, alpha);
  }
  g.fresh = false;
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
