// Host side of the sm_80 backward: workspace and launches.
#pragma once

#include "core/tiles.h"
#include "cuda/host/launch.h"
#include "cuda/sm80/backward.cuh"
#include "cuda/sm80/backward_passes.cuh"

namespace onepass::cuda::sm80 {

/// True if every row of a tensor of 16-bit elements begins at a multiple of 16 bytes.
inline bool rows_aligned(const Tensor& x) {
  const std::int64_t unit = 16 / dtype_size(x.dtype);
  return reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 && x.stride_batch % unit == 0 && x.stride_seq % unit == 0 &&
         x.stride_head % unit == 0;
}

template <class Shape>
struct BackwardOf {
  using T = typename Shape::Element;
  static constexpr BackwardTile kTile = Shape::kTile;
  static constexpr int kQ = kTile.block_q;
  static constexpr long kSharedBytes = kTile.shared_bytes(Shape::kD, Shape::kDV);

  static Tiles tiles() { return {kQ, kTile.block_k, 2, kTile.threads(), kSharedBytes}; }

  /// Bytes: 4 heads_q (block_q (bucket + 2) + warps) tiles + 4, see BackwardParams.
  static std::size_t workspace(const Problem& problem) {
    const std::int64_t each = 4 * (kQ * (Shape::kD + 2) + kTile.warps);
    return static_cast<std::size_t>(problem.heads_q * tile_count(problem) * each + 4);
  }

  static Status run(const Problem& problem, const BackwardOperands& operands, const Launch& launch) {
    const BackwardParams p = params(problem, operands, launch);
    const std::int64_t query_blocks = p.batch * p.heads_q * p.query_tiles;
    const std::int64_t key_blocks = p.batch * p.heads_kv * p.key_blocks;
    ONEPASS_RETURN_IF_ERROR(cuda::launch(backward_prepare<Shape>, query_blocks, kPassThreads, 0, launch, p));
    ONEPASS_RETURN_IF_ERROR(cuda::launch(backward_kernel<Shape>, key_blocks, kTile.threads(), kSharedBytes, launch, p));
    ONEPASS_RETURN_IF_ERROR(cuda::launch(backward_finish<Shape>, query_blocks, kPassThreads, 0, launch, p));
    if (p.mask.cu_seqlens_q == nullptr) return {};
    return cuda::launch(backward_clear_gaps<T>, p.batch + 1, kPassThreads, 0, launch, p);
  }

 private:
  static std::int64_t tile_count(const Problem& problem) {
    return problem.mask.varlen ? problem.total_q / kQ + problem.batch : problem.batch * ceil_div(problem.seq_q, kQ);
  }

  static BackwardParams params(const Problem& problem, const BackwardOperands& operands, const Launch& launch) {
    BackwardParams p = {};
    p.mask = problem.mask;
    p.batch = problem.batch, p.seq_q = problem.seq_q, p.seq_k = problem.seq_k;
    p.total_q = problem.total_q, p.total_k = problem.total_k;
    p.tiles = tile_count(problem);
    p.heads_q = static_cast<int>(problem.heads_q), p.heads_kv = static_cast<int>(problem.heads_kv);
    p.group = static_cast<int>(problem.group());
    p.head_dim = static_cast<int>(problem.head_dim), p.head_dim_v = static_cast<int>(problem.head_dim_v);
    p.scale = static_cast<float>(problem.score.scale);
    p.scale_log2 = static_cast<float>(problem.score.scale * 1.4426950408889634);
    p.deterministic = problem.deterministic == 1;
    p.q_aligned = rows_aligned(operands.q), p.k_aligned = rows_aligned(operands.k);
    p.v_aligned = rows_aligned(operands.v), p.out_aligned = rows_aligned(operands.out);
    p.grad_out_aligned = rows_aligned(operands.grad_out), p.grad_q_aligned = rows_aligned(operands.grad_q);
    p.grad_k_aligned = rows_aligned(operands.grad_k), p.grad_v_aligned = rows_aligned(operands.grad_v);
    const auto whole = [](const Tensor& x, bool aligned, std::int64_t dim, std::int64_t bucket) {
      return aligned && dim == bucket && 2 * kQ * x.stride_seq <= INT32_MAX && 2 * x.stride_head <= INT32_MAX;
    };
    const Tensor &q = operands.q, &grad_out = operands.grad_out;
    p.q_whole = whole(q, p.q_aligned, p.head_dim, Shape::kD);
    p.grad_out_whole = whole(grad_out, p.grad_out_aligned, p.head_dim_v, Shape::kDV);
    p.q_row_bytes = static_cast<std::uint32_t>(2 * q.stride_seq);
    p.q_head_bytes = static_cast<std::uint32_t>(2 * q.stride_head);
    p.grad_out_row_bytes = static_cast<std::uint32_t>(2 * grad_out.stride_seq);
    p.grad_out_head_bytes = static_cast<std::uint32_t>(2 * grad_out.stride_head);
    p.key_blocks = ceil_div(problem.seq_k, kTile.block_k), p.query_tiles = ceil_div(problem.seq_q, kQ);
    p.operands = operands;
    p.dq_sum = static_cast<float*>(launch.workspace);
    p.stats = p.dq_sum + p.heads_q * p.tiles * kQ * Shape::kD;
    p.turns = reinterpret_cast<unsigned*>(p.stats + p.heads_q * p.tiles * 2 * kQ);
    return p;
  }
};

/// A row of kernels.def: buckets of head_dim and head_dim_v, and the shared memory that a thread block may have.
template <class T, int kHeadDim, int kHeadDimV, std::int64_t kLimit>
struct BackwardShape {
  using Element = T;
  static constexpr int kD = kHeadDim, kDV = kHeadDimV;
  static constexpr BackwardTile kTile = backward_tile(kHeadDim, kLimit);
  static_assert(kTile.shared_bytes(kD, kDV) <= kLimit);
};
template <class T, int kHeadDim, int kHeadDimV, std::int64_t kLimit>
using Backward = BackwardOf<BackwardShape<T, kHeadDim, kHeadDimV, kLimit>>;

}  // namespace onepass::cuda::sm80
