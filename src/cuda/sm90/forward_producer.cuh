// The producer warpgroup: warp 0 takes tiles, warp 1 loads Q and K, warp 2
// loads V, warp 3 clears the rows outside every packed sequence. Two loaders,
// since one would queue the next tile's Q and K behind this tile's last slot of
// V.
#pragma once

#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/forward_schedule.cuh"
#include "cuda/sm90/forward_write.cuh"

namespace onepass::cuda::sm90 {

/// Warp 0: hands tiles out, and clears those whose rows see no key.
template <class C>
__device__ void schedule_tiles(ForwardShared<C>& shared, const ForwardParams& p) {
  // Tiles are handed out before the earlier grids have ended, where nothing in device memory says which.
  if (p.next_tile != nullptr || p.mask.k_start != nullptr) ptx::await_earlier_grids();
  ForwardSchedule<C> schedule(p);
  for (unsigned at = 0;; ++at) {
    const unsigned slot = at % C::kTileSlots;
    RowTile& tile = shared.tiles[slot];
    ptx::mbarrier_wait(ptx::shared_address(&shared.tile_empty[slot]), (at / C::kTileSlots & 1) ^ 1);
    // A tile in turn is taken when the one before is begun: blocks that hold long ones in advance would end late.
    if (p.next_tile != nullptr && at > 0) ptx::mbarrier_wait(ptx::shared_address(&shared.tile_begun), (at - 1) & 1);
    int blocks;
    while ((blocks = schedule.next(tile, shared.blocks[slot])) == 0) {
      ptx::await_earlier_grids();
      __syncwarp();
      clear_rows<typename C::T>(p, tile.batch, tile.head, tile.q_row, tile.q_row + tile.rows);
      __syncwarp();
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.tile_full[slot]));
    if (blocks < 0) return;
  }
}

/// One thread loads the blocks of K (of V) of every tile, from the right, and
/// with K the tile's Q.
template <class C, bool kIsK>
__device__ void load_tiles(ForwardShared<C>& shared, const CUtensorMap& map, const CUtensorMap& map_q) {
  constexpr int kPanels = kIsK ? C::kPanels : C::kPanelsV;
  std::uint64_t* const all_full = kIsK ? shared.k_full : shared.v_full;
  std::uint64_t* const all_empty = kIsK ? shared.k_empty : shared.v_empty;
  const std::uint32_t s_slots = ptx::shared_address(kIsK ? &shared.k[0][0] : &shared.v[0][0]);
  unsigned at = 0;
  for (unsigned tile_at = 0;; ++tile_at) {
    const unsigned tile_slot = tile_at % C::kTileSlots;
    ptx::mbarrier_wait(ptx::shared_address(&shared.tile_full[tile_slot]), tile_at / C::kTileSlots & 1);
    const RowTile& tile = shared.tiles[tile_slot];
    const int first = tile.first, last = tile.last, k_row = tile.k_row, k_length = tile.k_length;
    const int kv_head = tile.kv_head, batch = tile.batch;
    if (last < first) return;
    if constexpr (kIsK) ptx::mbarrier_arrive(ptx::shared_address(&shared.tile_begun));
    const int q_row = tile.q_row, rows = tile.rows, head = tile.head;
    const auto load_q = [&] {
      const unsigned q_slot = tile_at % C::kQStages;
      const std::uint32_t q_full = ptx::shared_address(&shared.q_full[q_slot]);
      ptx::mbarrier_wait(ptx::shared_address(&shared.q_empty[q_slot]), (tile_at / C::kQStages & 1) ^ 1);
      ptx::mbarrier_arrive_expect(q_full, C::kQBytes);
#pragma unroll 1
      for (int panel = 0; panel < C::kPanels; ++panel) {
        ptx::tma_load(ptx::shared_address(&shared.q[q_slot][panel * C::kBlockQ * 128]), &map_q, q_full,
                      box_at(C::kBlockQ, panel, q_row, rows, head, batch));
      }
    };
    if constexpr (kIsK && C::kQStages > 1) load_q();
    ptx::mbarrier_arrive(ptx::shared_address(&shared.tile_empty[tile_slot]));
#pragma unroll 1
    for (int block = last; block >= first; --block, ++at) {
      const int key = block * C::kBlockK;
      const unsigned slot = at % C::kStages;
      const std::uint32_t full = ptx::shared_address(all_full + slot);
      ptx::mbarrier_wait(ptx::shared_address(all_empty + slot), (at / C::kStages & 1) ^ 1);
      ptx::mbarrier_arrive_expect(full, kPanels * C::kBlockK * 128);
#pragma unroll 1
      for (int panel = 0; panel < kPanels; ++panel) {
        ptx::tma_load(s_slots + (slot * kPanels + panel) * (C::kBlockK * 128), &map, full,
                      box_at(C::kBlockK, panel, k_row + key, min(C::kBlockK, k_length - key), kv_head, batch));
      }
      // A single slot of Q is free later than one of K.
      if (kIsK && C::kQStages == 1 && block == last) load_q();
    }
  }
}

/// Warp 3: rows of packed operands before, between and after the sequences.
/// Lanes look at one gap each.
template <class C>
__device__ void clear_outside(const ForwardParams& p) {
  const int lane = threadIdx.x % 32;
  for (int first = 0; first <= p.batch; first += 32) {
    const int b = first + lane;  // the gap before sequence b, or after the last
    int begin = 0, end = 0;
    if (b > 0 && b <= p.batch) {
      const Sequence s = sequence_at(p.mask, b - 1, p.seq_q, p.seq_k, p.total_q, p.total_k);
      begin = static_cast<int>(s.q_row + s.q_length);
    }
    if (b <= p.batch) end = p.total_q;
    if (b < p.batch) {
      end = static_cast<int>(sequence_at(p.mask, b, p.seq_q, p.seq_k, p.total_q, p.total_k).q_row);
    }
    for (unsigned gaps = __ballot_sync(~0u, begin < end); gaps != 0; gaps &= gaps - 1) {
      const int gap = __ffs(gaps) - 1;
      const int gap_end = __shfl_sync(~0u, end, gap);
      for (int row = __shfl_sync(~0u, begin, gap) + blockIdx.x; row < gap_end; row += gridDim.x) {
        for (int head = 0; head < p.heads_q; ++head) clear_rows<typename C::T>(p, 0, head, row, row + 1);
      }
    }
  }
}

}  // namespace onepass::cuda::sm90
