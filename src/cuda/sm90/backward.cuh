// The Hopper backward: persistent blocks of two main warpgroups, one for dQ, one that loads. docs/hopper.md tells why.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/backward_keys.cuh"

namespace onepass::cuda::sm90 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    backward_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_do,
                    const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
                    const __grid_constant__ CUtensorMap map_dk, const __grid_constant__ CUtensorMap map_dv,
                    const __grid_constant__ BackwardParams params) {
  BackwardShared<C>& shared = *reinterpret_cast<BackwardShared<C>*>(ptx::dynamic_shared());
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  if (threadIdx.x == 0) {
    const auto init = [](std::uint64_t* barriers, int slots, int arrivals) {
      for (int i = 0; i < slots; ++i) ptx::mbarrier_init(ptx::shared_address(barriers + i), arrivals);
    };
    init(shared.k_full, 2, 1);
    init(shared.v_full, C::kMains, 1);
    init(shared.k_empty, 2, C::kMains);
    init(shared.q_full, C::kStages, 1);
    init(shared.grad_out_full, C::kStages, 1);
    init(shared.stage_empty, C::kStages, 4 * C::kMains);
    init(shared.ds_full, 2, 4 * C::kMains);
    init(shared.ds_empty, 2, 4);
    init(shared.tile_full, 2, 1);
    init(&shared.tile_wanted, 1, 1);
    init(shared.tile_empty, 2, 4 * (C::kMains + 1) + 2);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == C::kMains + 1) {
    ptx::registers_decrease<C::kTile.loader_registers>();
    if (threadIdx.x / 32 % 4 == 0) {
      schedule_key_tiles<C>(shared, params);
    } else if (threadIdx.x % 128 == 32) {
      load_key_tiles<C, true>(shared, params, map_q, map_k);
    } else if (threadIdx.x % 128 == 64) {
      load_key_tiles<C, false>(shared, params, map_do, map_k);
    }
  } else if (warpgroup == C::kMains) {
    ptx::registers_decrease<C::kTile.query_registers>();
    accumulate_queries<C>(shared, params);
  } else {
    ptx::registers_increase<C::kTile.main_registers>();
    KeyWarpgroup<C>(shared, params, map_v, map_dk, map_dv, warpgroup).run();
  }
}

}  // namespace onepass::cuda::sm90
