// The backward in one pass over the tiles: each key block keeps its dK and dV to itself, dQ grows in memory in the
// order of the key blocks. FlashAttention-2 (Dao 2023), algorithm 2, with its atomic additions to dQ replaced by turns.
#include "cpu/backward_bias.h"
#include "cpu/backward_tasks.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// dQ of a query block is complete: scaled, and converted unless it lies in grad_q already.
void finish_query_gradient(const Backward& call, const Sequence& sequence, std::int64_t b, std::int64_t head,
                           std::int64_t i0, std::int64_t rows) {
  const Tensor& grad_q = call.x.grad_q;
  const Problem& problem = call.problem;
  const float scale = static_cast<float>(problem.score.scale);
  const std::int64_t seq = sequence.q_row + i0;
  const float* dq =
      call.plan.direct_dq ? reinterpret_cast<const float*>(grad_q.row(b, seq, head)) : call.dq(b, head, seq);
  const std::int64_t dq_row = call.plan.direct_dq ? grad_q.stride_seq : call.plan.dim;
  store_rows(grad_q, b, seq, head, rows, problem.head_dim, dq, dq_row, scale);
}

/// One query block against one key block.
void run_tile(const Backward& call, const Scratch& t, const Sequence& sequence, const HeadScore& h, std::int64_t j0,
              std::int64_t keys, bool k_finite, const QueryBlock& block) {
  const BackwardPlan& plan = call.plan;
  add_key_gradients(plan, call.problem, t, block, sequence, h, j0);

  const std::int64_t turn = j0 / plan.block_k, seq = sequence.q_row + block.i0;
  std::int32_t* ticket = call.ticket(sequence, h.batch, h.head, block.i0 / kBlockQ);
  wait_for(ticket, static_cast<std::int32_t>(turn));
  if (call.x.grad_q && plan.dim > 0) {
    const Interval seen = sequence.visible_to_any(block.i0, block.i0 + block.rows);
    float* dq = plan.direct_dq ? reinterpret_cast<float*>(call.x.grad_q.row(h.batch, seq, h.head))
                               : call.dq(h.batch, h.head, seq);
    const bool first = turn == seen.begin / plan.block_k;
    add_query_gradient(plan, t, block, sequence, j0, dq, plan.direct_dq ? call.x.grad_q.stride_seq : plan.dim, !first,
                       k_finite);
    if (seen.end <= j0 + keys) finish_query_gradient(call, sequence, h.batch, h.head, block.i0, block.rows);
  }
  __atomic_store_n(ticket, static_cast<std::int32_t>(turn + 1), __ATOMIC_RELEASE);
}

/// All query rows of the group that see the key block, in ascending order.
void run_key_block(const Backward& call, const Scratch& t, const Sequence& sequence, std::int64_t b,
                   std::int64_t kv_head, std::int64_t key_block) {
  const Problem& problem = call.problem;
  const BackwardPlan& plan = call.plan;
  const std::int64_t j0 = key_block * plan.block_k, keys = min_of(plan.block_k, sequence.k_length - j0);
  const std::int64_t row = sequence.k_row + j0;
  const Interval rows = sequence.rows_seeing(j0, j0 + keys);
  if (rows.size() == 0) {
    clear_rows(call.x.grad_k, b, row, kv_head, keys, problem.head_dim);
    clear_rows(call.x.grad_v, b, row, kv_head, keys, problem.head_dim_v);
    return;
  }
  load_rows(t.k, call.x.k, b, row, kv_head, keys, problem.head_dim);
  load_rows(t.v, call.x.v, b, row, kv_head, keys, problem.head_dim_v);
  const bool k_finite = all_finite(t.k, keys * plan.dim);
  for (std::int64_t n = 0; n < keys * plan.dim; n += kLanes) store(t.dk + n, Vec{});
  for (std::int64_t n = 0; n < keys * plan.dim_v; n += kLanes) store(t.dv + n, Vec{});

  QueryBlock block;
  for (std::int64_t head = kv_head * problem.group(); head < (kv_head + 1) * problem.group(); ++head) {
    const HeadScore h = head_score(problem, sequence, b, head);
    for (std::int64_t i0 = rows.begin / kBlockQ * kBlockQ; i0 < rows.end; i0 += kBlockQ) {
      load_query_block(call, t, sequence, b, head, i0, j0, keys, block);
      run_tile(call, t, sequence, h, j0, keys, k_finite, block);
    }
  }
  const float scale = static_cast<float>(problem.score.scale);
  store_rows(call.x.grad_k, b, row, kv_head, keys, problem.head_dim, t.dk, plan.dim, scale);
  store_rows(call.x.grad_v, b, row, kv_head, keys, problem.head_dim_v, t.dv, plan.dim_v, 1);
}

/// D, tickets, and zeros where no tile writes.
void run_rows(const Backward& call, Queue& queue, int worker) {
  const Problem& problem = call.problem;
  const Scratch t = call.scratch(worker);
  constexpr std::int64_t kRun = 4;  // tasks at a time: they are short
  SequenceCursor cursor;
  for (std::int64_t index = queue.pop(kRun);; index = queue.pop(kRun)) {
    for (std::int64_t n = index; n < index + kRun; ++n) {
      const std::int64_t task = cursor.seek(
          problem, n, [&](const Sequence& s) { return 1 + ceil_div(s.q_length, kBlockQ) * problem.heads_q; });
      if (task < 0) return;
      if (task == 0) {
        clear_outside_item(problem, call.x, cursor.sequence, cursor.b);
      } else {
        prepare_rows(call, t, cursor.sequence, cursor.b, (task - 1) % problem.heads_q, (task - 1) / problem.heads_q);
      }
    }
  }
}

/// The tiles: key blocks in ascending order, heads before blocks so that workers seldom meet at one dQ; then the sinks.
void run_tiles(const Backward& call, Queue& queue, int worker) {
  const Problem& problem = call.problem;
  const Scratch t = call.scratch(worker);
  const std::int64_t sinks = call.x.grad_sinks ? problem.heads_q : 0;
  SequenceCursor cursor;
  for (;;) {
    const std::int64_t index = queue.pop();
    const std::int64_t task = cursor.seek(
        problem, index, [&](const Sequence& s) { return ceil_div(s.k_length, call.plan.block_k) * problem.heads_kv; });
    if (task >= 0) {
      run_key_block(call, t, cursor.sequence, cursor.b, task % problem.heads_kv, task / problem.heads_kv);
    } else if (index - cursor.first < sinks) {
      sink_gradient(call, index - cursor.first);
    } else {
      return;
    }
  }
}

void run_bias(const Backward& call, Queue& queue, int worker) {
  const Scratch t = call.scratch(worker);
  const BiasRegions regions = bias_regions(call);
  for (std::int64_t region; (region = queue.pop()) < regions.count();) bias_gradient(call, t, regions, region);
}

}  // namespace

std::size_t backward_workspace(const Problem& problem, int threads) {
  return static_cast<std::size_t>(plan_backward(problem, threads).bytes);
}

void backward(const Problem& problem, const BackwardOperands& operands, const Launch& launch) {
  const Backward call{problem, operands, plan_backward(problem, launch.threads), static_cast<char*>(launch.workspace)};
  Queue* queues = static_cast<Queue*>(launch.workspace);
  for (int n = 0; n < 3; ++n) queues[n].next = 0;
  if (problem.mask.varlen && problem.batch == 0) clear_outside_item(problem, operands, Sequence{}, 0);
  parallel(call.plan.workers, [&](int worker) { run_rows(call, queues[0], worker); });
  parallel(call.plan.workers, [&](int worker) { run_tiles(call, queues[1], worker); });
  if (operands.grad_bias) parallel(call.plan.workers, [&](int worker) { run_bias(call, queues[2], worker); });
}

}  // namespace onepass::cpu::ONEPASS_ISA
