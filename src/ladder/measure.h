// A rung run, counted, timed and compared with the float64 reference.
#pragma once

#include "core/status.h"
#include "ladder/rung.h"

namespace onepass::ladder {

/// float64, (N, d) each.
struct Exact {
  std::vector<double> O, dQ, dK, dV;
};
/// The reference's answer for make_arrays' inputs; gradients only if asked for.
Status exact_of(const Problem& problem, const Arrays& inputs, bool gradients, Exact& exact);

struct Measurement {
  Ledger ledger;           // of a counted run
  double seconds = 0;      // of an uncounted run
  double max_abs_err = 0;  // of O, or of dQ, dK and dV; NaN if any of them is
};
/// `problem` is for_rung's; `inputs` are make_arrays'.
Measurement measure(const Rung& rung, const Problem& problem, const Arrays& inputs, const Exact& exact);

}  // namespace onepass::ladder
