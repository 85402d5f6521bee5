// The oracle's gradients against central finite differences of its forward, in float64, over random small cases.
#include <gtest/gtest.h>

#include <cmath>

#include "check/case.h"
#include "kit/kit.h"
#include "oracle/oracle.h"

namespace onepass {
namespace {

using check::Array;
using check::Case;
using check::CaseSpec;
using check::Index;
using check::Random;

/// Forward results of a backward case.
struct Forward {
  Array out, lse;
  explicit Forward(const Case& c)
      : out(DType::f64, c.saved_out.size()),
        lse(Array::rows(c.saved_lse.size()[0], c.saved_lse.size()[1], c.saved_lse.size()[2], 0, false)) {}
};

/// sum dO.O + sum dLSE.LSE over the rows that have gradients.
double loss(const Case& c, Forward& forward) {
  ForwardOperands operands = c.forward_operands();
  operands.out = forward.out.tensor(c.spec().varlen());
  operands.lse = forward.lse.row_tensor(c.spec().varlen());
  EXPECT_TRUE(oracle::forward(c.problem(), operands).ok());
  double sum = 0;
  forward.out.each([&](const Index& i, std::int64_t at) {
    const double g = c.grad_out.get(c.grad_out.offset(i));
    if (!std::isnan(g)) sum += g * forward.out.get(at);
  });
  if (!c.grad_lse) return sum;
  forward.lse.each([&](const Index& i, std::int64_t at) {
    const double g = c.grad_lse.get(c.grad_lse.offset(i)), x = forward.lse.get(at);
    if (!std::isnan(g) && std::isfinite(x)) sum += g * x;
  });
  return sum;
}

/// d loss / d t at t = 0 with input + t * direction, by the five-point formula.
double slope(Case& c, Forward& forward, Array& input, const std::vector<double>& direction, double h) {
  std::vector<double> original(input.span());
  input.each([&](const Index&, std::int64_t at) { original[at] = input.get(at); });
  const auto moved = [&](double t) {
    input.each([&](const Index&, std::int64_t at) { input.set(at, original[at] + t * direction[at]); });
    return loss(c, forward);
  };
  const double near = moved(h) - moved(-h), far = moved(2 * h) - moved(-2 * h);
  input.each([&](const Index&, std::int64_t at) { input.set(at, original[at]); });
  return (8 * near - far) / (12 * h);
}

void expect_gradient(Case& c, Forward& forward, Array& input, const Array& gradient, Random& random, const char* what) {
  if (!gradient || input.count() == 0) return;
  // lse is float32 and needs larger steps.
  const double h = c.grad_lse ? 0.03 : 0.003, tolerance = c.grad_lse ? 2e-4 : 2e-7;
  const std::int64_t count = input.count();
  for (int n = 0; n < 6; ++n) {
    // Whole directions, then single elements.
    const std::int64_t only = n < 2 ? -1 : random.between(0, count - 1);
    std::vector<double> direction(input.span(), 0);
    double expected = 0, size = 0;
    std::int64_t element = 0;
    input.each([&](const Index& i, std::int64_t at) {
      const double x = only < 0 ? random.normal() / std::sqrt(static_cast<double>(count)) : element == only ? 1 : 0;
      ++element;
      const double g = gradient.get(gradient.offset(i));
      ASSERT_TRUE(std::isfinite(g)) << what << " " << describe(c.spec());
      direction[at] = x;
      expected += g * x;
      size += std::abs(g * x);
    });
    const double got = slope(c, forward, input, direction, h);
    ASSERT_NEAR(got, expected, tolerance * (1 + size)) << what << " " << describe(c.spec());
  }
}

CaseSpec small_spec(std::uint64_t seed) {
  check::Limits limits;
  limits.pass = Pass::backward;
  limits.dtypes = kF64;
  limits.max_head_dim = 5;
  limits.max_seq = 11;
  limits.work = 4000;
  CaseSpec spec = check::random_spec(seed, limits);
  spec.values = check::Values::normal;
  spec.bias_dtype = spec.sinks_dtype = DType::f64;
  spec.bias_extreme = false;  // adding 1e38 rounds every difference away; -inf is set below
  spec.grad_bias = spec.grad_sinks = true;
  for (check::Layout* layout : {&spec.layout_q, &spec.layout_k, &spec.layout_v}) layout->broadcast = {};
  return spec;
}

TEST(Gradients, FiniteDifferences) {
  const int cases = kit::scaled(1500);
  for (int n = 0; n < cases && !testing::Test::HasFailure(); ++n) {
    const std::uint64_t seed = kit::first_seed() + static_cast<std::uint64_t>(n);
    Case c(small_spec(seed));
    Random random(seed);
    if (c.bias && random.chance(0.5)) {
      c.bias.each([&](const Index&, std::int64_t at) {
        if (random.chance(0.1)) c.bias.set(at, -HUGE_VAL);
      });
    }
    ASSERT_TRUE(oracle::backward(c.problem(), c.backward_operands()).ok());
    Forward forward(c);
    expect_gradient(c, forward, c.q, c.grad_q, random, "dq");
    expect_gradient(c, forward, c.k, c.grad_k, random, "dk");
    expect_gradient(c, forward, c.v, c.grad_v, random, "dv");
    expect_gradient(c, forward, c.bias, c.grad_bias, random, "dbias");
    expect_gradient(c, forward, c.sinks, c.grad_sinks, random, "dsinks");
  }
}

/// From the forward's out and lse, as a kernel works, the gradients are the same up to the rounding of lse.
TEST(Gradients, FromGivenForward) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Case own(small_spec(seed)), given(small_spec(seed));
    ASSERT_TRUE(oracle::backward(own.problem(), own.backward_operands()).ok());
    ASSERT_TRUE(oracle::backward(given.problem(), given.backward_operands(), oracle::Precision::exact, false).ok());
    for (Array Case::*gradient : {&Case::grad_q, &Case::grad_k, &Case::grad_v, &Case::grad_bias, &Case::grad_sinks}) {
      (own.*gradient).each([&](const Index&, std::int64_t at) {
        ASSERT_NEAR((own.*gradient).get(at), (given.*gradient).get(at), 1e-5) << describe(own.spec());
      });
    }
  }
}

/// A partial result over some of the keys, with the global out and lse, gives its share of the gradients.
TEST(Gradients, OfKeyChunksWithTheGlobalLse) {
  CaseSpec spec;
  spec.pass = Pass::backward;
  spec.dtype = DType::f64;
  spec.seq_q = 9;
  spec.seq_k = 20;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.grad_lse = true;
  Case whole(spec);
  ASSERT_TRUE(oracle::backward(whole.problem(), whole.backward_operands()).ok());
  spec.k_start = {0};
  spec.k_length = {7};
  Case first(spec);
  spec.k_start = {7};
  spec.k_length = {13};
  Case second(spec);
  for (Case* part : {&first, &second}) {
    const BackwardOperands global = whole.backward_operands();
    BackwardOperands operands = part->backward_operands();
    operands.q = global.q;
    operands.k = global.k;
    operands.v = global.v;
    operands.out = global.out;
    operands.lse = global.lse;
    operands.grad_out = global.grad_out;
    operands.grad_lse = global.grad_lse;
    ASSERT_TRUE(oracle::backward(part->problem(), operands, oracle::Precision::exact, false).ok());
  }
  for (Array Case::*gradient : {&Case::grad_q, &Case::grad_k, &Case::grad_v}) {
    (whole.*gradient).each([&](const Index&, std::int64_t at) {
      EXPECT_NEAR((whole.*gradient).get(at), (first.*gradient).get(at) + (second.*gradient).get(at), 1e-5);
    });
  }
}

}  // namespace
}  // namespace onepass
