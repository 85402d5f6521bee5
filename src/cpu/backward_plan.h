// The backward's tiles and its workspace.
#pragma once

#include "core/problem.h"
#include "cpu/vec.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Query rows of a block (Br of the paper), the lanes of S^T and dP^T. Key rows of a piece, for which S and dP exist.
inline constexpr std::int64_t kBlockQ = 64, kPiece = 96, kLeastBlockK = 48;
static_assert(kBlockQ % kWidth == 0 && kPiece % kRows == 0);

/// Everything here follows from the problem's sizes and the number of threads, never from lengths in memory, so that a
/// workspace fits every content. Results do not depend on block_k, bit for bit: every element of dQ, dK and dV is one
/// sum in ascending order of keys or queries, wherever the blocks end.
///
/// Workspace in bytes, each part rounded up to 64:
///   256                                counters of the task queues
/// + 4 heads_q blocks_q                 tickets: whose turn it is to add to a block's dQ
/// + 4 heads_q rows                     D
/// + 4 heads_q rows dim                 dQ, unless grad_q itself can hold it: float32 and head_dim a multiple of a
/// vector
/// + 4 workers (2 block_k (dim + dim_v) + 128 (dim + dim_v) + 64 block_k + 6144 or, with score modifiers, 18432)
/// rows = batch seq_q, packed total_q; blocks_q <= rows / 64 + batch; dim, dim_v: head_dim, head_dim_v rounded up to a
/// vector; workers <= threads. Linear in tokens.
struct BackwardPlan {
  std::int64_t rows = 0;      // query rows of one head, all items
  std::int64_t blocks_q = 0;  // query blocks of one head, all items
  std::int64_t dim = 0, dim_v = 0;
  std::int64_t block_k = 0;  // Bc: key rows of a task
  bool modified = false, direct_dq = false;
  int workers = 1;
  std::int64_t tickets = 0, d = 0, dq = 0, scratch = 0, scratch_each = 0, bytes = 0;  // offsets and sizes in bytes
};

ONEPASS_INLINE std::int64_t scratch_floats(const BackwardPlan& p) {
  return (2 * p.block_k + 2 * kBlockQ) * (p.dim + p.dim_v) + p.block_k * kBlockQ +
         (p.modified ? 3 : 1) * kPiece * kBlockQ;
}

inline BackwardPlan plan_backward(const Problem& problem, int threads) {
  BackwardPlan p;
  const bool packed = problem.mask.varlen;
  p.rows = packed ? problem.total_q : problem.batch * problem.seq_q;
  p.blocks_q = packed ? problem.total_q / kBlockQ + problem.batch : problem.batch * ceil_div(problem.seq_q, kBlockQ);
  p.dim = round_up(problem.head_dim, kLanes);
  p.dim_v = round_up(problem.head_dim_v, kLanes);
  p.modified = problem.score.modified();
  p.direct_dq = problem.dtype == DType::f32 && p.dim == problem.head_dim;

  // The larger the block, the rarer are Q and dO loaded and transposed: 384 keys gain 4 % over 192, 12 % over 96. Fewer
  // where there would be less than four tasks for a thread.
  const std::int64_t dims = p.dim + p.dim_v;
  std::int64_t blocks_k = max_of<std::int64_t>(ceil_div(problem.seq_k, dims <= 512 ? 384 : 192), 1), tasks = 0;
  for (;; blocks_k *= 2) {
    p.block_k = max_of<std::int64_t>(round_up(ceil_div(problem.seq_k, blocks_k), kLeastBlockK),
                                     kLeastBlockK);  // pieces and edges
    tasks = problem.heads_kv * (packed ? problem.total_k / p.block_k + problem.batch : problem.batch * blocks_k);
    if (threads == 1 || tasks >= 4 * threads || p.block_k <= kLeastBlockK) break;
  }

  // Waking a thread costs about 20 us: a million multiply-adds.
  const double pairs =
      static_cast<double>(problem.heads_q) * static_cast<double>(p.rows) * static_cast<double>(problem.seq_k);
  const bool small = pairs * static_cast<double>(dims + 16) < 5e5;
  p.workers = small ? 1 : static_cast<int>(clamp_to<std::int64_t>(tasks, 1, max_of(threads, 1)));

  const auto part = [&p](std::int64_t bytes) {
    const std::int64_t at = p.bytes;
    p.bytes += round_up(bytes, 64);
    return at;
  };
  part(256);
  p.tickets = part(4 * problem.heads_q * p.blocks_q);
  p.d = part(4 * problem.heads_q * p.rows);
  p.dq = part(p.direct_dq ? 0 : 4 * problem.heads_q * p.rows * p.dim);
  p.scratch_each = round_up(4 * scratch_floats(p), 64);
  p.scratch = part(p.workers * p.scratch_each);
  return p;
}

/// One worker's tiles. K, V and their gradients belong to the key block, the rest to the query block or the piece.
struct Scratch {
  float *k, *v;             // [block_k][dim], [block_k][dim_v], zeros behind head_dim
  float *dk, *dv;           // the same
  float *q, *dout;          // [kBlockQ][dim], [kBlockQ][dim_v]
  float *q_t, *dout_t;      // [dim][kBlockQ], [dim_v][kBlockQ]
  float* ds;                // [block_k][kBlockQ]: dP^T, then dS^T
  float* p;                 // [kPiece][kBlockQ]: S^T, then P^T
  float *cap_slope, *keep;  // [kPiece][kBlockQ]: the softcap's derivative, dropout's factor
};

inline Scratch make_scratch(const BackwardPlan& plan, void* workspace, int worker) {
  float* next = reinterpret_cast<float*>(static_cast<char*>(workspace) + plan.scratch + worker * plan.scratch_each);
  const auto part = [&next](std::int64_t floats) {
    float* at = next;
    next += floats;
    return at;
  };
  Scratch s;
  s.k = part(plan.block_k * plan.dim);
  s.v = part(plan.block_k * plan.dim_v);
  s.dk = part(plan.block_k * plan.dim);
  s.dv = part(plan.block_k * plan.dim_v);
  s.q = part(kBlockQ * plan.dim);
  s.dout = part(kBlockQ * plan.dim_v);
  s.q_t = part(kBlockQ * plan.dim);
  s.dout_t = part(kBlockQ * plan.dim_v);
  s.ds = part(plan.block_k * kBlockQ);
  s.p = part(kPiece * kBlockQ);
  s.cap_slope = plan.modified ? part(kPiece * kBlockQ) : nullptr;
  s.keep = plan.modified ? part(kPiece * kBlockQ) : nullptr;
  return s;
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
