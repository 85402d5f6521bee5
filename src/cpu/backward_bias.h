// The gradient of the bias: dS summed over the dimensions that broadcast. A pass of its own, in which a task owns a
// region of grad_bias and computes anew every dS tile that falls into it, in a fixed order: deterministic without
// atomics, and nothing of the size of grad_bias besides itself.
#pragma once

#include "cpu/backward_rows.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Regions of grad_bias: blocks of kBlockQ rows and block_k columns; a broadcast dimension is one region.
struct BiasRegions {
  std::int64_t batch, heads, rows, columns;
  std::int64_t count() const { return batch * heads * rows * columns; }
};

inline BiasRegions bias_regions(const Backward& call) {
  const BiasTensor& g = call.x.grad_bias;
  const Problem& p = call.problem;
  const auto parts = [](std::int64_t stride, std::int64_t whole) { return stride != 0 ? whole : 1; };
  return {parts(g.stride_batch, p.batch), parts(g.stride_head, p.heads_q),
          parts(g.stride_q, ceil_div(p.seq_q, kBlockQ)), parts(g.stride_k, ceil_div(p.seq_k, call.plan.block_k))};
}

/// Adds dS of a query block to sum[key or one][kBlockQ].
inline void add_bias_tile(const Backward& call, const Scratch& t, const QueryBlock& block, const Sequence& sequence,
                          const HeadScore& h, std::int64_t j0, float* sum, bool per_key) {
  float* ds = t.cap_slope;  // a tile of a piece, free here: the gradient of the score needs no slope
  for_each_piece(block, sequence, j0, [&](const Piece& piece) {
    score_piece<false>(call.plan, call.problem, t, ds, block, h, j0, piece);
    for (std::int64_t j = 0; j < piece.keys; ++j) {
      float* row = sum + (per_key ? piece.key + j : 0) * kBlockQ;
      for (std::int64_t lane = piece.lane; lane < piece.lane + piece.lanes; lane += kLanes) {
        const IntVec exists = lane_index() < static_cast<std::int32_t>(block.rows - lane);
        store(row + lane, load(row + lane) + select(exists, load(ds + j * kBlockQ + lane), Vec{}));
      }
    }
  });
}

/// One head of one item: its query rows [i0, i1) against its keys [j0, j1), at most block_k of them.
inline void add_bias_region(const Backward& call, const Scratch& t, const Sequence& sequence, std::int64_t b,
                            std::int64_t head, std::int64_t i0, std::int64_t i1, std::int64_t j0, std::int64_t j1,
                            float* sum, bool per_key) {
  if (j0 >= j1) return;
  const Problem& problem = call.problem;
  const Interval seeing = sequence.rows_seeing(j0, j1);
  const std::int64_t first = max_of(i0, seeing.begin) / kBlockQ * kBlockQ, last = min_of(i1, seeing.end);
  if (first >= last) return;
  load_rows(t.k, call.x.k, b, sequence.k_row + j0, problem.kv_head(head), j1 - j0, problem.head_dim);
  load_rows(t.v, call.x.v, b, sequence.k_row + j0, problem.kv_head(head), j1 - j0, problem.head_dim_v);
  const HeadScore h = head_score(problem, sequence, b, head);
  QueryBlock block;
  for (std::int64_t i = first; i < last; i += kBlockQ) {
    load_query_block(call, t, sequence, b, head, i, j0, j1 - j0, block);
    add_bias_tile(call, t, block, sequence, h, j0, sum, per_key);
  }
}

inline void bias_gradient(const Backward& call, const Scratch& t, const BiasRegions& regions, std::int64_t region) {
  const Problem& problem = call.problem;
  const BiasTensor& g = call.x.grad_bias;
  const std::int64_t block_k = call.plan.block_k;
  const std::int64_t column = region % regions.columns, row = region / regions.columns % regions.rows;
  const std::int64_t head = region / (regions.columns * regions.rows) % regions.heads;
  const std::int64_t item = region / (regions.columns * regions.rows * regions.heads);
  const bool per_key = g.stride_k != 0, per_row = g.stride_q != 0;
  const std::int64_t i0 = row * kBlockQ, i1 = per_row ? min_of(i0 + kBlockQ, problem.seq_q) : problem.seq_q;
  const std::int64_t c0 = column * block_k, c1 = per_key ? min_of(c0 + block_k, problem.seq_k) : problem.seq_k;
  const std::int64_t sums = per_key ? c1 - c0 : 1;

  float* sum = t.ds;
  for (std::int64_t n = 0; n < sums * kBlockQ; n += kLanes) store(sum + n, Vec{});
  for (std::int64_t b = item; b < (g.stride_batch != 0 ? item + 1 : problem.batch); ++b) {
    const Sequence sequence = problem.sequence(b);
    for (std::int64_t h = head; h < (g.stride_head != 0 ? head + 1 : problem.heads_q); ++h) {
      // Rows before columns where both are summed: then no sum depends on block_k, and so on the threads. Only blocks
      // that the sequence reaches: the declared maxima may be far above.
      const std::int64_t last = min_of(i1, sequence.q_length), end = min_of(c1, sequence.k_start + sequence.k_length);
      const std::int64_t begin = c0 + max_of<std::int64_t>(sequence.k_start - c0, 0) / block_k * block_k;
      for (std::int64_t i = i0, step = per_key ? i1 - i0 : kBlockQ; i < last; i += step) {
        for (std::int64_t c = begin; c < end; c += block_k) {
          // Columns count from the item's first key, keys from the sequence's.
          const std::int64_t j = c - sequence.k_start;
          const std::int64_t j0 = clamp_to<std::int64_t>(j, 0, sequence.k_length);
          const std::int64_t j1 =
              clamp_to<std::int64_t>(min_of(c + block_k, c1) - sequence.k_start, 0, sequence.k_length);
          add_bias_region(call, t, sequence, b, h, i, min_of(min_of(i + step, i1), sequence.q_length), j0, j1,
                          sum + (per_key ? (j0 - j) * kBlockQ : 0), per_key);
        }
      }
    }
  }

  for (std::int64_t n = 0; n < sums; ++n) {
    const float* values = sum + n * kBlockQ;
    if (per_row) {
      for (std::int64_t i = i0; i < i1; ++i) {
        store_float(g.data, g.dtype, g.offset(item, head, i, c0 + n), values[i - i0]);
      }
    } else {
      Vec total{};
      for (std::int64_t lane = 0; lane < kBlockQ; lane += kLanes) total += load(values + lane);
      store_float(g.data, g.dtype, g.offset(item, head, 0, c0 + n), sum_of(total));
    }
  }
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
