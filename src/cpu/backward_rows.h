// The backward's work on rows: D before the tiles, gradients of the sinks, blocks of query rows made ready for
// products.
#pragma once

#include "cpu/backward_tile.h"
#include "cpu/pack.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// A call and its parts of the workspace.
struct Backward {
  const Problem& problem;
  const BackwardOperands& x;
  BackwardPlan plan;
  char* workspace;

  /// Distance of query rows in the workspace's D and dQ is 1 and plan.dim.
  std::int64_t row_at(std::int64_t b, std::int64_t head, std::int64_t row) const {
    return problem.mask.varlen ? head * problem.total_q + row : (b * problem.heads_q + head) * problem.seq_q + row;
  }
  float* d(std::int64_t b, std::int64_t head, std::int64_t row) const {
    return reinterpret_cast<float*>(workspace + plan.d) + row_at(b, head, row);
  }
  float* dq(std::int64_t b, std::int64_t head, std::int64_t row) const {
    return reinterpret_cast<float*>(workspace + plan.dq) + row_at(b, head, row) * plan.dim;
  }
  /// The ticket of query block `block` of a sequence. Blocks of packed sequences are numbered by their first row and
  /// sequence, so that every number is used once and stays below plan.blocks_q.
  std::int32_t* ticket(const Sequence& sequence, std::int64_t b, std::int64_t head, std::int64_t block) const {
    const std::int64_t first =
        problem.mask.varlen ? sequence.q_row / kBlockQ + b : b * ceil_div(problem.seq_q, kBlockQ);
    return reinterpret_cast<std::int32_t*>(workspace + plan.tickets) + head * plan.blocks_q + first + block;
  }
  Scratch scratch(int worker) const { return make_scratch(plan, workspace, worker); }
};

/// Rows of one head, [rows][round_up(dim, kLanes)] in float32.
inline void load_rows(float* to, const Tensor& from, std::int64_t b, std::int64_t seq, std::int64_t head,
                      std::int64_t rows, std::int64_t dim) {
  if (dim > 0) widen_rows(to, round_up(dim, kLanes), from, b, seq, head, rows, dim);
}

/// D of the block's rows, 0 from grad_q where no task will come, and the block's ticket for its first key block.
inline void prepare_rows(const Backward& call, const Scratch& t, const Sequence& sequence, std::int64_t b,
                         std::int64_t head, std::int64_t block) {
  const Problem& problem = call.problem;
  const BackwardOperands& x = call.x;
  const std::int64_t i0 = block * kBlockQ, rows = min_of(kBlockQ, sequence.q_length - i0), seq = sequence.q_row + i0;
  const Interval keys = sequence.visible_to_any(i0, i0 + rows);
  *call.ticket(sequence, b, head, block) = static_cast<std::int32_t>(keys.begin / call.plan.block_k);
  if (keys.size() == 0) {
    clear_rows(x.grad_q, b, seq, head, rows, problem.head_dim);
    if (!problem.score.sinks) return;
  }
  // Summed as dP is, of which a row that sees one key has D's own products: its dS is 0 to the bit.
  static_assert(2 * kLeastBlockK >= kBlockQ);
  float* const out_t = t.k;  // as far as dV: nobody's before the tiles
  load_rows(t.dout, x.out, b, seq, head, rows, problem.head_dim_v);
  transpose_rows(out_t, kBlockQ, t.dout, call.plan.dim_v, rows, problem.head_dim_v);
  load_rows(t.dout, x.grad_out, b, seq, head, rows, problem.head_dim_v);
  transpose_rows(t.dout_t, kBlockQ, t.dout, call.plan.dim_v, rows, problem.head_dim_v);
  alignas(64) float sums[kBlockQ];
  column_dots(sums, t.dout_t, out_t, problem.head_dim_v);
  float* d = call.d(b, head, seq);
  const float* grad_lse = x.grad_lse ? x.grad_lse.row(b, head, seq) : nullptr;
  for (std::int64_t i = 0; i < rows; ++i) {
    const bool empty = problem.score.sinks && is_empty_row(problem, sequence, b, head, i0 + i);
    d[i] = (empty ? 0 : sums[i]) - (grad_lse != nullptr ? grad_lse[i] : 0.0f);
  }
}

/// Query rows of the block with their transposes, lse, D, and what they see of the keys [j0, j0 + keys).
inline void load_query_block(const Backward& call, const Scratch& t, const Sequence& sequence, std::int64_t b,
                             std::int64_t head, std::int64_t i0, std::int64_t j0, std::int64_t keys,
                             QueryBlock& block) {
  const Problem& problem = call.problem;
  const std::int64_t rows = min_of(kBlockQ, sequence.q_length - i0), seq = sequence.q_row + i0;
  block.i0 = i0;
  block.rows = rows;
  load_rows(t.q, call.x.q, b, seq, head, rows, problem.head_dim);
  load_rows(t.dout, call.x.grad_out, b, seq, head, rows, problem.head_dim_v);
  transpose_rows(t.q_t, kBlockQ, t.q, call.plan.dim, rows, problem.head_dim);
  transpose_rows(t.dout_t, kBlockQ, t.dout, call.plan.dim_v, rows, problem.head_dim_v);

  const float *l = call.x.lse.row(b, head, seq), *d = call.d(b, head, seq);
  const auto within = [&](Interval x) {  // keys of the block, counted from its first
    const std::int64_t begin = clamp_to<std::int64_t>(x.begin - j0, 0, keys);
    return Interval{begin, clamp_to(x.end - j0, begin, keys)};
  };
  block.any = within(sequence.visible_to_any(i0, i0 + rows));
  block.all = within(sequence.visible_to_all(i0, i0 + rows));
  block.empty_row = false;
  for (std::int64_t i = 0; i < kBlockQ; ++i) {
    const bool seen =
        i < rows && l[i] != -kInf && !(problem.score.bias && is_empty_row(problem, sequence, b, head, i0 + i));
    block.l[i] = seen ? l[i] : kInf;
    block.d[i] = seen ? d[i] : 0;
    block.empty_row = block.empty_row || (i < rows && !seen);
  }
  block.masked = block.empty_row || block.all.begin > block.any.begin || block.all.end < block.any.end;
  if (!block.masked) return;
  for (std::int64_t i = 0; i < kBlockQ; ++i) {
    const Interval visible = within(i < rows && block.l[i] != kInf ? sequence.visible(i0 + i) : Interval{});
    block.lo[i] = static_cast<std::int32_t>(visible.begin);
    block.hi[i] = static_cast<std::int32_t>(visible.end);
  }
  block.finite = all_finite(t.q, rows * call.plan.dim) && all_finite(t.dout, rows * call.plan.dim_v);
}

/// d sink = -sum of exp(sink - lse) D over the rows of one head, for one item or all of them, in ascending order.
inline void add_sink_gradient(const Backward& call, std::int64_t head, std::int64_t b, double& sum) {
  const Sequence sequence = call.problem.sequence(b);
  const float sink = sink_of(call.problem, head);
  const float *l = call.x.lse.row(b, head, sequence.q_row), *d = call.d(b, head, sequence.q_row);
  for (std::int64_t i = 0; i < sequence.q_length; i += kLanes) {
    const std::int64_t rows = min_of<std::int64_t>(kLanes, sequence.q_length - i);
    const Vec lse = rows == kLanes ? load(l + i) : load_part<StoreF32>(l + i, rows);
    const Vec row_d = rows == kLanes ? load(d + i) : load_part<StoreF32>(d + i, rows);
    const Vec term = exp(sink - lse) * row_d;
    const IntVec counted = (lse != -kInf) & (lane_index() < static_cast<std::int32_t>(rows));
    sum -= static_cast<double>(sum_of(select(counted, term, Vec{})));
  }
}

inline void sink_gradient(const Backward& call, std::int64_t head) {
  const HeadTensor& gradient = call.x.grad_sinks;
  const bool per_item = gradient.stride_batch != 0;
  double sum = 0;
  for (std::int64_t b = 0; b < call.problem.batch; ++b) {
    if (per_item) sum = 0;
    add_sink_gradient(call, head, b, sum);
    if (per_item)
      store_float(gradient.data, gradient.dtype, b * gradient.stride_batch + head * gradient.stride_head,
                  static_cast<float>(sum));
  }
  if (!per_item) store_float(gradient.data, gradient.dtype, head * gradient.stride_head, static_cast<float>(sum));
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
