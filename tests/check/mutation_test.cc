// Kernels with one mistake each: the checker must catch every one, in every storage type, and pass the kernel without.
#include <cmath>

#include "core/half.h"
#include "kit/kit.h"
#include "oracle/oracle.h"

namespace onepass {
namespace {

using check::CaseSpec;

enum class Mistake { none, drops_a_key, diagonal, scale, no_rescale, coarse };

float rounded(float x, DType dtype) {
  return dtype == DType::bf16  ? bf16_to_float(float_to_bf16(x))
         : dtype == DType::f16 ? f16_to_float(float_to_f16(x))
                               : x;
}

/// Online softmax over blocks of 16 keys in float32, plain scores.
template <Mistake kMistake>
void row(const Problem& p, const ForwardOperands& x, const Sequence& s, std::int64_t b, std::int64_t h,
         std::int64_t i) {
  constexpr float kInfinity = HUGE_VALF;
  const Interval seen = s.visible(i);
  const std::int64_t end = kMistake == Mistake::diagonal && p.mask.causal && seen.size() > 0 ? seen.end - 1 : seen.end;
  const std::int64_t dropped = kMistake == Mistake::drops_a_key && seen.size() > 1 ? seen.begin + seen.size() / 2 : -1;
  const double wrong = p.dtype == DType::bf16 ? 1.01 : 1.001;  // bfloat16's last place is worth 0.4 to 0.8 %
  const float scale = static_cast<float>(p.score.scale * (kMistake == Mistake::scale ? wrong : 1));
  const std::int64_t seq = s.q_row + i, kv_head = p.kv_head(h);
  float m = -kInfinity, l = 0;
  std::vector<float> out(static_cast<std::size_t>(p.head_dim_v));
  for (std::int64_t j0 = seen.begin; j0 < end; j0 += 16) {
    float score[16], top = m;
    const std::int64_t keys = std::min<std::int64_t>(16, end - j0);
    for (std::int64_t j = 0; j < keys; ++j) {
      float lane[8] = {};
      for (std::int64_t c = 0; c < p.head_dim; ++c) {
        lane[c % 8] += load_float(x.q.row(b, seq, h), x.q.dtype, c) *
                       load_float(x.k.row(b, s.k_row + j0 + j, kv_head), x.k.dtype, c);
      }
      float sum = 0;
      for (const float part : lane) sum += part;
      score[j] = j0 + j == dropped ? -kInfinity : scale * sum;
      if (score[j] > top || std::isnan(score[j])) top = score[j];
    }
    const float base = top == -kInfinity ? 0 : top, alpha = std::exp(m - base);
    m = top;
    l *= alpha;
    for (float& o : out) o *= kMistake == Mistake::no_rescale ? 1 : alpha;
    for (std::int64_t j = 0; j < keys; ++j) {
      const float weight = std::exp(score[j] - base);
      l += weight;
      const float w = rounded(weight, p.dtype);
      for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
        out[static_cast<std::size_t>(c)] += w * load_float(x.v.row(b, s.k_row + j0 + j, kv_head), x.v.dtype, c);
      }
    }
  }
  for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
    const float o = l == 0 ? 0 : out[static_cast<std::size_t>(c)] / l;
    // Half a per cent of a unit in float32, eleven bits of a mantissa that holds more.
    store_float(x.out.row(b, seq, h), x.out.dtype, c, kMistake == Mistake::coarse ? o * (1 + 0x1p-6f) : o);
  }
  if (x.lse) *x.lse.row(b, h, seq) = l == 0 ? -kInfinity : m + std::log(l);
}

template <Mistake kMistake>
Status forward(const Problem& p, const ForwardOperands& x, const Launch&) {
  if (const Status status = oracle::forward(p, x); !status.ok()) return status;  // rows outside every sequence
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = p.sequence(b);
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      for (std::int64_t i = 0; i < s.q_length; ++i) row<kMistake>(p, x, s, b, h, i);
    }
  }
  return {};
}

/// The yardstick for a problem that is not quite the one asked for.
template <Mistake kMistake>
Status backward(const Problem& problem, const BackwardOperands& x, const Launch&) {
  Problem p = problem;
  std::vector<std::int32_t> values(static_cast<std::size_t>(p.batch));
  if (kMistake == Mistake::scale) p.score.scale *= p.dtype == DType::bf16 ? 1.01 : 1.001;
  if (kMistake == Mistake::drops_a_key || (kMistake == Mistake::diagonal && p.mask.causal)) {
    for (std::int64_t b = 0; b < p.batch; ++b) {
      const Sequence s = p.sequence(b);
      const bool drops = kMistake == Mistake::drops_a_key;
      values[static_cast<std::size_t>(b)] =
          static_cast<std::int32_t>(drops ? std::max<std::int64_t>(s.k_length - 1, 0) : s.position - 1);
    }
    (kMistake == Mistake::drops_a_key ? p.mask.k_length : p.mask.q_position) = values.data();
  }
  return oracle::backward(p, x, oracle::Precision::storage, false);
}

std::size_t no_workspace(const Problem&, int) {
  return 0;
}

template <Mistake kMistake>
Kernel mutant(Pass pass) {
  const bool is_backward = pass == Pass::backward;
  return {"mutant",
          pass,
          Backend::cpu,
          "oracle",
          kF32 | kF16 | kBf16,
          1024,
          0,
          &no_workspace,
          is_backward ? nullptr : &forward<kMistake>,
          is_backward ? &backward<kMistake> : nullptr};
}

/// How many of `cases` random plain cases fail.
int failures(const Kernel& kernel, DType dtype, int cases) {
  check::Sweep sweep;
  sweep.limits.pass = kernel.pass;
  sweep.limits.dtypes = 1u << static_cast<int>(dtype);
  sweep.limits.plain = true;
  sweep.limits.work = 1e5;
  sweep.cases = cases;
  int failed = 0;
  const Kernel* list[] = {&kernel};
  for (const check::Tally& tally : check::run_sweep(list, sweep)) failed += tally.failed;
  return failed;
}

TEST(Mutation, SweepsCatchEveryMistake) {
  if (kit::kSanitized) GTEST_SKIP() << "minutes, for the same verdicts";
  constexpr int kCases = 40;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const char* name = dtype_name(dtype);
    EXPECT_EQ(failures(mutant<Mistake::none>(Pass::forward), dtype, kCases), 0) << name;
    EXPECT_GT(failures(mutant<Mistake::drops_a_key>(Pass::forward), dtype, kCases), 5) << name;
    EXPECT_GT(failures(mutant<Mistake::diagonal>(Pass::forward), dtype, kCases), 5) << name;
    EXPECT_GT(failures(mutant<Mistake::scale>(Pass::forward), dtype, kCases), 1) << name;
    EXPECT_GT(failures(mutant<Mistake::no_rescale>(Pass::forward), dtype, kCases), 5) << name;
    EXPECT_GT(failures(mutant<Mistake::coarse>(Pass::forward), dtype, kCases), 5) << name;
    EXPECT_EQ(failures(mutant<Mistake::none>(Pass::backward), dtype, kCases), 0) << name;
    EXPECT_GT(failures(mutant<Mistake::drops_a_key>(Pass::backward), dtype, kCases), 5) << name;
    EXPECT_GT(failures(mutant<Mistake::diagonal>(Pass::backward), dtype, kCases), 5) << name;
    EXPECT_GT(failures(mutant<Mistake::scale>(Pass::backward), dtype, kCases), 1) << name;
  }
}

TEST(Mutation, OneKeyOfALongRow) {
  const Kernel right = mutant<Mistake::none>(Pass::forward), wrong = mutant<Mistake::drops_a_key>(Pass::forward);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    CaseSpec spec;
    spec.dtype = dtype;
    spec.seq_q = 8;
    spec.seq_k = 2000;
    spec.head_dim = spec.head_dim_v = 64;
    if (!kit::chosen(spec)) continue;
    check::Case c(spec);
    EXPECT_TRUE(kit::passes(check::check_kernel(right, c)));
    EXPECT_FALSE(check::check_kernel(wrong, c).ok()) << dtype_name(dtype);
  }
}

/// Four times the yardstick's error, as a kernel that sums badly would have, is beyond a bound of two.
Status four_times(const Problem& p, const ForwardOperands& x, const Launch&) {
  const std::int64_t rows = p.seq_q * p.head_dim_v;
  std::vector<float> formula(static_cast<std::size_t>(rows));
  ForwardOperands other = x;
  other.out = {formula.data(), DType::f32, rows, p.head_dim_v, p.head_dim_v};
  other.lse = {};
  const Status exact = oracle::forward(p, x), storage = oracle::forward(p, other, oracle::Precision::storage);
  auto* out = static_cast<float*>(x.out.data);
  for (std::int64_t n = 0; n < rows; ++n) out[n] += 4 * (formula[static_cast<std::size_t>(n)] - out[n]);
  return exact.ok() ? storage : exact;
}

TEST(Mutation, SeveralDrawsForgiveLuckAlone) {
  Kernel kernel = mutant<Mistake::none>(Pass::forward);
  kernel.forward = &four_times;
  CaseSpec spec;
  spec.seq_q = spec.seq_k = 40;
  spec.head_dim = spec.head_dim_v = 64;
  check::Case c(spec);
  const check::Report report = check::check_kernel(kernel, c);
  EXPECT_FALSE(report.ok());
  EXPECT_NE(report.name.find("draws"), std::string::npos) << report.name;
  // Values set by hand are judged as they are.
  c.q.set(0, 0.25);
  c.q.seal();
  EXPECT_EQ(check::check_kernel(kernel, c).name.find("draws"), std::string::npos);
}

}  // namespace
}  // namespace onepass
