// The warpgroup of dQ: dS K in 64 x 64 chunks, summed in float32 in global memory by bulk stores and reductions. Each
// warp looks after its quarter of each chunk alone. The block that adds the last part of a tile rounds it and writes
// dQ, while the sums are still in the L2 cache.
#pragma once

#include "cuda/ptx/global.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_loader.cuh"

namespace onepass::cuda::sm90 {

/// A value that is the same in all lanes, in a uniform register.
__device__ __forceinline__ int uniform(int x) {
  return __reduce_max_sync(~0u, x);
}

template <class C>
class QueryWarp {
 public:
  using T = typename C::T;

  __device__ __forceinline__ QueryWarp(BackwardShared<C>& shared, const BackwardParams& params,
                                       const CUtensorMap& map_dq)
      : s_(shared), p_(params), map_dq_(map_dq) {}

  __device__ __forceinline__ void run() {
    RingPlace<2> ds;
    Place now;
#pragma unroll 1
    for (unsigned done = 0;; ++done) {
      ptx::mbarrier_wait(ptx::shared_address(&s_.tile_full[done % 2]), done / 2 & 1);
      const KeyTile& tile = s_.tiles[done % 2];
      if (uniform(tile.steps) == 0) break;
      const int wrap_row = uniform(tile.wrap_row), last_row = uniform(tile.last_row);
      const int first_row = uniform(tile.first_row), rank = uniform(tile.rank);
      const int q_row = uniform(tile.q_row), q_rows = uniform(tile.q_rows);
      const int q_tile = uniform(tile.q_tile), end_head = (uniform(tile.kv_head) + 1) * p_.group;
      now.batch = uniform(tile.batch);
      now.head = end_head - p_.group;
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.tile_empty[done % 2]));
      ptx::mbarrier_wait(ptx::shared_address(&s_.k_full[done % 2]), done / 2 & 1);
      int row = first_row;
#pragma unroll 1
      while (true) {
        now.index = now.head * static_cast<int>(p_.tiles) + q_tile + row / C::kBlockQ;
        now.row = q_row + row;
        now.rows = min(C::kBlockQ, q_rows - row);
        ptx::mbarrier_wait(ptx::shared_address(&s_.ds_full[ds.slot]), ds.round);
        step(now, rank, done % 2, ds.slot);
        ds.next();
        row = next_row(row, wrap_row, last_row, p_.row_step);
        if (row == first_row && ++now.head == end_head) break;
      }
    }
    if (is_last(finish())) convert();
    if (lane_ == 0) ptx::bulk_wait();
  }

 private:
  /// A query tile of a head: its index in the workspace, its place in the operands.
  struct Place {
    int index, row, rows, head, batch;
  };
  static constexpr int kWarpFloats = C::kChunkFloats / 4;

  __device__ __forceinline__ Progress* progress(int index) const {
    return p_.progress + index * 4ll + warp_;
  }
  __device__ __forceinline__ float* sums(int index) const {
    return p_.dq + index * static_cast<std::int64_t>(C::kDqFloats) + warp_ * kWarpFloats;
  }
  __device__ __forceinline__ std::uint32_t staging(int chunk) const {
    return ptx::shared_address(s_.dq[chunk % C::kStaging]) + warp_ * kWarpFloats * 4;
  }

  __device__ __forceinline__ void step(const Place& now, int rank, unsigned k_slot, int ds_slot) {
    const std::uint32_t k_low = ptx::descriptor_low(ptx::shared_address(s_.k[k_slot]), C::kBlockK * 128);
    const std::uint32_t ds_low = ptx::descriptor_low(ptx::shared_address(s_.ds[ds_slot]));
    // Lane 0's: what it has to wait for, 0 for the first one, and what there is. One warp claims for all four, so that
    // the same block comes first for all: products keep them together, and two blocks that were each first for some of
    // the warps would wait for each other.
    float before_this = 0, finished = 0;
    unsigned claimed = 0;
    if (lane_ == 0) {
      Progress* const g = progress(now.index);
      finished = ptx::load_relaxed(&g->finished);
      if (p_.deterministic) {
        before_this = static_cast<float>(rank) - ptx::load_relaxed(&g->first_rank);
      } else if (warp_ == 0) {
        claimed = ptx::exchange_relaxed(&g->begun, 1);
      }
    }
    Report report;
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk) {
      const int rows = chunk / C::kPanels, panel = chunk % C::kPanels;
      float r_dq[32];
      ptx::keep(r_dq);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < C::kBlockK / 16; ++k) {
        // A: dS, 64 rows, k along the columns; B: K, k along the rows.
        const std::uint32_t a = ds_low + (((k / 4) * C::kBlockQ * 128 + rows * 64 * 128 + (k % 4) * 32) >> 4);
        const std::uint32_t b = k_low + ((panel * C::kBlockK * 128 + k * 16 * 128) >> 4);
        ptx::Wgmma<T, 64>::template ss<0, 1>(r_dq, ptx::descriptor(a), ptx::descriptor(b), k > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::keep(r_dq);
      if (chunk == C::kChunks - 1 && lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.ds_empty[ds_slot]));
      // Before it may wait for another block, a warp reports what it has finished: so none waits in a circle.
      if (chunk == 0) {
        report = finish();
        if (!p_.deterministic) {
          if (warp_ == 0 && lane_ == 0) s_.claimed[ds_slot] = claimed;
          ptx::named_barrier_sync(1 + C::kMains, 128);  // the four warps: the claim is written; all read it
          before_this = static_cast<float>(s_.claimed[ds_slot]);
        }
        if (lane_ == 0) {
          while (finished < before_this) finished = ptx::load_relaxed(&progress(now.index)->finished);
        }
      } else if (lane_ == 0) {
        ptx::bulk_wait_read_but<C::kStaging - 1>();
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        ptx::store_shared(staging(chunk) + (i * 32 + lane_) * 16, r_dq[4 * i], r_dq[4 * i + 1], r_dq[4 * i + 2],
                          r_dq[4 * i + 3]);
      }
      ptx::fence_async_shared();
      __syncwarp();
      if (lane_ == 0) {
        float* const g_dq = sums(now.index) + chunk * C::kChunkFloats;
        if (before_this == 0) {
          ptx::bulk_store(g_dq, staging(chunk), kWarpFloats * 4);
        } else {
          ptx::bulk_reduce_add(g_dq, staging(chunk), kWarpFloats * 4);
        }
        ptx::bulk_commit();
      }
    }
    if (is_last(report)) convert();
    before_ = now;
  }

  /// Lane 0's: additions to the last step's tile that are in memory, and of all blocks.
  struct Report {
    float finished = 0, all = 1;
  };

  /// Reports the last step's addition once it is in memory. Bulk operations that are complete have reached the L2
  /// cache, which orders them with the counter; no fence is needed, and the answer is not waited for here.
  __device__ __forceinline__ Report finish() const {
    Report report;
    if (lane_ == 0) {
      ptx::bulk_wait();
      if (before_.index >= 0) {
        Progress* const g = progress(before_.index);
        report.finished = ptx::add_relaxed(&g->finished, 1) + 1;
        report.all = ptx::load_relaxed(&g->all);
      }
    }
    return report;
  }
  __device__ __forceinline__ bool is_last(const Report& report) const {
    return __shfl_sync(~0u, report.finished == report.all, 0) != 0;
  }

  /// Writes the last step's tile of dQ from the finished sums.
  __device__ __forceinline__ void convert() const {
#pragma unroll 1
    for (int chunk = 0; chunk < C::kChunks; ++chunk) {
      const int first = chunk / C::kPanels * 64 + warp_ * 16, panel = chunk % C::kPanels;
      const int rows = clamp_to(before_.rows - first, 0, 16);
      const auto* const g_sums = reinterpret_cast<const float4*>(sums(before_.index) + chunk * C::kChunkFloats) + lane_;
      float4 part[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) part[i] = __ldcg(g_sums + 32 * i);
      std::uint32_t packed[16];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        packed[2 * i] = ptx::pack<T>(part[i].x * p_.scale, part[i].y * p_.scale);
        packed[2 * i + 1] = ptx::pack<T>(part[i].z * p_.scale, part[i].w * p_.scale);
      }
      if (lane_ == 0) ptx::bulk_wait_read_but<0>();
      __syncwarp();
      const std::uint32_t s_part = staging(chunk);  // (16, 64), 128-byte swizzle
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane_ % 16, column = 2 * i + lane_ / 16;  // of 8 elements
        ptx::stmatrix_x4(s_part + row * 128 + ((column ^ (row % 8)) * 16), packed[4 * i], packed[4 * i + 1],
                         packed[4 * i + 2], packed[4 * i + 3]);
      }
      if (p_.store_by_tma) {
        ptx::fence_async_shared();
        __syncwarp();
        if (lane_ == 0 && rows > 0) {
          ptx::tma_store(&map_dq_, s_part, box_at(16, panel, before_.row + first, rows, before_.head, before_.batch));
        }
        if (lane_ == 0) ptx::bulk_commit();
      } else {
        __syncwarp();
        const unsigned char* const s_rows =
            reinterpret_cast<const unsigned char*>(s_.dq[chunk % C::kStaging]) + warp_ * kWarpFloats * 4;
        const int columns = min(64, p_.head_dim - panel * 64);
#pragma unroll 1
        for (int i = lane_; i < rows * 64; i += 32) {
          const int r = i / 64, d = i % 64;
          if (d >= columns) continue;
          reinterpret_cast<std::uint16_t*>(
              p_.operands.grad_q.row(before_.batch, before_.row + first + r, before_.head))[panel * 64 + d] =
              *reinterpret_cast<const std::uint16_t*>(s_rows + r * 128 + ((d / 8) ^ (r % 8)) * 16 + d % 8 * 2);
        }
        ptx::fence_async_shared();
        __syncwarp();
      }
    }
  }

  BackwardShared<C>& s_;
  const BackwardParams& p_;
  const CUtensorMap& map_dq_;
  const int lane_ = threadIdx.x % 32, warp_ = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  Place before_ = {-1, 0, 0, 0, 0};  // of the last step
};

}  // namespace onepass::cuda::sm90
