// Inputs that broke attention libraries, with results known in closed form, on the oracle.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>

#include "check/case.h"
#include "oracle/oracle.h"

namespace onepass {
namespace {

using check::Array;
using check::Case;
using check::CaseSpec;
using check::Index;

CaseSpec sized(std::int64_t seq_q, std::int64_t seq_k, std::int64_t dim) {
  CaseSpec spec;
  spec.dtype = DType::f64;
  spec.seq_q = seq_q;
  spec.seq_k = seq_k;
  spec.head_dim = spec.head_dim_v = dim;
  return spec;
}

template <class F>
void fill(Array& array, F&& value) {
  array.each([&](const Index& i, std::int64_t at) { array.set(at, value(i)); });
}
void run(Case& c) { ASSERT_TRUE(oracle::forward(c.problem(), c.forward_operands()).ok()); }
double out(const Case& c, std::int64_t row, std::int64_t x = 0, std::int64_t head = 0, std::int64_t b = 0) {
  return c.out.get(c.out.offset({b, row, head, x}));
}
double lse(const Case& c, std::int64_t row, std::int64_t head = 0, std::int64_t b = 0) {
  return c.lse.get(c.lse.offset({b, head, row, 0}));
}
void expect_empty(const Case& c, std::int64_t row) {
  EXPECT_EQ(lse(c, row), -HUGE_VAL) << row;
  for (std::int64_t x = 0; x < c.spec().head_dim_v; ++x) EXPECT_EQ(out(c, row, x), 0) << row;
}
void expect_same_rows(const Case& a, std::int64_t row_a, const Case& b, std::int64_t row_b, double tolerance) {
  EXPECT_NEAR(lse(a, row_a), lse(b, row_b), tolerance + 1e-6);
  for (std::int64_t x = 0; x < a.spec().head_dim_v; ++x) {
    EXPECT_NEAR(out(a, row_a, x), out(b, row_b, x), tolerance) << row_a;
  }
}

/// Uniform weights over the visible keys: row j of V is j + 1.
TEST(Cases, C01CausalAlignment) {
  struct Expected {
    std::int64_t seq_q, seq_k;
    Align align;
    std::vector<double> rows;  // 0: empty
  };
  const Expected table[] = {
      {1, 8, Align::bottom_right, {4.5}},    {2, 5, Align::bottom_right, {2.5, 3}},
      {5, 2, Align::bottom_right, {0, 0, 0, 1, 1.5}}, {1, 8, Align::top_left, {1}},
      {2, 5, Align::top_left, {1, 1.5}},     {5, 2, Align::top_left, {1, 1.5, 1.5, 1.5, 1.5}},
  };
  for (const Expected& expected : table) {
    CaseSpec spec = sized(expected.seq_q, expected.seq_k, 16);
    spec.causal = true;
    spec.align = expected.align;
    Case c(spec);
    fill(c.q, [](const Index&) { return 0.0; });
    fill(c.k, [](const Index&) { return 1.0; });
    fill(c.v, [](const Index& i) { return static_cast<double>(i[1] + 1); });
    run(c);
    for (std::int64_t i = 0; i < expected.seq_q; ++i) {
      const double value = expected.rows[i];
      if (value == 0) {
        expect_empty(c, i);
      } else {
        EXPECT_NEAR(out(c, i, 7), value, 1e-14);
        EXPECT_NEAR(lse(c, i), std::log(std::min(2 * value - 1, 1.0 * static_cast<double>(expected.seq_k))), 1e-6);
      }
    }
  }
}

TEST(Cases, C03EmptyRowsByBias) {
  CaseSpec spec = sized(8, 8, 8);
  spec.bias = true;
  Case quarter(spec), small(sized(4, 4, 8));
  fill(quarter.bias, [](const Index& i) { return i[2] < 4 && i[3] < 4 ? 0.0 : -HUGE_VAL; });
  for (Array Case::*operand : {&Case::q, &Case::k, &Case::v}) {
    fill(small.*operand, [&](const Index& i) { return (quarter.*operand).get((quarter.*operand).offset(i)); });
  }
  run(quarter);
  run(small);
  for (std::int64_t i = 0; i < 4; ++i) {
    expect_same_rows(quarter, i, small, i, 1e-14);
    expect_empty(quarter, 4 + i);
  }

  spec.causal = true;
  Case causal(spec);
  fill(causal.bias, [](const Index& i) { return i[3] < 4 ? -HUGE_VAL : 0.0; });
  run(causal);
  for (std::int64_t i = 0; i < 4; ++i) expect_empty(causal, i);
  EXPECT_NEAR(out(causal, 4, 3), causal.v.get(causal.v.offset({0, 4, 0, 3})), 1e-14);

  CaseSpec window = sized(8, 4, 8);
  window.causal = true;
  window.align = Align::top_left;
  window.window_left = 1;
  Case c(window);
  run(c);
  for (std::int64_t i = 5; i < 8; ++i) expect_empty(c, i);
  EXPECT_NEAR(out(c, 4, 0), c.v.get(c.v.offset({0, 3, 0, 0})), 1e-14);
}

TEST(Cases, C04LowestFiniteBias) {
  CaseSpec spec = sized(441, 441, 64);
  spec.dtype = DType::f32;
  spec.bias = true;
  Case row(spec);
  fill(row.bias, [](const Index& i) { return i[2] == 392 ? -FLT_MAX : 0.0; });
  run(row);
  EXPECT_TRUE(std::isfinite(lse(row, 392)));
  for (std::int64_t x = 0; x < 64; ++x) {
    double mean = 0;
    for (std::int64_t j = 0; j < 441; ++j) mean += row.v.get(row.v.offset({0, j, 0, x})) / 441;
    EXPECT_NEAR(out(row, 392, x), mean, 1e-7);
  }
  Case columns(spec);
  fill(columns.bias, [](const Index& i) { return i[3] < 128 ? -FLT_MAX : 0.0; });
  run(columns);
  spec.bias = false;
  spec.k_start = {128};
  Case rest(spec);
  for (Array Case::*operand : {&Case::q, &Case::k, &Case::v}) {
    fill(rest.*operand, [&](const Index& i) { return (columns.*operand).get((columns.*operand).offset(i)); });
  }
  run(rest);
  for (std::int64_t i = 0; i < 441; ++i) expect_same_rows(columns, i, rest, i, 1e-6);
}

TEST(Cases, C06NoKeys) {
  Case none(sized(5, 0, 8));
  run(none);
  for (std::int64_t i = 0; i < 5; ++i) expect_empty(none, i);
  CaseSpec spec = sized(3, 1, 8);
  spec.causal = true;
  Case one(spec);
  run(one);
  expect_empty(one, 0);
  expect_empty(one, 1);
  for (std::int64_t x = 0; x < 8; ++x) EXPECT_EQ(out(one, 2, x), one.v.get(x));
}

TEST(Cases, C07Windows) {
  for (const std::int64_t left : {0, 1, 4, 15, 16, 1000, -1}) {
    for (const std::int64_t right : {0, -1, 3}) {
      CaseSpec spec = sized(16, 16, 16);
      spec.window_left = left;
      spec.window_right = right;
      Case c(spec);
      fill(c.v, [](const Index& i) { return i[1] == i[3] ? 1.0 : 0.0; });
      run(c);
      for (std::int64_t i = 0; i < 16; ++i) {
        double sum = 0;
        for (std::int64_t j = 0; j < 16; ++j) {
          const bool visible = (left < 0 || j >= i - left) && (right < 0 || j <= i + right);
          EXPECT_EQ(out(c, i, j) > 0, visible) << left << "," << right << " row " << i << " key " << j;
          sum += out(c, i, j);
        }
        EXPECT_NEAR(sum, 1, 1e-14);
        if (left == 0 && right == 0) {
          EXPECT_EQ(out(c, i, i), 1);
        }
      }
      // The last query of a cache of n tokens sees what row n - 1 of the prefill saw.
      for (std::int32_t n = 1; n <= 16; ++n) {
        CaseSpec decode_spec = sized(1, 16, 16);
        decode_spec.window_left = left;
        decode_spec.window_right = 0;
        decode_spec.k_length = {n};
        Case decode(decode_spec);
        fill(decode.v, [](const Index& i) { return i[1] == i[3] ? 1.0 : 0.0; });
        run(decode);
        for (std::int64_t j = 0; j < 16; ++j) {
          EXPECT_EQ(out(decode, 0, j) > 0, j < n && (left < 0 || j >= n - 1 - left));
        }
      }
    }
  }
}

TEST(Cases, C08WindowPastTheKeys) {
  CaseSpec spec = sized(100, 60, 8);
  spec.causal = true;
  spec.window_left = 16;
  Case c(spec);
  run(c);
  for (std::int64_t i = 0; i < 40; ++i) expect_empty(c, i);
  for (std::int64_t i = 40; i < 100; ++i) EXPECT_GT(lse(c, i), -HUGE_VAL);
}

TEST(Cases, C09NanInHiddenKeys) {
  for (const bool by_length : {true, false}) {
    CaseSpec spec = sized(2, 2, 4);
    if (by_length) {
      spec.k_length = {1};
      spec.q_position = {0};
    } else {
      spec.causal = true;
    }
    for (Array Case::*operand : {&Case::k, &Case::v}) {
      for (const double bad : {std::nan(""), HUGE_VAL}) {
        Case clean(spec), dirty(spec);
        const auto set = [&](Case& c, double x) {
          for (std::int64_t d = 0; d < 4; ++d) (c.*operand).set((c.*operand).offset({0, 1, 0, d}), x);
        };
        set(clean, 0);
        set(dirty, bad);
        run(clean);
        run(dirty);
        EXPECT_EQ(lse(clean, 0), lse(dirty, 0));
        for (std::int64_t x = 0; x < 4; ++x) EXPECT_EQ(out(clean, 0, x), out(dirty, 0, x));
        if (by_length) {
          EXPECT_EQ(clean.out.bits(), dirty.out.bits());
          EXPECT_EQ(clean.lse.bits(), dirty.lse.bits());
        } else if (std::isnan(bad) || operand == &Case::v) {
          EXPECT_FALSE(std::isfinite(out(dirty, 1, 0)));
        }
      }
    }
  }
}

TEST(Cases, C10NanQueries) {
  CaseSpec spec = sized(16, 16, 8);
  spec.dtype = DType::f32;
  spec.batch = 2;
  spec.heads_q = spec.heads_kv = 4;
  Case all(spec), one(spec);
  fill(all.q, [](const Index&) { return std::nan(""); });
  for (std::int64_t x = 0; x < 8; ++x) one.q.set(one.q.offset({1, 5, 2, x}), NAN);
  run(all);
  run(one);
  all.out.each([&](const Index& i, std::int64_t at) {
    EXPECT_TRUE(std::isnan(all.out.get(at)));
    EXPECT_EQ(std::isnan(one.out.get(at)), i[0] == 1 && i[1] == 5 && i[2] == 2);
  });
  all.lse.each([&](const Index& i, std::int64_t at) {
    EXPECT_TRUE(std::isnan(all.lse.get(at)));
    EXPECT_EQ(std::isnan(one.lse.get(at)), i[0] == 1 && i[2] == 5 && i[1] == 2);
  });
}

TEST(Cases, C11HugeNegativeScores) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
    for (const std::int64_t seq_k : {1, 2}) {
      for (const std::int64_t seq_q : {1, 5}) {
        CaseSpec spec = sized(seq_q, seq_k, 128);
        spec.dtype = dtype;
        Case c(spec);
        fill(c.q, [](const Index&) { return 64.0; });
        fill(c.k, [](const Index&) { return -64.0; });
        fill(c.v, [](const Index&) { return 1.0; });
        run(c);
        for (std::int64_t i = 0; i < seq_q; ++i) {
          EXPECT_EQ(out(c, i, 100), 1);
          EXPECT_NEAR(lse(c, i), -524288 / std::sqrt(128.0) + std::log(static_cast<double>(seq_k)), 0.003);
        }
      }
    }
  }
}

TEST(Cases, C12LargeProductsAndValues) {
  for (const double sign : {1.0, -1.0}) {
    CaseSpec spec = sized(1, 2, 128);
    spec.dtype = DType::f16;
    spec.scale = 1.0 / 256;
    Case c(spec);
    fill(c.q, [](const Index&) { return 16.0; });
    fill(c.k, [sign](const Index&) { return sign * 34.1875; });
    run(c);
    EXPECT_NEAR(lse(c, 0), sign * 70016 / 256 + std::log(2.0), 1e-4);
    const double mean = (c.v.get(c.v.offset({0, 0, 0, 0})) + c.v.get(c.v.offset({0, 1, 0, 0}))) / 2;
    EXPECT_NEAR(out(c, 0), mean, 1e-3);
  }
  CaseSpec spec = sized(1, 4096, 16);
  spec.dtype = DType::f16;
  Case c(spec);
  fill(c.q, [](const Index&) { return 0.0; });
  fill(c.v, [](const Index&) { return 60000.0; });
  run(c);
  EXPECT_EQ(out(c, 0), 60000);
}

TEST(Cases, C14OneKeyHasNoScoreGradient) {
  CaseSpec spec = sized(1, 1, 16);
  spec.pass = Pass::backward;
  spec.dtype = DType::f16;
  Case c(spec);
  for (Array Case::*operand : {&Case::q, &Case::k, &Case::v}) {
    fill(c.*operand, [&](const Index& i) {
      return std::round(24 * (c.*operand).get((c.*operand).offset(i))) / 8;
    });
  }
  fill(c.grad_out, [](const Index&) { return 1.0; });
  ASSERT_TRUE(oracle::backward(c.problem(), c.backward_operands()).ok());
  for (std::int64_t x = 0; x < 16; ++x) {
    EXPECT_EQ(c.grad_q.get(x), 0);
    EXPECT_EQ(c.grad_k.get(x), 0);
    EXPECT_EQ(c.grad_v.get(x), 1);
  }
}

/// A sink is one more key of score sigma and value 0.
TEST(Cases, C21SinkAsAnExtraColumn) {
  for (const double sigma : {-HUGE_VAL, 0.0, 5.0}) {
    for (const bool windowed : {false, true}) {
      CaseSpec spec = sized(33, 33, 16);
      spec.pass = Pass::backward;
      spec.heads_q = 6;
      spec.heads_kv = 2;
      if (windowed) spec.window_left = 7;
      CaseSpec wide_spec = spec;
      spec.sinks = true;
      spec.sinks_dtype = DType::f64;
      Case c(spec);
      fill(c.sinks, [sigma](const Index&) { return sigma; });
      // The same with a bias that opens one key of score sigma in front: rows sit one key further.
      wide_spec.seq_k = 34;
      wide_spec.window_left = -1;
      wide_spec.bias = true;
      wide_spec.bias_dtype = DType::f64;
      Case wide(wide_spec);
      fill(wide.q, [&](const Index& i) { return c.q.get(c.q.offset(i)); });
      fill(wide.grad_out, [&](const Index& i) { return c.grad_out.get(c.grad_out.offset(i)); });
      for (Array Case::*operand : {&Case::k, &Case::v}) {
        fill(wide.*operand, [&](const Index& i) {
          return i[1] == 0 ? 0.0 : (c.*operand).get((c.*operand).offset({i[0], i[1] - 1, i[2], i[3]}));
        });
      }
      fill(wide.bias, [&](const Index& i) {
        if (i[3] == 0) return sigma;
        return windowed && i[3] - 1 < i[2] - 7 ? -HUGE_VAL : 0.0;
      });
      for (Case* each : {&c, &wide}) {
        ASSERT_TRUE(oracle::backward(each->problem(), each->backward_operands()).ok());
      }
      c.grad_q.each([&](const Index&, std::int64_t at) {
        ASSERT_NEAR(c.grad_q.get(at), wide.grad_q.get(at), 1e-13);
      });
      c.grad_k.each([&](const Index& i, std::int64_t at) {
        const Index shifted = {i[0], i[1] + 1, i[2], i[3]};
        ASSERT_NEAR(c.grad_k.get(at), wide.grad_k.get(wide.grad_k.offset(shifted)), 1e-12);
        ASSERT_NEAR(c.grad_v.get(at), wide.grad_v.get(wide.grad_v.offset(shifted)), 1e-12);
      });
      for (std::int64_t h = 0; h < 6; ++h) {
        double sum = 0;
        for (std::int64_t i = 0; i < 33; ++i) sum += wide.grad_bias.get(wide.grad_bias.offset({0, h, i, 0}));
        EXPECT_NEAR(c.grad_sinks.get(h), sum, 1e-12);
        if (sigma == -HUGE_VAL) {
          EXPECT_EQ(c.grad_sinks.get(h), 0);
        }
      }
    }
  }
}

TEST(Cases, SinkAlone) {
  CaseSpec spec = sized(3, 0, 4);
  spec.sinks = true;
  Case c(spec);
  fill(c.sinks, [](const Index&) { return 1.25; });
  run(c);
  for (std::int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(lse(c, i), 1.25);
    EXPECT_EQ(out(c, i), 0);
  }
}

TEST(Cases, C28ZeroSizes) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (int zero = 0; zero < 128; ++zero) {
      CaseSpec spec = sized((zero & 1) != 0 ? 0 : 3, (zero & 2) != 0 ? 0 : 4, (zero & 4) != 0 ? 0 : 5);
      spec.pass = pass;
      spec.batch = (zero & 8) != 0 ? 0 : 2;
      spec.heads_q = (zero & 16) != 0 ? 0 : 4;
      spec.heads_kv = (zero & 16) != 0 ? 0 : 2;
      spec.head_dim_v = (zero & 32) != 0 ? 0 : 6;
      spec.causal = (zero & 64) != 0;
      spec.scale = 1;
      Case c(spec);
      if (pass == Pass::forward) {
        run(c);
        c.out.each([&](const Index&, std::int64_t at) {
          if (spec.seq_k == 0) {
            EXPECT_EQ(c.out.get(at), 0);
          }
          EXPECT_TRUE(std::isfinite(c.out.get(at)));
        });
        c.lse.each([&](const Index&, std::int64_t at) { EXPECT_FALSE(std::isnan(c.lse.get(at))); });
      } else {
        ASSERT_TRUE(oracle::backward(c.problem(), c.backward_operands()).ok());
        for (const Array* gradient : {&c.grad_q, &c.grad_k, &c.grad_v}) {
          gradient->each([&](const Index&, std::int64_t at) {
            EXPECT_TRUE(std::isfinite(gradient->get(at)));
            if (spec.seq_q == 0 || spec.seq_k == 0) {
              EXPECT_EQ(gradient->get(at), 0);
            }
          });
        }
      }
      EXPECT_TRUE(c.faults().empty());
    }
  }
  CaseSpec spec = sized(0, 0, 8);
  spec.cu_seqlens_q = spec.cu_seqlens_k = {0, 0, 0};
  spec.batch = 2;
  Case c(spec);
  run(c);
}

TEST(Cases, C36TokensOutsideTheSequences) {
  CaseSpec spec = sized(512, 512, 8);
  spec.pass = Pass::backward;
  spec.batch = 3;
  spec.heads_q = spec.heads_kv = 2;
  spec.cu_seqlens_q = spec.cu_seqlens_k = {0, 144, 432, 944};
  spec.total_q = spec.total_k = 946;
  spec.causal = true;
  spec.window_left = 40;
  Case c(spec);
  ASSERT_TRUE(oracle::backward(c.problem(), c.backward_operands()).ok());
  for (const Array* gradient : {&c.grad_q, &c.grad_k, &c.grad_v}) {
    gradient->each([&](const Index& i, std::int64_t at) {
      ASSERT_TRUE(std::isfinite(gradient->get(at)));
      if (i[1] >= 944) {
        ASSERT_EQ(gradient->get(at), 0);
      }
    });
  }
}

}  // namespace
}  // namespace onepass
