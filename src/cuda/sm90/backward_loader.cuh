// The loading warpgroup: warp 0 takes tiles of the plan, warp 1 loads Q and K, warp 2 dO, warp 3 V. In a call with
// visits warp 3 also takes the tiles, and warp 0 keeps the visits.
#pragma once

#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/sm90/backward_config.cuh"
#include "cuda/sm90/boxes.cuh"

namespace onepass::cuda::sm90 {

/// A place in a ring of kSlots: the slot, and the parity of the round in which it is used.
template <int kSlots>
struct RingPlace {
  int slot = 0, round = 0;
  __device__ __forceinline__ void next() {
    if (++slot == kSlots) slot = 0, round ^= 1;
  }
};

/// A whole warp hands out tiles that have work, and at last one without steps. It takes the next one late, when the one
/// in hand is nearly loaded, so that the blocks end together. The warp calls then(n) when the nth is known to all.
template <class C, class Then>
__device__ void schedule_key_tiles(BackwardShared<C>& shared, const BackwardParams& p, Then then) {
  constexpr int kWords = sizeof(KeyTile) / 4, kSteps = offsetof(KeyTile, steps) / 4;
  const int lane = threadIdx.x % 32;
  const auto count = static_cast<unsigned>(p.key_tiles * p.heads_kv);
  // Blocks of a deterministic call draw their first tile too: those that wait for others need not all be resident.
  unsigned index = blockIdx.x;
  for (unsigned done = 0;; ++done) {
    int word = 0;  // lane i: word i of the tile
    if (done > 0) ptx::mbarrier_wait(ptx::shared_address(&shared.tile_wanted), (done & 1) ^ 1);
    for (bool first = done == 0 && !p.ordered;; first = false) {
      if (!first && p.in_turn) {
        unsigned taken = 0;
        if (lane == 0) taken = atomicAdd(p.next_tile, 1u);
        index = __shfl_sync(~0u, taken, 0) + (p.ordered ? 0 : gridDim.x);
      } else if (!first) {
        index += gridDim.x;
      }
      word = index < count && lane < kWords ? reinterpret_cast<const int*>(p.plan + index)[lane] : 0;
      if (index >= count || __shfl_sync(~0u, word, kSteps) > 0) break;
    }
    ptx::mbarrier_wait(ptx::shared_address(&shared.tile_empty[done % 2]), (done / 2 & 1) ^ 1);
    if (lane < kWords) reinterpret_cast<int*>(&shared.tiles[done % 2])[lane] = word;
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.tile_full[done % 2]));
    if (index >= count) return;
    then(done);
  }
}

/// One thread loads Q with its statistics, and K; another dO. The tile's fields are read
/// again from shared memory for each step, as there are few registers, but before the wait for its slot: the memory is
/// busy and answers late.
template <class C, bool kIsQ>
__device__ void load_key_tiles(BackwardShared<C>& shared, const BackwardParams& p, const CUtensorMap& map_rows,
                               const CUtensorMap& map_k) {
  constexpr int kPanels = kIsQ ? C::kPanels : C::kPanelsV;
  const std::uint32_t s_rows = ptx::shared_address(kIsQ ? shared.q[0] : shared.grad_out[0]);
  const std::uint32_t rows_full = ptx::shared_address(kIsQ ? shared.q_full : shared.grad_out_full);
  RingPlace<C::kStages> stage;
#pragma unroll 1
  for (unsigned done = 0;; ++done) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.tile_full[done % 2]), done / 2 & 1);
    const KeyTile& tile = shared.tiles[done % 2];
    if (tile.steps == 0) return;
    if constexpr (kIsQ) {
      constexpr int kSlots = C::kTile.k_slots;
      const std::uint32_t full = ptx::shared_address(&shared.k_full[done % kSlots]);
      ptx::mbarrier_wait(ptx::shared_address(&shared.k_empty[done % kSlots]), (done / kSlots & 1) ^ 1);
      ptx::mbarrier_arrive_expect(full, sizeof(shared.k[0]));
#pragma unroll 1
      for (int panel = 0; panel < C::kPanels; ++panel) {
        ptx::tma_load(ptx::shared_address(&shared.k[done % kSlots][panel * C::kBlockK * 128]), &map_k, full,
                      box_at(C::kBlockK, panel, tile.k_row, tile.keys, tile.kv_head, tile.batch));
      }
    }
    int head = tile.kv_head * p.group, row = tile.first_row;
#pragma unroll 1
    while (true) {
      const int rows = min(C::kBlockQ, tile.q_rows - row), batch = tile.batch;
      const int operand_row = tile.q_row + row;
      const float* g_stats = nullptr;
      if constexpr (kIsQ) {
        g_stats = p.stats + (head * p.tiles + tile.q_tile + row / C::kBlockQ) * C::kStatFloats;
        if (head == (tile.kv_head + 1) * p.group - 1 && row == tile.first_row + (tile.steps - 1) * C::kBlockQ) {
          ptx::mbarrier_arrive(ptx::shared_address(&shared.tile_wanted));
        }
      }
      const std::uint32_t full = rows_full + 8 * stage.slot;
      ptx::mbarrier_wait(ptx::shared_address(shared.stage_empty) + 8 * stage.slot, stage.round ^ 1);
      ptx::mbarrier_arrive_expect(full, kPanels * C::kBlockQ * 128 + (kIsQ ? C::kStatFloats * 4 : 0));
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        ptx::tma_load(s_rows + (stage.slot * kPanels + panel) * (C::kBlockQ * 128), &map_rows, full,
                      box_at(C::kBlockQ, panel, operand_row, rows, head, batch));
      }
      if constexpr (kIsQ) {
        ptx::bulk_load(ptx::shared_address(shared.stats) + stage.slot * (C::kStatFloats * 4), g_stats,
                       C::kStatFloats * 4, full);
      }
      stage.next();
      row += C::kBlockQ;
      if (row == tile.first_row + tile.steps * C::kBlockQ) {
        row = tile.first_row;
        if (++head == (tile.kv_head + 1) * p.group) break;
      }
    }
    ptx::mbarrier_arrive(ptx::shared_address(&shared.tile_empty[done % 2]));
  }
}

/// One thread loads 64 rows of V of the nth tile, `done`, for their reader, unless there are none.
template <class C>
__device__ __forceinline__ void load_half(BackwardShared<C>& shared, const CUtensorMap& map_v, int half,
                                          unsigned done) {
  const std::uint32_t full = ptx::shared_address(&shared.v_full[half]);
  const KeyTile& tile = shared.tiles[done % 2];
  const int rows = min(tile.keys - 64 * half, 64);
  ptx::mbarrier_wait(ptx::shared_address(&shared.v_empty[half]), (done & 1) ^ 1);
  if (rows > 0) {
    ptx::mbarrier_arrive_expect(full, C::kPanelsV * 64 * 128);
#pragma unroll 1
    for (int panel = 0; panel < C::kPanelsV; ++panel) {
      ptx::tma_load(ptx::shared_address(&shared.v[(panel * C::kBlockK + 64 * half) * 128]), &map_v, full,
                    box_at(64, panel, tile.k_row + 64 * half, rows, tile.kv_head, tile.batch));
    }
  } else {
    ptx::mbarrier_arrive(full);
  }
  ptx::mbarrier_arrive(ptx::shared_address(&shared.tile_empty[done % 2]));
}
template <class C>
__device__ void load_values(BackwardShared<C>& shared, const CUtensorMap& map_v, int half) {
#pragma unroll 1
  for (unsigned done = 0;; ++done) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.tile_full[done % 2]), done / 2 & 1);
    if (shared.tiles[done % 2].steps == 0) return;
    load_half<C>(shared, map_v, half, done);
  }
}

}  // namespace onepass::cuda::sm90
