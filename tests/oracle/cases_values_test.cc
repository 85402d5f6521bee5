// Values, gradients and sizes that broke attention libraries, with results known in closed form, on the oracle.
#include "oracle/cases.h"

namespace onepass::cases {
namespace {

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
    fill(c.*operand, [&](const Index& i) { return std::round(24 * (c.*operand).get((c.*operand).offset(i))) / 8; });
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
      c.grad_q.each([&](const Index&, std::int64_t at) { ASSERT_NEAR(c.grad_q.get(at), wide.grad_q.get(at), 1e-13); });
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
}  // namespace onepass::cases
