#include "kit/kit.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>

#include "check/random.h"

namespace onepass::kit {

testing::AssertionResult passes(const check::Report& report) {
  if (report.ok()) return testing::AssertionSuccess();
  return testing::AssertionFailure() << report.text();
}

void expect_sweep(const std::vector<const Kernel*>& kernels, const check::Sweep& sweep) {
  ASSERT_FALSE(kernels.empty());
  check::Sweep affordable = sweep;
  if (kSanitized) affordable.limits.work /= 10;
  for (const check::Tally& tally : check::run_sweep(kernels, affordable)) {
    std::printf("  %-24s %-4s %4d cases, worst error ratio %.2f, of the bound %.2f\n", tally.kernel->name,
                dtype_name(tally.dtype), tally.cases, tally.worst_ratio, tally.worst_bound_ratio);
    for (const std::string& failure : tally.failures) ADD_FAILURE() << failure;
    EXPECT_EQ(tally.failed, 0) << tally.kernel->name << " " << dtype_name(tally.dtype) << ": of " << tally.cases
                               << " cases from seed " << sweep.first_seed;
  }
}

void expect_case(const check::CaseSpec& spec) {
  if (!chosen(spec)) return;
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

void expect_no_gradient_of_scores(const Kernel& kernel, const check::CaseSpec& spec) {
  check::Case c(spec);
  EXPECT_TRUE(passes(check::check_kernel(kernel, c)));
  for (const check::Array* grad : {&c.grad_q, &c.grad_k}) {
    grad->each([&](const check::Index&, std::int64_t at) { EXPECT_EQ(grad->get(at), 0) << kernel.name; });
  }
}

namespace {

double factor() {
  const char* text = std::getenv("ONEPASS_TEST_FACTOR");
  const double given = text != nullptr ? std::strtod(text, nullptr) : 0;
  return given > 0 ? given : 1;
}

/// Multiply-adds of the score matrix and its products, and as much for every element as it takes to draw, guard and
/// compare it.
double cost(const check::CaseSpec& spec) {
  const auto rows = static_cast<double>(spec.varlen() ? spec.total_q : spec.batch * spec.seq_q);
  const auto columns = static_cast<double>(spec.varlen() ? spec.total_k : spec.batch * spec.seq_k);
  const auto heads = static_cast<double>(spec.heads_q), dims = static_cast<double>(spec.head_dim + spec.head_dim_v);
  const double pairs = heads * rows * static_cast<double>(spec.seq_k), elements = heads * (rows + columns) * dims;
  return (pairs * dims + 64 * elements) * (spec.pass == Pass::backward ? 3 : 1) + (spec.bias ? 64 * pairs : 0) + 1;
}
constexpr double kUsualCost = 2e5, kFirstCost = 1e7;

}  // namespace

check::CaseSpec sized(Pass pass, DType dtype, std::int64_t seq_q, std::int64_t seq_k, std::int64_t dim) {
  check::CaseSpec spec;
  spec.pass = pass;
  spec.dtype = dtype;
  spec.seq_q = seq_q;
  spec.seq_k = seq_k;
  spec.head_dim = spec.head_dim_v = dim;
  return spec;
}

check::CaseSpec sized(const Kernel& kernel, std::int64_t seq_q, std::int64_t seq_k) {
  check::CaseSpec spec;
  spec.pass = kernel.pass;
  for (int n = 0; n < kDTypeCount; ++n) {
    if ((kernel.dtypes >> n & 1u) != 0) spec.dtype = static_cast<DType>(n);
  }
  spec.seq_q = seq_q;
  spec.seq_k = seq_k;
  spec.head_dim = kernel.max_head_dim;
  spec.head_dim_v = kernel.max_head_dim_v;
  return spec;
}

check::Limits cuda_limits(const Kernel& kernel) {
  check::Limits limits;
  limits.pass = kernel.pass;
  limits.dtypes = kernel.dtypes;
  limits.max_head_dim = kernel.max_head_dim;
  limits.cuda = true;
  limits.row = &kernel;
  return limits;
}

std::uint64_t first_seed() {
  const char* text = std::getenv("ONEPASS_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 0) : 0;
}

int scaled(int cases) {
  return std::max(1, static_cast<int>(cases * factor() * (kSanitized ? 0.05 : 1)));
}

bool chosen(const std::string& name, double multiply_adds) {
  if (!kSanitized) return true;
  static std::map<const testing::TestInfo*, std::array<int, 2>> counts;  // run, left out
  auto& [run, left_out] = counts[testing::UnitTest::GetInstance()->current_test_info()];
  check::Random random(std::hash<std::string>()(name) + first_seed());
  const bool first = run == 0 && multiply_adds <= kFirstCost;
  const bool yes = first || random.chance(kUsualCost * factor() / multiply_adds);
  ++(yes ? run : left_out);
  testing::Test::RecordProperty("cases", run);
  testing::Test::RecordProperty("left_out", left_out);
  return yes;
}

bool chosen(const check::CaseSpec& spec) {
  return !kSanitized || chosen(check::describe(spec), cost(spec));
}

std::string test_name(const std::string& text) {
  std::string name = text;
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

}  // namespace onepass::kit
