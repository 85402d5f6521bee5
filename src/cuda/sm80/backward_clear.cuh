// Zeros in the gradients where no sequence is, of 16 bits and float32.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/sm80/backward_params.h"

namespace onepass::cuda::sm80 {

/// Of all passes before and after the main kernels.
inline constexpr int kPassThreads = 256;

/// Zeros for the packed rows from `begin` to `end` of all heads; elements as wide as T.
template <class T>
__device__ __forceinline__ void clear_rows(const Tensor& x, std::int64_t begin, std::int64_t end, int heads, int dim) {
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>;
  const std::int64_t count = max_of<std::int64_t>(end - begin, 0) * heads * dim;
  for (std::int64_t i = threadIdx.x; i < count; i += kPassThreads) {
    const std::int64_t row = i / dim;
    reinterpret_cast<Bits*>(x.row(0, begin + row / heads, row % heads))[i % dim] = 0;
  }
}

/// Zeros for packed rows outside every sequence: block b clears those before sequence b, the last those behind all.
/// Grid: batch + 1.
template <class T>
__global__ void __launch_bounds__(kPassThreads) backward_clear_gaps(const __grid_constant__ BackwardParams p) {
  const std::int64_t b = blockIdx.x;
  std::int64_t q_begin = 0, k_begin = 0, q_end = p.total_q, k_end = p.total_k;
  if (b > 0) {
    const Sequence before = p.sequence(b - 1);
    q_begin = before.q_row + p.item_queries(b - 1, before);
    k_begin = before.k_row - before.k_start + p.item_keys(b - 1, before);
  }
  if (b < p.batch) {
    const Sequence next = p.sequence(b);
    q_end = next.q_row;
    k_end = next.k_row - next.k_start;
  }
  clear_rows<T>(p.operands.grad_q, q_begin, q_end, p.heads_q, p.head_dim);
  clear_rows<T>(p.operands.grad_k, k_begin, k_end, p.heads_kv, p.head_dim);
  clear_rows<T>(p.operands.grad_v, k_begin, k_end, p.heads_kv, p.head_dim_v);
}

}  // namespace onepass::cuda::sm80
