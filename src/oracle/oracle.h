// The reference: attention and its gradients in float64, unblocked, one query row at a time, straight from
// docs/semantics.md. Shares no arithmetic with the kernels; slow by design.
#pragma once

#include <functional>

#include "core/problem.h"
#include "core/status.h"

namespace onepass::oracle {

/// How a formula rounds on the way. `exact` is the reference. `storage` is the yardstick of the accuracy bound: the
/// same unblocked formula in float32 with P, dS and the outputs rounded to the input type.
enum class Precision : std::uint8_t { exact, storage };

/// Writes out and lse (where given). Any dtype; out may be f64. Rows outside every sequence get 0 and -inf.
/// `ready` is called once, when nothing can fail any more and nothing has been read or written yet.
Status forward(
    const Problem& problem, const ForwardOperands& operands, Precision precision = Precision::exact,
    const std::function<void()>& ready = [] {});

/// Writes every gradient given in `operands`. Uses the lse and out given, as a kernel does, if `recompute` is false;
/// else its own float64 ones.
Status backward(const Problem& problem, const BackwardOperands& operands, Precision precision = Precision::exact,
                bool recompute = true);

}  // namespace onepass::oracle
