// What the launches of the sm_80 backward share, 16-bit and float32: the workspace's size and the kernels' parameters.
#pragma once

#include "core/layout.h"
#include "cuda/sm80/backward_params.h"

namespace onepass::cuda::sm80 {

/// Query tiles of one head, all items.
inline std::int64_t query_tile_count(const Problem& problem, int block_q) {
  return problem.mask.varlen ? problem.total_q / block_q + problem.batch
                             : problem.batch * ceil_div(problem.seq_q, block_q);
}

/// Bytes: heads_q (4 block_q (bucket + 2) + parts_bytes + 4 warps) tiles + 4, see BackwardParams.
inline std::size_t backward_workspace(const Problem& problem, int block_q, int bucket, int warps, int parts_bytes = 0) {
  const std::int64_t each = 4 * (block_q * (bucket + 2) + warps) + parts_bytes;
  return static_cast<std::size_t>(problem.heads_q * query_tile_count(problem, block_q) * each + 4);
}

/// All but how Q and dO are read where their rows are whole.
inline BackwardParams backward_params(const Problem& problem, const BackwardOperands& operands, const Launch& launch,
                                      int block_q, int block_k, int bucket, int parts_bytes = 0) {
  BackwardParams p = {};
  p.mask = problem.mask;
  p.batch = problem.batch, p.seq_q = problem.seq_q, p.seq_k = problem.seq_k;
  p.total_q = problem.total_q, p.total_k = problem.total_k;
  p.tiles = query_tile_count(problem, block_q);
  p.heads_q = static_cast<int>(problem.heads_q), p.heads_kv = static_cast<int>(problem.heads_kv);
  p.group = static_cast<int>(problem.group());
  p.head_dim = static_cast<int>(problem.head_dim), p.head_dim_v = static_cast<int>(problem.head_dim_v);
  p.scale = static_cast<float>(problem.score.scale);
  p.scale_log2 = static_cast<float>(problem.score.scale * 1.4426950408889634);
  p.q_aligned = rows_aligned(operands.q), p.k_aligned = rows_aligned(operands.k);
  p.v_aligned = rows_aligned(operands.v), p.out_aligned = rows_aligned(operands.out);
  p.grad_out_aligned = rows_aligned(operands.grad_out), p.grad_q_aligned = rows_aligned(operands.grad_q);
  p.grad_k_aligned = rows_aligned(operands.grad_k), p.grad_v_aligned = rows_aligned(operands.grad_v);
  p.key_blocks = ceil_div(problem.seq_k, block_k), p.query_tiles = ceil_div(problem.seq_q, block_q);
  // Without rows there are no turns, and no block of the first pass that would set their counters to 0.
  p.deterministic = problem.deterministic == 1 && p.query_tiles > 0;
  p.operands = operands;
  p.dq_sum = static_cast<float*>(launch.workspace);
  p.stats = p.dq_sum + p.heads_q * p.tiles * block_q * bucket;
  p.parts = reinterpret_cast<unsigned char*>(p.stats + p.heads_q * p.tiles * 2 * block_q);
  p.turns = reinterpret_cast<unsigned*>(p.parts + p.heads_q * p.tiles * parts_bytes);
  return p;
}

}  // namespace onepass::cuda::sm80
