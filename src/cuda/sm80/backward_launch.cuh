// Host side of the sm_80 backward: workspace and launches.
#pragma once

#include "core/tiles.h"
#include "cuda/host/device.h"
#include "cuda/host/launch.h"
#include "cuda/sm80/backward.cuh"
#include "cuda/sm80/backward_host.h"
#include "cuda/sm80/backward_passes.cuh"

namespace onepass::cuda::sm80 {

template <class Shape>
struct BackwardOf {
  using T = typename Shape::Element;
  static constexpr BackwardTile kTile = Shape::kTile;
  static constexpr int kQ = kTile.block_q;
  static constexpr long kSharedBytes = kTile.shared_bytes(Shape::kD, Shape::kDV);

  static Tiles tiles() { return {kQ, kTile.block_k, 2, kTile.threads(), kSharedBytes}; }

  static std::size_t workspace(const Problem& problem) {
    return backward_workspace(problem, kQ, Shape::kD, kTile.warps / kTile.roles);
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
  static BackwardParams params(const Problem& problem, const BackwardOperands& operands, const Launch& launch) {
    BackwardParams p = backward_params(problem, operands, launch, kQ, kTile.block_k, Shape::kD);
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
    return p;
  }
};

template <class T, int kHeadDim, int kHeadDimV, BackwardTile kTiles>
struct BackwardShape {
  using Element = T;
  static constexpr int kD = kHeadDim, kDV = kHeadDimV;
  static constexpr BackwardTile kTile = kTiles;
};

/// A row of kernels.def: buckets of head_dim and head_dim_v, and the shared memory that a thread block may have. A row
/// of 163 KB takes larger tiles where the device has more.
template <class T, int kHeadDim, int kHeadDimV, std::int64_t kLimit>
struct Backward {
  using Common = BackwardOf<BackwardShape<T, kHeadDim, kHeadDimV, backward_tile(kHeadDim, kLimit)>>;
  using Roomy = BackwardOf<BackwardShape<T, kHeadDim, kHeadDimV, roomy_backward_tile(kHeadDim, kLimit)>>;
  static constexpr bool kTwo = Roomy::kTile != Common::kTile;
  static_assert(Common::kSharedBytes <= kLimit && (!kTwo || Roomy::kSharedBytes <= kSharedBytes90));

  static Tiles tiles() { return Common::tiles(); }
  /// For either: the device is not known here.
  static std::size_t workspace(const Problem& problem) {
    return max_of(Common::workspace(problem), Roomy::workspace(problem));
  }
  static Status run(const Problem& problem, const BackwardOperands& operands, const Launch& launch) {
    if constexpr (kTwo) {
      constexpr std::int64_t kReserved = 1024;  // bytes of each block, by the system
      if (multiprocessor_shared_bytes(launch.device) >= Roomy::kSharedBytes + kReserved) {
        return Roomy::run(problem, operands, launch);
      }
    }
    return Common::run(problem, operands, launch);
  }
};

}  // namespace onepass::cuda::sm80
