// dQ of thousands of tiles by the formula, in float64, and its comparison, all on the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/base.h"

namespace onepass::cuda_kit {

inline constexpr int kMostKeysSeen = 2048;  // by a row of these problems

/// Operands are (rows, heads, dim), contiguous, a batch's items one after another; every row sees keys that follow each
/// other, at least one. lse: (rows / item_rows, heads_q, item_rows).
struct RowsOfQueries {
  DType dtype;  // f16 or bf16
  int rows, item_rows, heads_q, heads_kv;
  int dim, dim_v;  // multiples of 8, at most 256
  double scale;
  const int* first_key;  // (rows) a row of K
  const int* keys;       // (rows) how many
};

/// N(0, 1), from the seed alone.
void fill_normal(void* x, DType dtype, std::int64_t count, unsigned seed, cudaStream_t stream);

/// out (rows, heads_q, dim_v), lse and dQ by the formula. spread (rows, heads_q, dim): the sum of what each key
/// adds to an element of dQ, where nothing cancels, so that an operand's rounding moves dQ by at most its unit of it.
void expected_gradient(const RowsOfQueries& x, const void* q, const void* k, const void* v, const void* grad_out,
                       void* out, float* lse, float* grad_q, float* spread, cudaStream_t stream);

/// Adds to *count the elements of got that are not within 4 roundings of the expected.
void count_wrong(const void* got, const float* expected, const float* spread, DType dtype, std::int64_t size,
                 unsigned* count, cudaStream_t stream);

/// Adds to *count the elements of which a and b cannot be the same float32 sums, added up in different orders and then
/// rounded.
void count_other_sums(const void* a, const void* b, const float* spread, DType dtype, std::int64_t size,
                      unsigned* count, cudaStream_t stream);

}  // namespace onepass::cuda_kit
