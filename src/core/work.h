// How much work a problem is: visible pairs, FLOPs, bytes.
#pragma once

#include "core/problem.h"

namespace onepass {

/// Visible (query, key) pairs of one head, over the whole batch, exactly. Where length arrays are absent (planning) or
/// in device memory, every sequence has the declared maximum.
double visible_pairs(const Problem& problem);

/// FLOPs by the papers' convention: forward 2 pairs heads_q (head_dim + head_dim_v), backward 2 pairs heads_q
/// (3 head_dim + 2 head_dim_v); a square causal problem without a window counts seq^2 / 2 pairs.
double convention_flops(const Problem& problem);

/// Bytes of the operands, each read or written once.
double operand_bytes(const Problem& problem);

/// True if no output has an element. Such a call is done before it begins, however many empty sequences or heads the
/// problem has: a loop over 2^50 of them would never end.
bool nothing_to_write(const Problem& problem, const ForwardOperands& operands);
/// The same but for grad_bias and grad_sinks: sums over rows that there are none of, which clear_sums sets to 0.
bool nothing_to_write(const Problem& problem, const BackwardOperands& operands);
void clear_sums(const Problem& problem, const BackwardOperands& operands);

}  // namespace onepass
