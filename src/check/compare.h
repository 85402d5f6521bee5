// Runs a kernel on a case and judges the result by the accuracy rule: maximum absolute error against the float64
// reference <= 2 x the error of the same formula in float32 with inputs, P, dS and outputs rounded to the input type,
// + 1 ulp (of the input type) of the largest reference value.
#pragma once

#include <functional>

#include "check/case.h"
#include "oracle/oracle.h"

namespace onepass::check {

/// One output.
struct Comparison {
  std::string what;
  double error = 0;     // maximum absolute error against float64
  double baseline = 0;  // of the float32 formula
  double largest = 0;   // finite reference value
  double bound = 0;
  double ratio = 0;        // error / baseline, the baseline being at least half an ulp of the largest value
  double bound_ratio = 0;  // error / bound
  bool ok = true;
  std::string where;  // of the worst element
};

struct Report {
  std::string name;  // kernel and case
  std::vector<Comparison> parts;
  std::vector<std::string> faults;  // refusals, writes outside the outputs, changed inputs
  std::uint64_t bits = 0;           // hash of every output

  bool ok() const;
  double worst_ratio() const;
  double worst_bound_ratio() const;
  /// A line for the case, one for each output that failed or, with `all`, for each output.
  std::string text(bool all = false) const;
};

/// Float64 results of a case, and its bounds. Kept for several kernels on the same case.
class Reference {
 public:
  explicit Reference(const Case& c);
  const Status& status() const { return status_; }
  /// Compares the outputs that `c` now holds.
  void compare(const Case& c, Report& report) const;

 private:
  struct Part {
    const char* what;
    Array Case::*output;
    Array exact;     // float64, lse float32
    Array baseline;  // the output's dtype
    double error;    // of the baseline
  };
  Reference(const Case& c, bool redraw);
  void add(const Case& c, const char* what, Array Case::*output);
  void add_cancellation(const Case& c);
  static int draws_for(const CaseSpec& s);
  void run_reference(const Case& c);
  void run_baseline(const Case& c, oracle::Precision precision);
  Status run(const Case& c, Array Part::*target, oracle::Precision precision, bool recompute);

  std::vector<Part> parts_;
  Status status_;
};

using ForwardRunner = std::function<Status(const Problem&, const ForwardOperands&)>;
using BackwardRunner = std::function<Status(const Problem&, const BackwardOperands&)>;

/// Runs on fresh outputs and compares.
Report check_forward(Case& c, const Reference& reference, const ForwardRunner& run);
Report check_backward(Case& c, const Reference& reference, const BackwardRunner& run);

/// True if the kernel's row says that it serves the case.
bool serves(const Kernel& kernel, const Case& c);
/// The kernel with exactly its workspace, filled with NaN, guarded.
Report check_kernel(const Kernel& kernel, Case& c, const Reference& reference, int threads = 1);
Report check_kernel(const Kernel& kernel, Case& c, int threads = 1);

/// The distance from |x| to the next larger number of the type.
double ulp(DType dtype, double x);

}  // namespace onepass::check
