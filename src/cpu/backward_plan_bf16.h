// The bfloat16 backward's tiles and its workspace.
#pragma once

#include "cpu/backward_weigh_bf16.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Everything here follows from the problem's sizes and the number of threads, so that a workspace fits every content.
/// Results have the same bits for any number of threads.
///
/// Workspace in bytes, each part rounded up to 64:
///   320                            counters of the task queues, largest magnitudes of the operands
/// + 4 heads_q blocks_q             tickets: whose turn it is to add to a block's dQ
/// + 4 heads_q rows                 D
/// + 4 heads_q (rows + 15 batch) dim  dQ in float32, the rows of each item padded to a multiple of 16
/// + workers tile                   tile: 10 block_k (dim + dim_v) + 2 block_k dim + 1280 (dim + dim_v) or so
/// rows = batch seq_q, packed total_q; blocks_q <= rows / 128 + batch; dim, dim_v: head_dim, head_dim_v rounded up to
/// the products' columns; workers <= threads. Linear in tokens. If the float32 kernel needs more, as much as that: it
/// does the work on values that pair products get wrong.
struct PairPlan {
  std::int64_t rows = 0, blocks_q = 0;  // of one head, all items
  std::int64_t dq_rows = 0;             // the same, with what the items are padded with
  std::int64_t dim = 0, dim_v = 0;      // padded columns
  std::int64_t depth = 0, depth_v = 0;  // padded lengths of Q K^T and V dO^T
  std::int64_t block_k = 0;             // Bc: key rows of a task, a multiple of kPairPiece
  bool modified = false;
  int workers = 1;
  std::int64_t tickets = 0, d = 0, dq = 0, scratch = 0, scratch_each = 0;  // offsets and sizes in bytes
};

/// One worker's tiles.
struct PairScratch {
  Bf16 *k, *v;                       // [block_k][dim], rows of the key block, zeros where no row may look
  Bf16* k_right;                     // K as dQ = dS K wants it
  float *dk, *dv;                    // [block_k][dim], [block_k][dim_v]
  Bf16 *q_t, *dout_t, *q, *dout;     // of the query block: packed to contract columns, to contract rows
  Bf16* clean;                       // [block_q][dim or dim_v], rows with zeros for those that see nothing
  float *s, *dp, *cap_slope, *keep;  // [kPairPiece][kWidth]
  Bf16 *p, *ds;                      // [kPairPiece][block_q]
  Bf16* ds_pairs;                    // [block_k / 2][block_q][2] in the products' layout
};

/// S^T = K Q^T and dP^T = V dO^T, for one piece of keys.
struct ScoreOperands {
  float *s, *dp;         // [kPairPiece][kWidth]
  const Bf16 *k, *v;     // rows dim and dim_v apart
  const Bf16 *q, *dout;  // packed to contract columns, at the first of kWidth lanes
  std::int64_t dim, dim_v;
  std::int64_t depth, depth_v;  // contracted
};

/// dV += P^T dO and dK += dS^T Q, for one piece of keys.
struct KeyGradientOperands {
  float *dv, *dk;        // rows dim_v and dim apart
  const Bf16 *p, *ds;    // at the first query row
  const Bf16 *dout, *q;  // packed to contract rows
  std::int64_t dim_v, dim;
};

template <class Products>
std::int64_t carve_scratch(const PairPlan& plan, char* base, PairScratch* s) {
  std::int64_t used = 0;
  const auto take = [&](auto*& p, std::int64_t count) {
    p = reinterpret_cast<decltype(p + 0)>(base + used);
    used += round_up(count * static_cast<std::int64_t>(sizeof *p), 64);
  };
  constexpr std::int64_t kBlock = Products::kBlockQ;
  const std::int64_t dim = plan.dim, dim_v = plan.dim_v, keys = plan.block_k;
  take(s->k, keys * dim);
  take(s->v, keys * dim_v);
  take(s->k_right, keys * dim);
  take(s->dk, keys * dim);
  take(s->dv, keys * dim_v);
  take(s->q_t, kBlock * round_up(dim, 32));
  take(s->dout_t, kBlock * round_up(dim_v, 32));
  take(s->q, kBlock * dim);
  take(s->dout, kBlock * dim_v);
  take(s->clean, kBlock * max_of(dim, dim_v));
  take(s->s, kPairPiece * kWidth);
  take(s->dp, kPairPiece * kWidth);
  take(s->cap_slope, plan.modified ? kPairPiece * kWidth : 0);
  take(s->keep, plan.modified ? kPairPiece * kWidth : 0);
  take(s->p, kPairPiece * kBlock);
  take(s->ds, kPairPiece * kBlock);
  take(s->ds_pairs, keys * kBlock);
  return used;
}

/// Key rows of a task: as many as let dK and dV stay in the second-level cache, fewer where that leaves few tasks. No
/// result depends on it, bit for bit: every sum takes its products in ascending order of keys or queries, wherever the
/// blocks end.
template <class Products>
std::int64_t choose_block_k(const Problem& problem, const PairPlan& plan, int threads) {
  const std::int64_t wanted = threads > 1 ? 4 * threads : 0;
  const auto tasks = [&](std::int64_t keys) {
    return problem.heads_kv * (problem.mask.varlen ? problem.total_k / keys + problem.batch
                                                   : problem.batch * ceil_div(problem.seq_k, keys));
  };
  std::int64_t keys = Products::kMostKeys;
  while (keys > 64 && keys * (plan.dim + plan.dim_v) > Products::kCachedElements) keys /= 2;
  while (keys > Products::kFewestKeys && tasks(keys) < wanted) keys /= 2;
  return clamp_to<std::int64_t>(round_up(problem.seq_k, kPairPiece), kPairPiece, keys);
}

template <class Products>
PairPlan plan_pairs(const Problem& problem, int threads) {
  PairPlan p;
  const bool packed = problem.mask.varlen;
  constexpr std::int64_t kBlock = Products::kBlockQ;
  p.rows = packed ? problem.total_q : problem.batch * problem.seq_q;
  p.blocks_q = packed ? problem.total_q / kBlock + problem.batch : problem.batch * ceil_div(problem.seq_q, kBlock);
  const std::int64_t dim = max_of<std::int64_t>(problem.head_dim, 1);
  const std::int64_t dim_v = max_of<std::int64_t>(problem.head_dim_v, 1);
  p.dim = round_up(dim, Products::kColumns);
  p.dim_v = round_up(dim_v, Products::kColumns);
  p.depth = round_up(dim, Products::kDepth);
  p.depth_v = round_up(dim_v, Products::kDepth);
  p.modified = problem.score.modified();
  p.block_k = choose_block_k<Products>(problem, p, threads);

  const double pairs =
      static_cast<double>(problem.heads_q) * static_cast<double>(p.rows) * static_cast<double>(problem.seq_k);
  p.workers = pairs * static_cast<double>(p.dim + p.dim_v) < Products::kSmallWork ? 1 : max_of(threads, 1);

  std::int64_t at = 0;
  const auto part = [&](std::int64_t bytes) {
    const std::int64_t begin = at;
    at += round_up(bytes, 64);
    return begin;
  };
  part(320);
  p.tickets = part(4 * problem.heads_q * p.blocks_q);
  p.d = part(4 * problem.heads_q * p.rows);
  p.dq_rows = packed ? problem.total_q + problem.batch * (kLanes - 1) : problem.batch * round_up(problem.seq_q, kLanes);
  p.dq = part(4 * problem.heads_q * p.dq_rows * p.dim);
  p.scratch = at;
  PairScratch unused;
  p.scratch_each = carve_scratch<Products>(p, nullptr, &unused);
  return p;
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
