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

/// Bytes that a call overwrites.
struct Workspace {
  const void* data = nullptr;
  std::size_t size = 0;
};

/// What decode reads beside a forward call's operands. With k_new, k and v are outputs too.
struct Append {
  const char *k_name = "k", *v_name = "v";
  Tensor k_new, v_new;
  std::int64_t seq_new = 0;
  const std::int32_t* cache_seqlens = nullptr;
};

/// Outputs and workspace: no stride 0, no overlap with each other or with an input.
Status check_operands(const Problem& problem, const ForwardOperands& operands, const Workspace& workspace = {},
                      const Append& append = {});
Status check_operands(const Problem& problem, const BackwardOperands& operands, const Workspace& workspace = {});

}  // namespace onepass
