// The forward pass in float32: one row of kernels.def.
#pragma once

#include <cmath>
#include <type_traits>

#include "core/layout.h"
#include "cuda/host/launch.h"
#include "cuda/sm80/forward_f32.cuh"

namespace onepass::cuda::sm80 {

template <class Shape>
struct ForwardF32Of {
  static constexpr ForwardF32Tiles kTiles = Shape::kTiles;

  static Tiles tiles() {
    return {kTiles.block_q(), kTiles.block_k, kTiles.stages, kTiles.threads(), kTiles.shared_bytes(Shape::kHeadDim)};
  }
  static std::size_t workspace(const Problem&) { return 0; }

  static Status run(const Problem& problem, const ForwardOperands& operands, const Launch& where) {
    constexpr double kLog2e = 1.4426950408889634;
    ForwardF32Args args{problem, operands};
    Problem& p = args.problem;
    if (p.batch == 0 && p.mask.varlen)
      p.batch = 1, p.seq_q = 0, p.mask = {.varlen = true};  // packed rows outside every sequence
    args.q_aligned = rows_aligned(operands.q) && p.head_dim % 4 == 0;
    args.k_aligned = rows_aligned(operands.k) && p.head_dim % 4 == 0;
    args.v_aligned = rows_aligned(operands.v) && p.head_dim_v % 4 == 0;
    args.out_aligned = rows_aligned(operands.out);
    args.scale = static_cast<float>(std::fabs(p.score.scale));
    args.scale_log2 = static_cast<float>(std::fabs(p.score.scale) * kLog2e);
    args.q_factor = args.scale_log2 == 0 ? 0 : p.score.scale < 0 ? -1 : 1;
    if (args.scale_log2 == 0) args.scale = 1, args.scale_log2 = static_cast<float>(kLog2e);
    args.lines = static_cast<int>(ceil_div(p.head_dim, 32));
    args.q_tiles = max_of<std::int64_t>(ceil_div(p.seq_q, kTiles.block_q()), 1);
    return launch(&forward_f32_kernel<Shape>, args.q_tiles * p.batch * p.heads_q, kTiles.threads(),
                  kTiles.shared_bytes(Shape::kHeadDim), where, args);
  }
};

/// A row of kernels.def.
template <int kBucket, std::int64_t kLimit>
struct ForwardF32Shape {
  static constexpr int kHeadDim = kBucket;
  static constexpr ForwardF32Tiles kTiles = forward_f32_tiles<kHeadDim>();
  static_assert(kTiles.shared_bytes(kHeadDim) <= kLimit);
};
template <class T, int kHeadDim, int kHeadDimV, std::int64_t kLimit>
struct ForwardF32 : ForwardF32Of<ForwardF32Shape<kHeadDim, kLimit>> {
  static_assert(std::is_same_v<T, float> && kHeadDim == kHeadDimV);
};

}  // namespace onepass::cuda::sm80
