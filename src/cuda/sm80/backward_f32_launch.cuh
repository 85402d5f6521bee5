// The backward pass in float32: one row of kernels.def.
#pragma once

#include <type_traits>

#include "cuda/host/launch.h"
#include "cuda/sm80/backward_f32.cuh"
#include "cuda/sm80/backward_f32_passes.cuh"

namespace onepass::cuda::sm80 {

template <class Shape>
struct BackwardF32Of {
  static constexpr BackwardF32Tile kTile = Shape::kTile;
  static constexpr int kQ = kTile.block_q, kHeadDim = Shape::kHeadDim;
  static constexpr std::int64_t kSharedBytes = kTile.shared_bytes(kHeadDim);

  static Tiles tiles() { return {kQ, kTile.block_k(), 1, kTile.threads(), kSharedBytes}; }

  /// Bytes: 4 heads_q (block_q (bucket + 2) + warps) tiles + 4, see BackwardParams.
  static std::size_t workspace(const Problem& problem) {
    const std::int64_t each = 4 * (kQ * (kHeadDim + 2) + kTile.warps());
    return static_cast<std::size_t>(problem.heads_q * tile_count(problem) * each + 4);
  }

  static Status run(const Problem& problem, const BackwardOperands& operands, const Launch& where) {
    const BackwardParams p = params(problem, operands, where);
    const std::int64_t query_blocks = p.batch * p.heads_q * p.query_tiles;
    const std::int64_t key_blocks = p.batch * p.heads_kv * p.key_blocks;
    ONEPASS_RETURN_IF_ERROR(launch(&backward_f32_prepare<Shape>, query_blocks, kF32PassThreads, 0, where, p));
    ONEPASS_RETURN_IF_ERROR(launch(&backward_f32_kernel<Shape>, key_blocks, kTile.threads(), kSharedBytes, where, p));
    ONEPASS_RETURN_IF_ERROR(launch(&backward_f32_finish<Shape>, query_blocks, kF32PassThreads, 0, where, p));
    if (!p.mask.varlen) return {};
    return launch(&backward_f32_clear_gaps<Shape>, p.batch + 1, kF32PassThreads, 0, where, p);
  }

 private:
  static std::int64_t tile_count(const Problem& problem) {
    return problem.mask.varlen ? problem.total_q / kQ + problem.batch : problem.batch * ceil_div(problem.seq_q, kQ);
  }

  static BackwardParams params(const Problem& problem, const BackwardOperands& operands, const Launch& where) {
    BackwardParams p = {};
    p.mask = problem.mask;
    p.batch = problem.batch, p.seq_q = problem.seq_q, p.seq_k = problem.seq_k;
    p.total_q = problem.total_q, p.total_k = problem.total_k;
    p.tiles = tile_count(problem);
    p.heads_q = static_cast<int>(problem.heads_q), p.heads_kv = static_cast<int>(problem.heads_kv);
    p.group = static_cast<int>(problem.group());
    p.head_dim = static_cast<int>(problem.head_dim), p.head_dim_v = static_cast<int>(problem.head_dim_v);
    p.scale = static_cast<float>(problem.score.scale);
    p.deterministic = problem.deterministic == 1;
    p.q_aligned = f32_rows_aligned(operands.q), p.k_aligned = f32_rows_aligned(operands.k);
    p.v_aligned = f32_rows_aligned(operands.v), p.out_aligned = f32_rows_aligned(operands.out);
    p.grad_out_aligned = f32_rows_aligned(operands.grad_out), p.grad_q_aligned = f32_rows_aligned(operands.grad_q);
    p.grad_k_aligned = f32_rows_aligned(operands.grad_k), p.grad_v_aligned = f32_rows_aligned(operands.grad_v);
    p.key_blocks = ceil_div(problem.seq_k, kTile.block_k()), p.query_tiles = ceil_div(problem.seq_q, kQ);
    p.operands = operands;
    p.dq_sum = static_cast<float*>(where.workspace);
    p.stats = p.dq_sum + p.heads_q * p.tiles * kQ * kHeadDim;
    p.turns = reinterpret_cast<unsigned*>(p.stats + p.heads_q * p.tiles * 2 * kQ);
    return p;
  }
};

/// A row of kernels.def.
template <int kBucket, std::int64_t kLimit>
struct BackwardF32Shape {
  static constexpr int kHeadDim = kBucket;
  static constexpr BackwardF32Tile kTile = backward_f32_tile<kBucket>();
  static_assert(kTile.shared_bytes(kBucket) <= kLimit);
};
template <class T, int kHeadDim, int kHeadDimV, std::int64_t kLimit>
struct BackwardF32 : BackwardF32Of<BackwardF32Shape<kHeadDim, kLimit>> {
  static_assert(std::is_same_v<T, float> && kHeadDim == kHeadDimV);
};

}  // namespace onepass::cuda::sm80
