// Runs kernels on cases, with a workspace of exactly the size they asked for.
#include <algorithm>
#include <cstring>
#include <memory>

#include "check/compare.h"

namespace onepass::check {
namespace {

constexpr std::size_t kAlignment = 64, kGuardBytes = 256;
constexpr unsigned char kGuard = 0x5a;

/// 64-byte aligned, NaN in every float type, guarded on both sides.
class Workspace {
 public:
  explicit Workspace(std::size_t size) : size_(size), memory_(new unsigned char[size + 2 * kGuardBytes + kAlignment]) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
    first_ = memory_.get() + (kAlignment - address % kAlignment) % kAlignment;
    std::memset(first_, kGuard, size + 2 * kGuardBytes);
    std::memset(data(), 0xff, size);
  }
  unsigned char* data() const { return first_ + kGuardBytes; }
  Block memory() const { return {first_, size_ + 2 * kGuardBytes}; }
  bool intact() const {
    for (std::size_t n = 0; n < kGuardBytes; ++n) {
      if (first_[n] != kGuard || data()[size_ + n] != kGuard) return false;
    }
    return true;
  }

 private:
  std::size_t size_;
  std::unique_ptr<unsigned char[]> memory_;
  unsigned char* first_;
};

Report judge(Case& c, const Reference& reference, const Status& status) {
  Report report;
  report.name = describe(c.spec());
  report.faults = c.faults();
  if (!status.ok()) {
    report.faults.push_back("refused: " + status.text());
  } else if (!reference.status().ok()) {
    report.faults.push_back("no reference: " + reference.status().text());
  } else {
    reference.compare(c, report);
  }
  return report;
}

}  // namespace

Report check_forward(Case& c, const Reference& reference, const ForwardRunner& run) {
  c.reset();
  return judge(c, reference, run(c.problem(), c.forward_operands()));
}

Report check_backward(Case& c, const Reference& reference, const BackwardRunner& run) {
  c.reset();
  return judge(c, reference, run(c.problem(), c.backward_operands()));
}

bool serves(const Kernel& kernel, const Case& c) {
  return mismatch(kernel, c.problem()) == nullptr;
}

namespace {

/// Runs a kernel on the case's operands, or on copies in device memory, which are brought back.
Status run_here(const Kernel& kernel, Case& c, const Workspace& workspace, Launch launch, const auto& call) {
  if (kernel.backend == Backend::cpu) return call(c.problem(), launch, [](const auto& operands) { return operands; });
  std::vector<Block> blocks = c.memory();
  blocks.push_back(workspace.memory());
  const DeviceMirror mirror(blocks);
  ONEPASS_RETURN_IF_ERROR(mirror.status());
  launch.workspace = mirror.at(workspace.data());
  ONEPASS_RETURN_IF_ERROR(call(mirror.at(c.problem()), launch, [&](const auto& x) { return mirror.at(x); }));
  return mirror.download();
}

bool on_tensor_cores(const Kernel& kernel) {
  return std::string_view(kernel.arch).starts_with("sm");
}

/// While it lives, LSE of a backward case is that of a forward kernel. Tensor cores cut off their sums, so that a score
/// near -10^4 is off by some units in its last place, a relative error of its weight; LSE of a forward on the same
/// device is off alike, and the two cancel. Elsewhere the reference's own is given, which must do as well.
class OwnLse {
 public:
  OwnLse(const Kernel& kernel, Case& c, Kernels forwards) : case_(c) {
    const CaseSpec& spec = c.spec();
    if (spec.pass != Pass::backward || spec.values != Values::deep || spec.dtype == DType::f32) return;
    Problem problem = c.problem();
    problem.pass = Pass::forward;
    const auto serving = [&](const Kernel* x) { return mismatch(*x, problem) == nullptr; };
    const auto found = std::find_if(forwards.begin(), forwards.end(), serving);
    if (!on_tensor_cores(kernel) || found == forwards.end()) return;
    const Array out = c.saved_out;
    kept_ = c.saved_lse;
    ForwardOperands operands = c.forward_operands();
    operands.out = c.saved_out.tensor(spec.varlen());
    operands.lse = c.saved_lse.row_tensor(spec.varlen());
    const std::size_t size = (*found)->workspace(problem, 1);
    const Workspace workspace(size);
    const Launch launch = {.workspace = workspace.data(), .workspace_size = size, .threads = 1};
    status_ = run_here(**found, c, workspace, launch, [&](Problem p, const Launch& with, const auto& at) {
      p.pass = Pass::forward;
      return (*found)->forward(p, at(operands), with);
    });
    c.saved_out = out;
    c.saved_lse.seal();
  }
  OwnLse(const OwnLse&) = delete;
  OwnLse& operator=(const OwnLse&) = delete;
  ~OwnLse() {
    if (kept_) case_.saved_lse = kept_;
  }
  const Status& status() const { return status_; }

 private:
  Case& case_;
  Array kept_;
  Status status_;
};

Report run_kernel(const Kernel& kernel, Case& c, const Reference& reference, int threads, Kernels forwards) {
  const OwnLse lse(kernel, c, forwards);
  const std::size_t size = kernel.workspace(c.problem(), threads);
  const Workspace workspace(size);
  const Launch launch = {.workspace = workspace.data(), .workspace_size = size, .threads = threads};
  const auto run = [&](const auto& operands, auto call) -> Status {
    ONEPASS_RETURN_IF_ERROR(lse.status());
    return run_here(kernel, c, workspace, launch,
                    [&](const Problem& p, const Launch& with, const auto& at) { return call(p, at(operands), with); });
  };
  Report report =
      c.spec().pass == Pass::backward
          ? check_backward(c, reference,
                           [&](const Problem&, const BackwardOperands& x) { return run(x, kernel.backward); })
          : check_forward(c, reference,
                          [&](const Problem&, const ForwardOperands& x) { return run(x, kernel.forward); });
  const std::string with = kernel.backend == Backend::cpu ? " threads=" + std::to_string(threads) : "";
  report.name = kernel.name + with + " " + report.name;
  if (!workspace.intact()) report.faults.push_back("written outside the workspace");
  for (Comparison& part : report.parts) {
    if (part.what == "dq" && on_tensor_cores(kernel)) part.allow(0x1p-126, c.spec().dtype);
  }
  return report;
}

/// One output's errors over several draws of the values.
struct Draws {
  Comparison worst;
  std::vector<double> ratios;  // error over bound of each draw

  void add(const Comparison& draw) {
    if (ratios.empty() || draw.error > worst.error) worst.where = draw.where;
    worst.what = draw.what;
    worst.error = std::max(worst.error, draw.error);
    worst.baseline = std::max(worst.baseline, draw.baseline);
    worst.largest = std::max(worst.largest, draw.largest);
    worst.least_unit = draw.least_unit;
    ratios.push_back(draw.bound_ratio);
  }
  Comparison judge(DType dtype) {
    const auto middle = ratios.begin() + static_cast<std::ptrdiff_t>(ratios.size() / 2);
    std::nth_element(ratios.begin(), middle, ratios.end());
    worst.judge(dtype);
    worst.ok = worst.ok && *middle <= 1;
    return worst;
  }
};

}  // namespace

Report check_draws(Case& c, const Reference& reference, const CaseRunner& run) {
  Report report = run(c, reference);
  const auto finite = [](const Comparison& part) { return std::isfinite(part.error); };
  const bool judged = report.faults.empty() && std::all_of(report.parts.begin(), report.parts.end(), finite);
  if (!judged || report.ok() || !c.as_drawn()) return report;
  const std::string name = report.name;
  std::vector<Draws> draws(report.parts.size());
  for (std::size_t x = 0; x < draws.size(); ++x) draws[x].add(report.parts[x]);
  int drawn = 1;
  for (const int count : kDraws) {
    for (; drawn < count; ++drawn) {
      CaseSpec spec = c.spec();
      spec.seed += 0x9E3779B97F4A7C15u * static_cast<std::uint64_t>(drawn);
      Case other(spec);
      const Report result = run(other, Reference(other));
      report.faults.insert(report.faults.end(), result.faults.begin(), result.faults.end());
      for (std::size_t x = 0; x < result.parts.size(); ++x) draws[x].add(result.parts[x]);
    }
    report.name = name + " (worst of " + std::to_string(count) + " draws)";
    for (std::size_t x = 0; x < draws.size(); ++x) {
      if (!report.parts[x].ok) report.parts[x] = draws[x].judge(c.spec().dtype);
    }
    if (report.ok() || report.worst_bound_ratio() > 4) break;  // right, or past all luck
  }
  return report;
}

Report check_kernel(const Kernel& kernel, Case& c, const Reference& reference, int threads, Kernels forwards) {
  return check_draws(c, reference,
                     [&](Case& x, const Reference& r) { return run_kernel(kernel, x, r, threads, forwards); });
}

Report check_kernel(const Kernel& kernel, Case& c, int threads, Kernels forwards) {
  return check_kernel(kernel, c, Reference(c), threads, forwards);
}

}  // namespace onepass::check
