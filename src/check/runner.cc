// Runs kernels on cases, with a workspace of exactly the size they asked for.
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
  const CaseSpec& s = c.spec();
  if ((kernel.pass == Pass::backward) != (s.pass == Pass::backward)) return false;
  if (kernel.pass == Pass::decode && s.seq_q > 16) return false;
  return (kernel.dtypes >> static_cast<int>(s.dtype) & 1u) != 0 && s.head_dim <= kernel.max_head_dim &&
         s.head_dim_v <= kernel.max_head_dim;
}

Report check_kernel(const Kernel& kernel, Case& c, const Reference& reference, int threads) {
  const std::size_t size = kernel.workspace(c.problem(), threads);
  const Workspace workspace(size);
  const Launch launch = {.workspace = workspace.data(), .workspace_size = size, .threads = threads};
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

Report check_kernel(const Kernel& kernel, Case& c, int threads) {
  return check_kernel(kernel, c, Reference(c), threads);
}

}  // namespace onepass::check
