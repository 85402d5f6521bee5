// The warpgroup of dQ: dQ += dS K, some columns at a time, added to the float32 sums in global memory by bulk
// reductions.
#pragma once

#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_loader.cuh"

namespace onepass::cuda::sm90 {

/// A value of shared memory that is the same in all lanes, in a uniform register.
__device__ __forceinline__ int uniform(int x) {
  return __reduce_max_sync(~0u, x);
}

/// r (64, dq_columns) = dS K, number `product` of those of a step: 64 rows of dS (block_q, block_k), some columns of K.
template <class C>
__device__ __forceinline__ void multiply_ds(float (&r)[C::kTile.dq_columns / 2], std::uint32_t ds_low,
                                            std::uint32_t k_low, int product) {
  constexpr int kColumns = C::kTile.dq_columns, kProductsOfRows = C::kD / kColumns;
  const int rows = product / kProductsOfRows, panel = product % kProductsOfRows * (kColumns / 64);
  ptx::keep(r);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < C::kBlockK / 16; ++k) {
    // A: dS, 64 rows, k along the columns; B: K, k along the rows.
    const std::uint32_t a = ds_low + (((k / 4) * C::kBlockQ * 128 + rows * 64 * 128 + (k % 4) * 32) >> 4);
    const std::uint32_t b = k_low + ((panel * C::kBlockK * 128 + k * 16 * 128) >> 4);
    ptx::Wgmma<typename C::T, kColumns>::template ss<0, 1>(r, ptx::descriptor(a), ptx::descriptor(b), k > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::keep(r);
}

/// A warp's quarter of a piece, its 16 rows in the order of the registers, to shared memory, for a bulk copy.
template <class C>
__device__ __forceinline__ void stage_sums(const float* r, std::uint32_t s_part, int lane) {
#pragma unroll
  for (int i = 0; i < C::kPiece / 8; ++i) {
    ptx::store_shared(s_part + (i * 32 + lane) * 16, r[4 * i], r[4 * i + 1], r[4 * i + 2], r[4 * i + 3]);
  }
  ptx::fence_async_shared();
  __syncwarp();
}

template <class C>
__device__ void accumulate_queries(BackwardShared<C>& shared, const BackwardParams& p) {
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  constexpr int kWarpFloats = C::kPieceFloats / 4, kColumns = C::kTile.dq_columns, kSlots = C::kTile.dq_slots;
  constexpr int kKSlots = C::kTile.k_slots;
  constexpr int kProducts = C::kDqFloats / (64 * kColumns);
  const std::uint32_t ds_low = ptx::descriptor_low(ptx::shared_address(shared.ds));
  const std::uint32_t s_own = ptx::shared_address(shared.dq) + warp * kWarpFloats * 4;
  RingPlace<C::kTile.ds_slots> ds;
  unsigned visit = 0;  // those begun, of a call that keeps them
  // Lane 0 tells the keeper that what it has added is in memory.
  const auto report = [&] {
    ptx::bulk_wait();
    ptx::mbarrier_arrive(ptx::shared_address(&shared.sums_full[(visit - 1) % kVisitSlots]));
  };
  float r_dq[kColumns / 2];
#pragma unroll 1
  for (unsigned done = 0;; ++done) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.tile_full[done % 2]), done / 2 & 1);
    const KeyTile& tile = shared.tiles[done % 2];
    const int steps = uniform(tile.steps);
    if (steps == 0) break;
    float* g_dq = p.dq + (tile.kv_head * p.group * p.tiles + tile.q_tile + tile.first_row / C::kBlockQ) * C::kDqFloats +
                  warp * kWarpFloats;
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.tile_empty[done % 2]));
    const std::uint32_t k_low = ptx::descriptor_low(ptx::shared_address(shared.k[done % kKSlots]), C::kBlockK * 128);
    ptx::mbarrier_wait(ptx::shared_address(&shared.k_full[done % kKSlots]), done / kKSlots & 1);
#pragma unroll 1
    for (int head = 0; head < p.group; ++head) {
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        ptx::mbarrier_wait(ptx::shared_address(&shared.ds_full[ds.slot]), ds.round);
        const std::uint32_t ds_now = ds_low + ds.slot * (sizeof(shared.ds[0]) >> 4);
#pragma unroll
        for (int product = 0; product < kProducts; ++product) {
          multiply_ds<C>(r_dq, ds_now, k_low, product);
          if (product == kProducts - 1 && lane == 0) {
            ptx::mbarrier_arrive(ptx::shared_address(&shared.ds_empty[ds.slot]));
          }
#pragma unroll
          for (int part = 0; part < kColumns / C::kPiece; ++part) {
            const int piece = product * (kColumns / C::kPiece) + part;
            const float* const r = r_dq + part * (C::kPiece / 2);
            const bool first = piece == 0 && p.visits != nullptr;
            if (lane == 0) {
              if (!first) {
                ptx::bulk_wait_read_but<kSlots - 1>();
              } else if (head + step > 0) {
                report();  // of the step before: late enough to wait for nothing
              }
            }
            __syncwarp();
            const std::uint32_t s_part = s_own + piece % kSlots * (C::kPieceFloats * 4);
            stage_sums<C>(r, s_part, lane);
            if (lane == 0) {
              if (first) {
                ptx::mbarrier_wait(ptx::shared_address(&shared.visit_full[visit % kVisitSlots]),
                                   visit / kVisitSlots & 1);
                ++visit;
              }
              ptx::bulk_reduce_add(g_dq + piece * C::kPieceFloats, s_part, kWarpFloats * 4);
              ptx::bulk_commit();
            }
          }
        }
        ds.next();
        g_dq += C::kDqFloats;
      }
      g_dq += (p.tiles - steps) * C::kDqFloats;
    }
    if (lane == 0) {
      ptx::mbarrier_arrive(ptx::shared_address(&shared.k_empty[done % kKSlots]));
      if (p.visits != nullptr) report();
    }
  }
  if (lane == 0) ptx::bulk_wait();
}

}  // namespace onepass::cuda::sm90
