// The float32-arithmetic backward as a caller may use it: merged results, hidden NaN, huge strides; and its gradients
// against differences of the forward.
#include <sys/mman.h>

#include <cstring>

#include "cpu/backward_kit.h"

namespace onepass {
namespace {

using namespace backward_kit;

/// Rows of `array` (batch, seq, heads, dim) outside [first, last) of seq, as bits.
std::vector<double> rows_outside(const check::Array& array, std::int64_t first, std::int64_t last) {
  std::vector<double> values;
  array.each([&](const Index& at, std::int64_t offset) {
    if (at[1] < first || at[1] >= last) values.push_back(array.get(offset));
  });
  return values;
}

struct Gradients {
  std::vector<double> q, k, v;
  bool operator==(const Gradients&) const = default;
};

/// Gradients of rows and keys that a causal problem keeps apart from row (or key) `n` of one input, which holds
/// `value`.
Gradients gradients_with(const Kernel& kernel, check::Array Case::*input, std::int64_t n, double value) {
  CaseSpec spec = spec_of(150, 150, 2, 20);
  spec.causal = true;
  Case c(spec);
  (c.*input).each([&](const Index& at, std::int64_t offset) {
    if (at[1] == n) (c.*input).set(offset, value);
  });
  run(kernel, c);
  const bool is_key = input == &Case::k || input == &Case::v;
  // A bad key reaches the rows from it on and through them every key; a bad row itself and the keys up to it.
  Gradients result;
  result.q = is_key ? rows_outside(c.grad_q, n, spec.seq_q) : rows_outside(c.grad_q, n, n + 1);
  if (!is_key) {
    result.k = rows_outside(c.grad_k, 0, n + 1);
    result.v = rows_outside(c.grad_v, 0, n + 1);
  }
  for (const auto* values : {&result.q, &result.k, &result.v}) {
    for (const double x : *values) EXPECT_TRUE(std::isfinite(x));
  }
  bool reached = false;
  c.grad_q.each([&](const Index& at, std::int64_t offset) {
    if (at[1] == n) reached = reached || !std::isfinite(c.grad_q.get(offset));
  });
  EXPECT_EQ(reached, !std::isfinite(value)) << kernel.name;
  return result;
}

TEST(BackwardCalls, HiddenNonFiniteValuesChangeNoBit) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const Kernel* kernel : backward_kernels()) {
    for (check::Array Case::*input : {&Case::q, &Case::k, &Case::v, &Case::grad_out}) {
      for (const std::int64_t n : {5, 70, 149}) {
        if (!kit::chosen(kernel->name + std::to_string(n), 3e6)) continue;
        const Gradients zeros = gradients_with(*kernel, input, n, 0);
        EXPECT_EQ(gradients_with(*kernel, input, n, NAN), zeros) << kernel->name << " " << n;
        if (input == &Case::v || input == &Case::grad_out) {
          EXPECT_EQ(gradients_with(*kernel, input, n, infinity), zeros) << kernel->name << " " << n;
        }
      }
    }
  }
}

/// The lse of the whole problem, each half of the keys in a call of its own: dQ adds up, dK and dV are the halves'.
TEST(BackwardCalls, TakesTheLseOfAMerge) {
  for (const bool sinks : {false, true}) {
    CaseSpec spec = spec_of(70, 200, 2, 24);
    spec.heads_q = 4;
    spec.sinks = sinks;
    Case c(spec);
    for (const Kernel* kernel : backward_kernels()) {
      run(*kernel, c);
      std::vector<double> dq(static_cast<std::size_t>(c.grad_q.count()));
      Case half(spec);
      for (const std::int64_t first : {0, 120}) {
        Problem problem = half.problem();
        problem.seq_k = problem.total_k = first == 0 ? 120 : 80;
        BackwardOperands x = half.backward_operands();
        for (Tensor* t : {&x.k, &x.v, &x.grad_k, &x.grad_v}) t->data = t->row(0, first, 0);
        run(*kernel, problem, x);
        std::size_t n = 0;
        half.grad_q.each([&](const Index&, std::int64_t at) { dq[n++] += half.grad_q.get(at); });
        if (sinks) {
          c.grad_sinks.each([&](const Index&, std::int64_t at) {
            EXPECT_EQ(half.grad_sinks.get(at), c.grad_sinks.get(at)) << kernel->name;
          });
        }
      }
      std::size_t n = 0;
      c.grad_q.each([&](const Index&, std::int64_t at) { EXPECT_NEAR(c.grad_q.get(at), dq[n++], 2e-6); });
      EXPECT_EQ(half.grad_k.bits(), c.grad_k.bits()) << kernel->name;
      EXPECT_EQ(half.grad_v.bits(), c.grad_v.bits()) << kernel->name;
    }
  }
}

/// Values of `array` plus step times those of `direction`, in float64.
check::Array moved(const check::Array& array, const check::Array& direction, double step) {
  check::Array result(DType::f64, array.size());
  result.each([&](const Index& at, std::int64_t offset) {
    result.set(offset, array.get(array.offset(at)) + step * direction.get(direction.offset(at)));
  });
  return result;
}

/// sum dO o O + sum dLSE lse in float64, inputs moved along a direction.
double loss(const Case& c, const std::array<check::Array, 5>& direction, double step) {
  const check::Array q = moved(c.q, direction[0], step), k = moved(c.k, direction[1], step);
  const check::Array v = moved(c.v, direction[2], step);
  Problem problem = c.problem();
  problem.dtype = DType::f64;
  check::Array bias, sinks;
  if (c.bias) {
    bias = moved(c.bias, direction[3], step);
    problem.score.bias.data = bias.data();
    problem.score.bias.dtype = DType::f64;
  }
  if (c.sinks) {
    sinks = moved(c.sinks, direction[4], step);
    problem.score.sinks = sinks.head_tensor();
  }
  check::Array out(DType::f64, c.saved_out.size(), true),
      lse = check::Array::rows(c.spec().batch, c.spec().heads_q, c.spec().seq_q, 0, true);
  EXPECT_TRUE(oracle::forward(problem, {q.tensor(false), k.tensor(false), v.tensor(false), out.tensor(false),
                                        lse.row_tensor(false)})
                  .ok());
  double sum = 0;
  out.each(
      [&](const Index& at, std::int64_t offset) { sum += out.get(offset) * c.grad_out.get(c.grad_out.offset(at)); });
  return sum;
}

TEST(BackwardCalls, FollowsDifferencesOfTheForward) {
  for (int n = 0; n < 6; ++n) {
    CaseSpec spec = spec_of(30, 45, 1, 12);
    spec.seed = static_cast<std::uint64_t>(n) + 1;
    spec.heads_q = 2;
    spec.head_dim_v = 7;
    spec.causal = n % 2 == 0;
    if (n >= 1) spec.softcap = 2;
    if (n >= 2) spec.bias = true, spec.bias_broadcast[2] = n == 3;
    if (n >= 3) spec.sinks = true;
    if (n >= 4) spec.dropout_p = 0.3;
    if (n == 5) spec.window_left = 9, spec.alibi = 1;
    Case c(spec);
    check::Random random(7);
    std::array<check::Array, 5> direction;
    const check::Array* inputs[] = {&c.q, &c.k, &c.v, &c.bias, &c.sinks};
    for (std::size_t i = 0; i < 5; ++i) {
      if (!*inputs[i]) continue;
      direction[i] = check::Array(DType::f64, inputs[i]->size());
      direction[i].each([&](const Index&, std::int64_t at) { direction[i].set(at, random.normal()); });
    }
    constexpr double kStep = 1e-4;
    const double expected = (loss(c, direction, kStep) - loss(c, direction, -kStep)) / (2 * kStep);
    for (const Kernel* kernel : backward_kernels()) {
      run(*kernel, c, 2);
      const check::Array* gradients[] = {&c.grad_q, &c.grad_k, &c.grad_v, &c.grad_bias, &c.grad_sinks};
      double sum = 0, size = 0;
      for (std::size_t i = 0; i < 5; ++i) {
        if (!*gradients[i]) continue;
        gradients[i]->each([&](const Index& at, std::int64_t offset) {
          const double term = gradients[i]->get(offset) * direction[i].get(direction[i].offset(at));
          sum += term;
          size += std::abs(term);
        });
      }
      EXPECT_NEAR(sum, expected, 1e-6 * size) << kernel->name << " " << check::describe(spec);
    }
  }
}

TEST(BackwardCalls, OffsetsBeyondTwoToThe31) {
  // Sparse memory: strides of 2^30 elements, only the touched pages exist.
  constexpr std::int64_t kStride = std::int64_t{1} << 30, kSeq = 5, kDim = 16, kTensors = 8;
  const std::size_t bytes = static_cast<std::size_t>(kStride) * kSeq * 4;
  void* memory =
      mmap(nullptr, kTensors * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "this system grants no 160 GiB of address space";
  float* far = static_cast<float*>(memory);
  std::vector<float> near(kTensors * kSeq * kDim);
  std::vector<float> lse(kSeq, 2.5f);
  Problem p;
  p.pass = Pass::backward;
  p.batch = p.heads_q = p.heads_kv = 1;
  p.seq_q = p.seq_k = p.total_q = p.total_k = kSeq;
  p.head_dim = p.head_dim_v = kDim;
  for (std::int64_t t = 0; t < 5; ++t) {
    for (std::int64_t n = 0; n < kSeq * kDim; ++n) {
      const float x = std::sin(static_cast<float>(t * 100 + n));
      near[static_cast<std::size_t>(t * kSeq * kDim + n)] = x;
      far[(t * kSeq + n / kDim) * kStride + n % kDim] = x;
    }
  }
  for (const Kernel* kernel : backward_kernels()) {
    const auto call = [&](float* data, std::int64_t stride) {
      const auto tensor = [&](std::int64_t t) { return Tensor{data + t * kSeq * stride, DType::f32, 0, stride, 0}; };
      BackwardOperands x{tensor(0), tensor(1), tensor(2), tensor(3), tensor(4), {lse.data(), kSeq, kSeq},
                         {},        tensor(5), tensor(6), tensor(7), {},        {}};
      run(*kernel, p, x);
    };
    call(far, kStride);
    call(near.data(), kDim);
    for (std::int64_t row = 5 * kSeq; row < kTensors * kSeq; ++row) {
      EXPECT_EQ(std::memcmp(far + row * kStride, near.data() + row * kDim, kDim * 4), 0) << kernel->name << " " << row;
    }
  }
  munmap(memory, kTensors * bytes);
}

}  // namespace
}  // namespace onepass
