// Query rows that belong to no sequence: zeros, and minus infinity as log-sum-exp.
#pragma once

#include <cuda_bf16.h>

#include "core/problem.h"

namespace onepass::cuda {

/// Out 0 and LSE -inf in the rows [begin, end) of an item that a block of this head takes: `count` of every `step`
/// rows, from begin + first on.
__device__ inline void clear_rows(const Problem& problem, const ForwardOperands& x, std::int64_t item,
                                  std::int64_t head, std::int64_t begin, std::int64_t end, std::int64_t first,
                                  std::int64_t step, int count) {
  const int words = static_cast<int>(problem.head_dim_v * dtype_size(x.out.dtype) / 2);
  for (std::int64_t row = begin + first; row < end; row += step) {
    const int rows = static_cast<int>(min_of<std::int64_t>(count, end - row));
    for (int i = threadIdx.x; i < rows * words; i += blockDim.x)
      reinterpret_cast<std::uint16_t*>(x.out.row(item, row + i / words, head))[i % words] = 0;
    if (!x.lse) continue;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) *x.lse.row(item, head, row + i) = -__builtin_huge_valf();
  }
}

/// The rows of item b outside its sequence `seq`; packed, those between it and its neighbours. Arguments as clear_rows.
__device__ inline void clear_outside_rows(const Problem& problem, const ForwardOperands& x, const Sequence& seq,
                                          std::int64_t b, std::int64_t head, std::int64_t first, std::int64_t step,
                                          int count) {
  const MaskSpec& mask = problem.mask;
  if (!mask.varlen && mask.q_length == nullptr) return;
  const std::int32_t* offsets = mask.cu_seqlens_q;
  const auto boundary = [&](std::int64_t i) {
    return i >= problem.batch ? problem.total_q : i == 0 ? 0 : clamp_to<std::int64_t>(offsets[i], 0, problem.total_q);
  };
  const std::int64_t begin = offsets == nullptr ? 0 : boundary(b);
  const std::int64_t end = offsets == nullptr ? problem.total_q : boundary(b + 1);
  const std::int64_t item = mask.varlen ? 0 : b;
  clear_rows(problem, x, item, head, begin, seq.q_row, first, step, count);
  clear_rows(problem, x, item, head, seq.q_row + seq.q_length, end, first, step, count);
}

}  // namespace onepass::cuda
