// The oracle's forward against the contract written out once more, element by element, over random cases.
#include <gtest/gtest.h>

#include <cmath>

#include "check/compare.h"
#include "kit/kit.h"

namespace onepass {
namespace {

using check::Array;
using check::Case;
using check::CaseSpec;
using check::Index;

/// One score as the contract words it; false if the key is not visible.
struct Plain {
  const Case& c;
  const CaseSpec& s = c.spec();

  std::int64_t q_first(std::int64_t b) const { return s.varlen() ? s.cu_seqlens_q[b] : 0; }
  std::int64_t k_first(std::int64_t b) const {
    return s.varlen() ? s.cu_seqlens_k[b] : s.k_start.empty() ? 0 : s.k_start[b];
  }
  std::int64_t q_length(std::int64_t b) const {
    return s.varlen() ? s.cu_seqlens_q[b + 1] - s.cu_seqlens_q[b] : s.q_length.empty() ? s.seq_q : s.q_length[b];
  }
  std::int64_t k_length(std::int64_t b) const {
    if (s.varlen()) return s.cu_seqlens_k[b + 1] - s.cu_seqlens_k[b];
    return !s.k_length.empty() ? s.k_length[b] : s.seq_k - k_first(b);
  }
  std::int64_t position(std::int64_t b, std::int64_t i) const {
    if (!s.q_position.empty()) return i + s.q_position[b];
    return s.align == Align::top_left ? i : i + (k_length(b) - q_length(b));
  }
  bool visible(std::int64_t b, std::int64_t i, std::int64_t j) const {
    const auto p = static_cast<double>(position(b, i)), key = static_cast<double>(j);
    if (s.causal && key > p) return false;
    if (s.window_left >= 0 && key < p - static_cast<double>(s.window_left)) return false;
    return s.window_right < 0 || key <= p + static_cast<double>(s.window_right);
  }
  double score(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const std::int64_t item = s.varlen() ? 0 : b;
    const std::int64_t kv = h / (s.heads_q / s.heads_kv);
    long double sum = 0;
    for (std::int64_t x = 0; x < s.head_dim; ++x) {
      sum += static_cast<long double>(c.q.get(c.q.offset({item, q_first(b) + i, h, x}))) *
             c.k.get(c.k.offset({item, k_first(b) + j, kv, x}));
    }
    double result = static_cast<double>(sum) * (std::isnan(s.scale) ? 1 / std::sqrt(double(s.head_dim)) : s.scale);
    if (s.softcap != 0) result = s.softcap * std::tanh(result / s.softcap);
    if (s.alibi != 0) {
      const double slope = c.alibi.get(c.alibi.offset({c.alibi.size()[0] > 1 ? b : 0, h, 0, 0}));
      result += slope * -std::abs(static_cast<double>(position(b, i) - j));
    }
    return s.bias ? result + bias(b, h, i, j) : result;
  }
  double bias(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    Index at = {b, h, i, s.varlen() ? j : k_first(b) + j};
    for (int axis = 0; axis < 4; ++axis) at[axis] = s.bias_broadcast[axis] ? 0 : at[axis];
    return c.bias.get(c.bias.offset(at));
  }
  double keep(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const long threshold = std::lround(s.dropout_p * 65536);
    if (threshold == 0) return 1;
    const PhiloxBlock block = philox(s.dropout_seed, static_cast<std::uint32_t>(j / 8), static_cast<std::uint32_t>(i),
                                     static_cast<std::uint32_t>(b * s.heads_q + h), s.dropout_offset);
    const std::uint32_t lane = block.word[j % 8 / 2] >> (j % 2 == 1 ? 16 : 0) & 0xffff;
    return lane >= threshold ? 65536.0 / static_cast<double>(65536 - threshold) : 0;
  }
};

void expect_plain(Case& c) {
  const CaseSpec& s = c.spec();
  const Plain plain{c};
  Array out(DType::f64, c.out.size()), lse = Array::rows(c.out.size()[0], c.out.size()[2], c.out.size()[1], 0, false);
  out.each([&](const Index&, std::int64_t at) { out.set(at, 0); });
  lse.each([&](const Index&, std::int64_t at) { lse.set(at, -HUGE_VAL); });
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t h = 0; h < s.heads_q; ++h) {
      for (std::int64_t i = 0; i < plain.q_length(b); ++i) {
        const std::int64_t item = s.varlen() ? 0 : b, row = plain.q_first(b) + i;
        std::vector<double> scores(plain.k_length(b), -HUGE_VAL);
        const double sink = s.sinks ? c.sinks.get(h) : -HUGE_VAL;
        double top = sink;
        bool empty = true;
        for (std::int64_t j = 0; j < plain.k_length(b); ++j) {
          if (plain.visible(b, i, j)) scores[j] = plain.score(b, h, i, j);
          empty = empty && (!plain.visible(b, i, j) || (c.bias && plain.bias(b, h, i, j) == -HUGE_VAL));
          top = std::max(top, scores[j]);
        }
        if (empty) lse.set(lse.offset({item, h, row, 0}), sink);
        if (empty) continue;
        double sum = s.sinks ? std::exp(c.sinks.get(h) - top) : 0;
        for (const double score : scores) sum += std::exp(score - top);
        lse.set(lse.offset({item, h, row, 0}), top + std::log(sum));
        for (std::int64_t x = 0; x < s.head_dim_v; ++x) {
          long double value = 0;
          for (std::int64_t j = 0; j < plain.k_length(b); ++j) {
            if (!plain.visible(b, i, j)) continue;
            const std::int64_t kv = h / (s.heads_q / s.heads_kv);
            value += static_cast<long double>(std::exp(scores[j] - top) / sum * plain.keep(b, h, i, j)) *
                     c.v.get(c.v.offset({item, plain.k_first(b) + j, kv, x}));
          }
          out.set(out.offset({item, row, h, x}), static_cast<double>(value));
        }
      }
    }
  }
  out.each([&](const Index& i, std::int64_t at) {
    const double got = c.out.get(c.out.offset(i)), expected = out.get(at);
    ASSERT_NEAR(got, expected, 1e-11 * (1 + std::abs(expected))) << describe(s);
  });
  if (!c.lse) return;
  lse.each([&](const Index& i, std::int64_t at) {
    const double got = c.lse.get(c.lse.offset(i)), expected = lse.get(at);
    if (std::isinf(expected)) {
      ASSERT_EQ(got, expected) << describe(s);
    } else {
      ASSERT_NEAR(got, expected, 1e-6 * (1 + std::abs(expected))) << describe(s);
    }
  });
}

TEST(Forward, RandomCases) {
  check::Limits limits;
  limits.dtypes = kF64;
  limits.max_head_dim = 24;
  limits.max_seq = 40;
  limits.work = 30000;
  for (int n = 0; n < kit::scaled(3000) && !testing::Test::HasFailure(); ++n) {
    CaseSpec spec = check::random_spec(kit::first_seed() + static_cast<std::uint64_t>(n), limits);
    if (spec.values == check::Values::special) spec.values = check::Values::wide;
    spec.out_f32 = false;
    Case c(spec);
    ASSERT_TRUE(oracle::forward(c.problem(), c.forward_operands()).ok());
    ASSERT_TRUE(c.faults().empty()) << c.faults()[0] << " " << describe(spec);
    expect_plain(c);
  }
}

/// Other storage types: results of the widened inputs, rounded once.
TEST(Forward, StorageTypes) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    CaseSpec spec;
    spec.dtype = dtype;
    spec.seq_q = 5;
    spec.seq_k = 30;
    spec.causal = true;
    Case narrow(spec);
    spec.dtype = DType::f64;
    Case wide(spec);
    for (Array Case::*operand : {&Case::q, &Case::k, &Case::v}) {
      (wide.*operand).each([&](const Index&, std::int64_t at) { (wide.*operand).set(at, (narrow.*operand).get(at)); });
    }
    for (Case* c : {&narrow, &wide}) ASSERT_TRUE(oracle::forward(c->problem(), c->forward_operands()).ok());
    narrow.out.each([&](const Index&, std::int64_t at) {
      const double exact = wide.out.get(at);
      EXPECT_LE(std::abs(narrow.out.get(at) - exact), 0.5001 * check::ulp(dtype, exact)) << dtype_name(dtype);
    });
  }
}

/// The yardstick is near the reference: a rounding or two of the type away, and not the reference itself.
TEST(Forward, StoragePrecisionRounds) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    CaseSpec spec;
    spec.dtype = dtype;
    spec.seq_q = spec.seq_k = 100;
    spec.head_dim = spec.head_dim_v = 64;
    spec.heads_q = spec.heads_kv = 2;
    Case c(spec);
    const check::Reference reference(c);
    const check::Report report = check::check_forward(c, reference, [](const Problem& p, const ForwardOperands& x) {
      return oracle::forward(p, x, oracle::Precision::storage);
    });
    EXPECT_TRUE(kit::passes(report));
    const check::Comparison& out = report.parts[0];
    EXPECT_LE(out.error, out.baseline);
    EXPECT_GT(out.error, 0.1 * check::ulp(dtype, out.largest));
    EXPECT_LT(out.error, 16 * check::ulp(dtype, out.largest));
  }
}

}  // namespace
}  // namespace onepass
