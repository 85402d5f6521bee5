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

/// The same on copies in device memory, brought back for the comparison.
Report run_on_device(const Kernel& kernel, Case& c, const Reference& reference, const Workspace& workspace,
                     Launch launch) {
  const auto run = [&](auto operands, auto kernel_run) -> Status {
    std::vector<Block> blocks = c.memory();
    blocks.push_back(workspace.memory());
    const DeviceMirror mirror(blocks);
    ONEPASS_RETURN_IF_ERROR(mirror.status());
    launch.workspace = mirror.at(workspace.data());
    ONEPASS_RETURN_IF_ERROR(kernel_run(mirror.at(c.problem()), mirror.at(operands), launch));
    return mirror.download();
  };
  Report report =
      c.spec().pass == Pass::backward
          ? check_backward(c, reference,
                           [&](const Problem&, const BackwardOperands& x) { return run(x, kernel.backward); })
          : check_forward(c, reference,
                          [&](const Problem&, const ForwardOperands& x) { return run(x, kernel.forward); });
  report.name = std::string(kernel.name) + " " + report.name;
  if (!workspace.intact()) report.faults.push_back("written outside the workspace");
  return report;
}

Report run_kernel(const Kernel& kernel, Case& c, const Reference& reference, int threads) {
  const std::size_t size = kernel.workspace(c.problem(), threads);
  const Workspace workspace(size);
  const Launch launch = {.workspace = workspace.data(), .workspace_size = size, .threads = threads};
  if (kernel.backend == Backend::cuda) return run_on_device(kernel, c, reference, workspace, launch);
  Report report =
      c.spec().pass == Pass::backward
          ? check_backward(c, reference,
                           [&](const Problem& p, const BackwardOperands& x) { return kernel.backward(p, x, launch); })
          : check_forward(c, reference,
                          [&](const Problem& p, const ForwardOperands& x) { return kernel.forward(p, x, launch); });
  report.name = std::string(kernel.name) + " threads=" + std::to_string(threads) + " " + report.name;
  if (!workspace.intact()) report.faults.push_back("written outside the workspace");
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

Report check_kernel(const Kernel& kernel, Case& c, const Reference& reference, int threads) {
  return check_draws(c, reference, [&](Case& x, const Reference& r) { return run_kernel(kernel, x, r, threads); });
}

Report check_kernel(const Kernel& kernel, Case& c, int threads) {
  return check_kernel(kernel, c, Reference(c), threads);
}

}  // namespace onepass::check
