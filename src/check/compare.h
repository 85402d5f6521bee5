// Runs a kernel on a case and judges the result by the accuracy rule: maximum absolute error against the float64
// reference <= 2 x the error of the same formula in float32 with inputs, P, dS and outputs rounded to the input type,
// + 1 ulp (of the input type) of the largest reference value.
#pragma once

#include <functional>
#include <span>

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
  std::string where;      // of the worst element
  double least_unit = 0;  // what the bound's last term is at least

  /// Bound, ratios and verdict from error, baseline and largest.
  void judge(DType dtype);
  /// The verdict where hardware may lose as much as `unit`, however small the results are.
  void allow(double unit, DType dtype) {
    least_unit = unit;
    judge(dtype);
  }
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
  void add(const Case& c, const char* what, Array Case::*output);
  void run_baseline(const Case& c);
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
/// The largest error over few elements is a matter of luck, the kernel's as much as the baseline's. So a case that is
/// beyond a bound with the values of its seed is judged anew over 16 draws of the values, over 64 if need be: by the
/// largest error of all draws against the largest baseline, and by the median of error over bound. Cases whose values
/// were set by hand get no second judgement.
inline constexpr int kDraws[] = {16, 64};
using CaseRunner = std::function<Report(Case&, const Reference&)>;
Report check_draws(Case& c, const Reference& reference, const CaseRunner& run);

using Kernels = std::span<const Kernel* const>;

/// The kernel with exactly its workspace, filled with NaN, guarded; by check_draws. On tensor cores dQ may be off by
/// 2^-126, below which reductions in global memory take numbers as 0; and where all scores are near -10^4, a 16-bit
/// backward gets LSE of the first of `forwards`, rows of the same device, that serves the case.
Report check_kernel(const Kernel& kernel, Case& c, const Reference& reference, int threads = 1, Kernels forwards = {});
Report check_kernel(const Kernel& kernel, Case& c, int threads = 1, Kernels forwards = {});

/// The distance from |x| to the next larger number of the type.
double ulp(DType dtype, double x);

}  // namespace onepass::check
