// The backward pass in float32: one row of kernels.def.
#pragma once

#include <type_traits>

#include "cuda/host/launch.h"
#include "cuda/sm80/backward_f32.cuh"
#include "cuda/sm80/backward_f32_passes.cuh"
#include "cuda/sm80/backward_host.h"

namespace onepass::cuda::sm80 {

template <class Shape>
struct BackwardF32Of {
  static constexpr BackwardF32Tile kTile = Shape::kTile;
  static constexpr int kQ = kTile.block_q, kHeadDim = Shape::kHeadDim;
  static constexpr int kPartsBytes = 2 * PartsTile<kQ, kHeadDim>::kBytes;  // of Q and dO of a tile
  static constexpr std::int64_t kSharedBytes = kTile.shared_bytes(kHeadDim);

  static Tiles tiles() { return {kQ, kTile.block_k(), 1, kTile.threads(), kSharedBytes}; }

  static std::size_t workspace(const Problem& problem) {
    return backward_workspace(problem, kQ, kHeadDim, kTile.warps(), kPartsBytes);
  }

  static Status run(const Problem& problem, const BackwardOperands& operands, const Launch& where) {
    const BackwardParams p = backward_params(problem, operands, where, kQ, kTile.block_k(), kHeadDim, kPartsBytes);
    const std::int64_t query_blocks = p.batch * p.heads_q * p.query_tiles;
    const std::int64_t key_blocks = p.batch * p.heads_kv * p.key_blocks;
    ONEPASS_RETURN_IF_ERROR(launch(&backward_f32_prepare<Shape>, query_blocks, kPassThreads, 0, where, p));
    ONEPASS_RETURN_IF_ERROR(launch(&backward_f32_kernel<Shape>, key_blocks, kTile.threads(), kSharedBytes, where, p));
    ONEPASS_RETURN_IF_ERROR(launch(&backward_f32_finish<Shape>, query_blocks, kPassThreads, 0, where, p));
    if (!p.mask.varlen) return {};
    return launch(&backward_clear_gaps<float>, p.batch + 1, kPassThreads, 0, where, p);
  }
};

/// A row of kernels.def.
template <int kBucket, std::int64_t kLimit>
struct BackwardF32Shape {
  static constexpr int kHeadDim = kBucket;
  static constexpr BackwardF32Tile kTile = backward_f32_tile(kBucket, kLimit);
  static_assert(kTile.shared_bytes(kBucket) <= kLimit);
};
template <class T, int kHeadDim, int kHeadDimV, std::int64_t kLimit>
struct BackwardF32 : BackwardF32Of<BackwardF32Shape<kHeadDim, kLimit>> {
  static_assert(std::is_same_v<T, float> && kHeadDim == kHeadDimV);
};

}  // namespace onepass::cuda::sm80
