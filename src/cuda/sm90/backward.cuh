// The Hopper backward: persistent blocks of two main warpgroups, one for dQ, one that loads. docs/hopper.md tells why.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/backward_keys.cuh"
#include "cuda/sm90/backward_pair.cuh"
#include "cuda/sm90/backward_visits.cuh"

namespace onepass::cuda::sm90 {

/// Registers of each thread of this warpgroup from here on; the launch has given them 128.
template <int kRegisters>
__device__ __forceinline__ void set_registers() {
  if constexpr (kRegisters > 128) {
    ptx::registers_increase<kRegisters>();
  } else {
    ptx::registers_decrease<kRegisters>();
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    backward_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_do,
                    const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
                    const __grid_constant__ BackwardParams params) {
  BlockShared<C>& shared = *reinterpret_cast<BlockShared<C>*>(ptx::dynamic_shared());
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  if (threadIdx.x == 0) {
    const auto init = [](std::uint64_t* barriers, int slots, int arrivals) {
      for (int i = 0; i < slots; ++i) ptx::mbarrier_init(ptx::shared_address(barriers + i), arrivals);
    };
    init(shared.k_full, C::kTile.k_slots, 1);
    init(shared.v_full, C::kHalves, 1);
    init(shared.v_empty, C::kHalves, 4);
    init(shared.k_empty, C::kTile.k_slots, 4);
    init(shared.q_full, C::kStages, 1);
    init(shared.grad_out_full, C::kStages, 1);
    init(shared.stage_empty, C::kStages, 4 * C::kMains);
    init(shared.ds_full, C::kTile.ds_slots, 4 * C::kHalves);
    init(shared.ds_empty, C::kTile.ds_slots, 4);
    init(shared.tile_full, 2, 1);
    init(&shared.tile_wanted, 1, 1);
    init(shared.tile_empty, 2, 4 * (C::kMains + 1) + 2 + C::kHalves + (params.visits != nullptr));
    init(shared.parts_full[0], 4 * C::kTile.dq_slots, 1);
    init(shared.visit_full, kVisitSlots, 1);
    init(shared.sums_full, kVisitSlots, 4);
    if constexpr (C::kPaired) {
      init(&shared.p_full, 1, 4);
      init(&shared.p_empty, 1, 4);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == C::kMains + 1) {
    set_registers<C::kTile.loader_registers>();
    const bool visits = params.visits != nullptr;
    if (threadIdx.x / 32 % 4 == 0) {
      if (!visits) {
        schedule_key_tiles<C>(shared, params, [](unsigned) {});
      } else if (threadIdx.x % 128 == 0) {
        VisitKeeper<C>(shared, params).run();
      }
    } else if (threadIdx.x % 128 == 32) {
      load_key_tiles<C, true>(shared, params, map_q, map_k);
    } else if (threadIdx.x % 128 == 64) {
      load_key_tiles<C, false>(shared, params, map_do, map_k);
    } else if (threadIdx.x % 128 >= 96) {
      const int half = threadIdx.x % 128 - 96;
      if (visits) {
        schedule_key_tiles<C>(shared, params, [&](unsigned done) {
          if (half < C::kHalves) load_half<C>(shared, map_v, half, done);
          __syncwarp();
        });
      } else if (half < C::kHalves) {
        load_values<C>(shared, map_v, half);
      }
    }
  } else if (warpgroup == C::kMains) {
    set_registers<C::kTile.query_registers>();
    if (params.passes) {
      accumulate_queries<C>(shared, params);
    } else {
      QueryWarp<C>(shared, params).run();
    }
  } else if constexpr (!C::kPaired) {
    set_registers<C::kTile.main_registers[0]>();
    KeyWarpgroup<C>(shared, params, warpgroup).run();
  } else if (warpgroup == 0) {
    set_registers<C::kTile.main_registers[0]>();
    PairValues<C>(shared, params).run();
  } else {
    set_registers<C::kTile.main_registers[1]>();
    PairKeys<C>(shared, params).run();
  }
}

}  // namespace onepass::cuda::sm90
