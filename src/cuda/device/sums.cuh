// A warp's sums of matrix products in registers: kM x kN fragments of 16 x 8, four elements a lane.
#pragma once

namespace onepass::cuda {

template <int kM, int kN>
__device__ __forceinline__ void set_zero(float (&r_sum)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) r_sum[m][n][e] = 0;
    }
  }
}

template <int kM, int kN>
__device__ __forceinline__ void add_sums(float (&r_sum)[kM][kN][4], const float (&r_x)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) r_sum[m][n][e] += r_x[m][n][e];
    }
  }
}

}  // namespace onepass::cuda
