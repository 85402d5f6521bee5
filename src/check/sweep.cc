#include "check/sweep.h"

#include <algorithm>

namespace onepass::check {
namespace {

constexpr std::size_t kKeptFailures = 5;

Tally& tally_of(std::vector<Tally>& tallies, const Kernel* kernel, DType dtype) {
  for (Tally& tally : tallies) {
    if (tally.kernel == kernel && tally.dtype == dtype) return tally;
  }
  Tally& tally = tallies.emplace_back();
  tally.kernel = kernel;
  tally.dtype = dtype;
  return tally;
}

void run_one(const Kernel& kernel, Case& c, const Reference& reference, const Sweep& sweep, Tally& tally) {
  Report first;
  std::string failure;
  const std::vector<int>& threads = sweep.threads;
  for (std::size_t n = 0; n < threads.size() && failure.empty(); ++n) {
    Report report = check_kernel(kernel, c, reference, threads[n], sweep.forwards);
    if (!report.ok()) failure = report.text();
    if (n == 0) {
      first = std::move(report);
    } else if (failure.empty() && report.bits != first.bits) {
      failure = report.name + "\n  other bits than with threads=" + std::to_string(threads[0]);
    }
  }
  ++tally.cases;
  if (!failure.empty()) {
    ++tally.failed;
    if (tally.failures.size() < kKeptFailures) tally.failures.push_back(failure);
  }
  tally.worst_bound_ratio = std::max(tally.worst_bound_ratio, first.worst_bound_ratio());
  if (first.worst_ratio() >= tally.worst_ratio) {
    tally.worst_ratio = first.worst_ratio();
    tally.worst_case = describe(c.spec());
  }
}

}  // namespace

std::vector<Tally> run_sweep(Kernels kernels, const Sweep& sweep) {
  std::vector<Tally> tallies;
  for (int n = 0; n < sweep.cases; ++n) {
    Case c(random_spec(sweep.first_seed + static_cast<std::uint64_t>(n), sweep.limits));
    const bool served = std::any_of(kernels.begin(), kernels.end(), [&](const Kernel* k) { return serves(*k, c); });
    if (served) {
      const Reference reference(c);
      for (const Kernel* kernel : kernels) {
        if (!serves(*kernel, c)) continue;
        run_one(*kernel, c, reference, sweep, tally_of(tallies, kernel, c.spec().dtype));
      }
    }
    if (sweep.progress) sweep.progress(n + 1);
  }
  return tallies;
}

std::vector<const Kernel*> runnable_kernels(Pass pass, Backend backend) {
  std::vector<const Kernel*> list;
  for (const Kernel& kernel : kernels()) {
    const bool same = (kernel.pass == Pass::backward) == (pass == Pass::backward);
    if (same && kernel.backend == backend && can_run_here(kernel)) list.push_back(&kernel);
  }
  return list;
}

}  // namespace onepass::check
