// The Hopper forward: persistent blocks of one producer warpgroup, which loads
// by TMA, and 2 to 4 consumers, which multiply by wgmma. docs/hopper.md tells
// why each choice.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/forward_consumer.cuh"
#include "cuda/sm90/forward_producer.cuh"

namespace onepass::cuda::sm90 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                   const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_out,
                   const __grid_constant__ ForwardParams params) {
  ForwardShared<C>& shared = *reinterpret_cast<ForwardShared<C>*>(ptx::dynamic_shared());
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);

  if (threadIdx.x == 0) {
    const auto init = [](std::uint64_t* barriers, int slots, int arrivals) {
      for (int i = 0; i < slots; ++i) ptx::mbarrier_init(ptx::shared_address(barriers + i), arrivals);
    };
    init(shared.q_full, C::kQStages, 1);
    init(shared.q_empty, C::kQStages, C::kWarpgroups);
    init(shared.k_full, C::kStages, 1);
    init(shared.k_empty, C::kStages, C::kWarpgroups);
    init(shared.v_full, C::kStages, 1);
    init(shared.v_empty, C::kStages, C::kWarpgroups);
    init(shared.tile_full, C::kTileSlots, 1);
    init(shared.tile_empty, C::kTileSlots, C::kWarpgroups + 2);
    init(&shared.tile_begun, 1, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::registers_decrease<C::kTile.producer_registers>();
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      schedule_tiles<C>(shared, params);
      return;
    }
    ptx::await_earlier_grids();
    if (warp == 1 && threadIdx.x % 32 == 0) load_tiles<C, true>(shared, map_k, map_q);
    if (warp == 2 && threadIdx.x % 32 == 0) load_tiles<C, false>(shared, map_v, map_q);
    if (warp == 3 && params.mask.varlen) clear_outside<C>(params);
  } else {
    ptx::registers_increase<C::kTile.consumer_registers>();
    ptx::await_earlier_grids();
    ptx::admit_next_grid();
    ForwardConsumer<C>(shared, params, map_out, warpgroup - 1).run();
  }
}

}  // namespace onepass::cuda::sm90
