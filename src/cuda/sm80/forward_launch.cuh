// The forward pass on mma.sync: one row of kernels.def.
#pragma once

#include <cmath>

#include "cuda/host/device.h"
#include "cuda/host/launch.h"
#include "cuda/sm80/forward_kernel.cuh"

namespace onepass::cuda::sm80 {

struct ForwardPlan {
  static constexpr ForwardSteps kUse = {};
};
template <int kHeadDim>
struct CommonPlan : ForwardPlan {
  static constexpr ForwardTiles kTiles = forward_tiles<kHeadDim>();
};
template <int kHeadDim>
struct RoomyPlan : ForwardPlan {
  static constexpr ForwardTiles kTiles = roomy_forward_tiles<kHeadDim>();
};

template <class T, int kHeadDim, int kHeadDimV, std::int64_t kLimit>
struct Forward {
  static_assert(kHeadDim == kHeadDimV);
  using Common = CommonPlan<kHeadDim>;
  using Roomy = RoomyPlan<kHeadDim>;
  static constexpr ForwardTiles kTiles = Common::kTiles;
  static_assert(kTiles.shared_bytes(kHeadDim) <= kLimit);
  static_assert(Roomy::kTiles.shared_bytes(kHeadDim) <= kSharedBytes90);

  static Tiles tiles() {
    return {kTiles.block_q(), kTiles.block_k, kTiles.stages, kTiles.threads(), kTiles.shared_bytes(kHeadDim)};
  }
  static std::size_t workspace(const Problem&) { return 0; }

  static Status run(const Problem& problem, const ForwardOperands& operands, const Launch& where) {
    if constexpr (Roomy::kTiles != kTiles) {
      constexpr std::int64_t kReserved = 1024;  // bytes of each block, by the system
      const std::int64_t needed = Roomy::kTiles.blocks_per_sm * (Roomy::kTiles.shared_bytes(kHeadDim) + kReserved);
      if (multiprocessor_shared_bytes(where.device) >= needed) return run_plan<Roomy>(problem, operands, where);
    }
    return run_plan<Common>(problem, operands, where);
  }

 private:
  template <class Plan>
  static Status run_plan(const Problem& problem, const ForwardOperands& operands, const Launch& where) {
    constexpr double kLog2e = 1.4426950408889634;
    constexpr std::int64_t kBytesTogether = std::int64_t{32} << 20;  // of K and V, to stay in L2 between query tiles
    ForwardArgs args{problem, operands};
    Problem& p = args.problem;
    if (p.batch == 0) p.batch = 1, p.seq_q = 0, p.mask = {.varlen = true};  // packed rows outside every sequence
    args.q_alignment = row_alignment(operands.q, p.head_dim);
    args.k_alignment = row_alignment(operands.k, p.head_dim);
    args.v_alignment = row_alignment(operands.v, p.head_dim_v);
    args.out_alignment = row_alignment(operands.out, p.head_dim_v);
    args.scale_log2 = static_cast<float>(std::fabs(p.score.scale) * kLog2e);
    args.q_factor = args.scale_log2 == 0 ? 0 : p.score.scale < 0 ? -1 : 1;
    if (args.scale_log2 == 0) args.scale_log2 = static_cast<float>(kLog2e);
    const std::int64_t q_tiles = max_of<std::int64_t>(ceil_div(p.seq_q, Plan::kTiles.block_q()), 1);
    const std::int64_t heads = p.batch * p.heads_q;
    const std::int64_t head_bytes = ceil_div(p.seq_k * (p.head_dim + p.head_dim_v) * 2, p.group());
    const bool even = !p.mask.causal && p.mask.window_left < 0 && p.mask.window_right < 0;
    args.set_places(q_tiles, even ? 1
                                  : clamp_to<std::int64_t>(kBytesTogether / max_of<std::int64_t>(head_bytes, 1), 1,
                                                           max_of<std::int64_t>(heads, 1)));
    return launch(&forward_kernel<T, kHeadDim, Plan>, q_tiles * heads, Plan::kTiles.threads(),
                  Plan::kTiles.shared_bytes(kHeadDim), where, args);
  }
};

}  // namespace onepass::cuda::sm80
