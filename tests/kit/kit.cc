#include "kit/kit.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>

namespace onepass::kit {

testing::AssertionResult passes(const check::Report& report) {
  if (report.ok()) return testing::AssertionSuccess();
  return testing::AssertionFailure() << report.text();
}

void expect_sweep(const std::vector<const Kernel*>& kernels, const check::Sweep& sweep) {
  ASSERT_FALSE(kernels.empty());
  for (const check::Tally& tally : check::run_sweep(kernels, sweep)) {
    std::printf("  %-24s %-4s %4d cases, worst error ratio %.2f, of the bound %.2f\n", tally.kernel->name,
                dtype_name(tally.dtype), tally.cases, tally.worst_ratio, tally.worst_bound_ratio);
    for (const std::string& failure : tally.failures) ADD_FAILURE() << failure;
    EXPECT_EQ(tally.failed, 0) << tally.kernel->name << " " << dtype_name(tally.dtype) << ": of " << tally.cases
                               << " cases from seed " << sweep.first_seed;
  }
}

void expect_case(const check::CaseSpec& spec) {
  check::Case c(spec);
  const check::Reference reference(c);
  int served = 0;
  for (const Kernel* kernel : check::runnable_kernels(spec.pass)) {
    if (!check::serves(*kernel, c)) continue;
    ++served;
    for (const int threads : {1, 3}) EXPECT_TRUE(passes(check::check_kernel(*kernel, c, reference, threads)));
  }
  EXPECT_GT(served, 0) << check::describe(spec);
}

std::uint64_t first_seed() {
  const char* text = std::getenv("ONEPASS_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 0) : 0;
}

int scaled(int cases) {
  const char* text = std::getenv("ONEPASS_TEST_FACTOR");
  const double given = text != nullptr ? std::strtod(text, nullptr) : 0;
#if defined(ONEPASS_SANITIZED)
  const double usual = 0.05;
#else
  const double usual = 1;
#endif
  return std::max(1, static_cast<int>(cases * (given > 0 ? given : usual)));
}

std::string test_name(const std::string& text) {
  std::string name = text;
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

}  // namespace onepass::kit
