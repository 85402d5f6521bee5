// Rows of O on their way to memory, where TMA does not take them.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/boxes.cuh"
#include "cuda/sm90/forward_config.cuh"

namespace onepass::cuda::sm90 {

/// A warp writes rows [begin, end) of out as 0 and of lse as -inf.
template <class T>
__device__ void clear_rows(const ForwardParams& p, int batch, int head, int begin, int end) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int row = begin; row < end; ++row) {
#pragma unroll 1
    for (int d = lane; d < p.head_dim_v; d += 32) reinterpret_cast<T*>(p.out.row(batch, row, head))[d] = T(0.f);
    if (p.lse && lane == 0) *p.lse.row(batch, head, row) = -INFINITY;
  }
}

// r_o: a thread's accumulators of row `row` of the tile and of row + 8, still
// to be multiplied by `inverse`.

/// Transposes the 2 x 2 matrix of (low, high) in the lanes without and with
/// `bit`, `mask` apart.
__device__ __forceinline__ void exchange(std::uint32_t& low, std::uint32_t& high, int mask, bool bit) {
  const std::uint32_t other = __shfl_xor_sync(~0u, bit ? low : high, mask);
  low = bit ? other : low;
  high = bit ? high : other;
}

/// In chunks of 16 bytes, without shared memory: the lanes of a quad exchange
/// their pairs of columns.
template <class C>
__device__ __forceinline__ void write_chunks(const ForwardParams& p, const RowTile& tile, int row,
                                             const float (&r_o)[C::kHeadDimV / 2], const float (&inverse)[2]) {
  const int lane = ptx::recomputed(static_cast<int>(threadIdx.x % 32));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    char* const g_out = p.out.row(tile.batch, tile.q_row + row + 8 * r,
                                  tile.head);  // (head_dim_v)
#pragma unroll
    for (int i = 2 * r; i < C::kHeadDimV / 2; i += 16) {  // 4 groups of 8 columns: lane t of the quad takes group t
      std::uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        w[j] = ptx::pack<typename C::T>(r_o[i + 4 * j] * inverse[r], r_o[i + 4 * j + 1] * inverse[r]);
      }
      exchange(w[0], w[1], 1, (lane & 1) != 0);
      exchange(w[2], w[3], 1, (lane & 1) != 0);
      exchange(w[0], w[2], 2, (lane & 2) != 0);
      exchange(w[1], w[3], 2, (lane & 2) != 0);
      const int column = 2 * (i - 2 * r) + 8 * (lane & 3);
      if (row + 8 * r < tile.rows && column < p.head_dim_v) {
        reinterpret_cast<uint4*>(g_out)[column / 8] = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
}

}  // namespace onepass::cuda::sm90
