// Merge of two partial results over disjoint sets of keys.
#pragma once

#include "core/problem.h"
#include "core/status.h"

namespace onepass::cpu {

/// lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b, row by row, float32
/// inside. An empty part (lse -inf) changes no bit of the other; two empty ones give (0, -inf). out may be out_a or
/// out_b, lse lse_a or lse_b. `problem` gives batch, total_q, heads_q, head_dim_v and mask.varlen (batch 1 then).
Status merge_partial(const Problem& problem, const Tensor& out_a, const RowTensor& lse_a, const Tensor& out_b,
                     const RowTensor& lse_b, const Tensor& out, const RowTensor& lse, int threads);

}  // namespace onepass::cpu
