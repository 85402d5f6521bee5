// The exact, slow way for the rare rows whose scores outgrew a fixed reference:
// a warp computes 16 rows of a tile again from global memory, by the online
// softmax in float32. It runs after a block's last tile, when nothing is under
// way.
#pragma once

#include "cuda/sm90/forward_softmax.cuh"
#include "cuda/sm90/forward_write.cuh"

namespace onepass::cuda::sm90 {

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

/// Rows [row, row + 16) of the tile.
template <class C>
__device__ void repair_rows(const ForwardParams& p, const RowTile& tile, int row) {
  using T = typename C::T;
  const int lane = threadIdx.x % 32;
  const int end_row = min(row + 16, tile.real_rows);
#pragma unroll 1
  for (; row < end_row; ++row) {
    const int begin = max(0, tile.lo + row), end = min(tile.k_length, tile.hi + row);
    if (begin >= end) continue;
    const T* const g_q = reinterpret_cast<const T*>(p.q.row(tile.batch, tile.q_row + row, tile.head));  // (head_dim)
    float reference = -INFINITY, sum = 0;
    float o[(C::kHeadDimV + 31) / 32] = {};  // column lane + 32 i
#pragma unroll 1
    for (int key = begin; key < end; key += 32) {
      float score = -INFINITY;
      if (key + lane < end) {
        const T* const g_k =
            reinterpret_cast<const T*>(p.k.row(tile.batch, tile.k_row + key + lane, tile.kv_head));  // (head_dim)
        float dot = 0;
        for (int d = 0; d < p.head_dim; ++d) dot = fmaf(static_cast<float>(g_q[d]), static_cast<float>(g_k[d]), dot);
        score = dot * p.scale_log2;
      }
      const float high = fmaxf(reference, warp_max(score));
      const float base = high == -INFINITY ? 0.f : high;
      const float by = ptx::exp2_approx(reference - base), weight = ptx::exp2_approx(score - base);
      reference = high;
      sum = sum * by + warp_sum(weight);
#pragma unroll
      for (float& x : o) x *= by;
      const int keys = min(32, end - key);
#pragma unroll 1
      for (int j = 0; j < keys; ++j) {
        const float w = __shfl_sync(~0u, weight, j);
        const T* const g_v =
            reinterpret_cast<const T*>(p.v.row(tile.batch, tile.k_row + key + j, tile.kv_head));  // (head_dim_v)
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(o) / sizeof(float)); ++i) {
          if (lane + 32 * i < p.head_dim_v) o[i] = fmaf(w, static_cast<float>(g_v[lane + 32 * i]), o[i]);
        }
      }
    }
    T* const g_out = reinterpret_cast<T*>(p.out.row(tile.batch, tile.q_row + row, tile.head));  // (head_dim_v)
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(o) / sizeof(float)); ++i) {
      if (lane + 32 * i < p.head_dim_v) g_out[lane + 32 * i] = T(o[i] / sum);
    }
    if (p.lse && lane == 0) {
      *p.lse.row(tile.batch, tile.head, tile.q_row + row) = (reference + log2f(sum)) * 0.69314718f;
    }
  }
}

}  // namespace onepass::cuda::sm90
