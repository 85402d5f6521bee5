// The results of a call against the float64 reference, by the accuracy rule: error <= 2 x the error of the same formula
// in float32 rounded to the input type + 1 ulp of the largest reference value.
#pragma once

#include <string>
#include <vector>

#include "attention.h"

namespace onepass::cli {

struct Verdict {
  std::string what;  // "out", "grad_q"
  double error = 0, baseline = 0, bound = 0;
  double ratio = 0;  // error over the baseline, which counts half an ulp at least
  bool ok = true;
};

/// Judges what a call wrote into the attention's arrays. Slow: the reference takes one row at a time.
Result<std::vector<Verdict>> verify(const Attention& attention, onepass_pass_t pass);

}  // namespace onepass::cli
