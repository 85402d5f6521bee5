// Rows of O that see no key.
#pragma once

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

}  // namespace onepass::cuda::sm90
