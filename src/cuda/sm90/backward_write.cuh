// Rows of a gradient from the sums of a product to memory.
#pragma once

#include "cuda/ptx/math.cuh"

namespace onepass::cuda::sm90 {

/// Lane i of a quad has words i of four groups of 8 columns; it gets the four words of group i.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&x)[4], unsigned lane) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const std::uint32_t other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + step], step);
      (upper ? x[i] : x[i + step]) = other;
    }
  }
}

/// Scales, rounds and writes `dim` of kDim columns of a warp's 16 rows, in the registers r of a product. g_row (dim) is
/// row lane / 4, the other one eight_rows bytes behind it; rows that are not inside are left out. A quad writes 64
/// bytes of a row at once.
template <class T, int kDim>
__device__ __forceinline__ void write_rows(const float* r, char* g_row, std::int64_t eight_rows,
                                           const bool (&inside)[2], int dim, float scale, unsigned lane) {
  const int first = static_cast<int>(lane % 4 * 8);
  g_row += first * 2;
#pragma unroll
  for (int k = 0; k < kDim / 32; ++k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = r + 16 * k + 4 * i + 2 * half;
        x[i] = ptx::pack<T>(pair[0] * scale, pair[1] * scale);
      }
      transpose_quad(x, lane);
      if (!inside[half]) continue;
      char* const g = g_row + half * eight_rows + k * 64;
      const int left = dim - first - 32 * k;  // columns
      if (left >= 8) {
        *reinterpret_cast<uint4*>(g) = {x[0], x[1], x[2], x[3]};
      } else {
#pragma unroll 1
        for (int i = 0; i < left; ++i) {
          reinterpret_cast<std::uint16_t*>(g)[i] = static_cast<std::uint16_t>(x[0]);
          x[0] = x[0] >> 16 | x[1] << 16, x[1] = x[1] >> 16 | x[2] << 16, x[2] = x[2] >> 16 | x[3] << 16;
          x[3] >>= 16;
        }
      }
    }
  }
}

}  // namespace onepass::cuda::sm90
