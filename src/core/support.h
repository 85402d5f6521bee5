// Every rule for what a request may be, and the text of its refusal: the rule, the offending value, the nearest
// supported choice. Nothing is launched or written before these have passed.
#pragma once

#include "core/problem.h"
#include "core/status.h"

namespace onepass {

/// Sizes, scores, mask options; what does not need the operands' addresses.
Status check_problem(const Problem& problem);

/// Length arrays in host memory: cu_seqlens from 0, non-decreasing, inside the operand; lengths inside the item.
Status check_lengths(const Problem& problem);

/// Outputs: no stride 0, no overlap with each other or with an input.
Status check_operands(const Problem& problem, const ForwardOperands& operands);
Status check_operands(const Problem& problem, const BackwardOperands& operands);

}  // namespace onepass
