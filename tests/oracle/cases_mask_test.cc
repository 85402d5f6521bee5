// Masks and empty rows that broke attention libraries, with results known in closed form, on the oracle.
#include <cfloat>

#include "oracle/cases.h"

namespace onepass::cases {
namespace {

/// Uniform weights over the visible keys: row j of V is j + 1.
TEST(Cases, C01CausalAlignment) {
  struct Expected {
    std::int64_t seq_q, seq_k;
    Align align;
    std::vector<double> rows;  // 0: empty
  };
  const Expected table[] = {
      {1, 8, Align::bottom_right, {4.5}},
      {2, 5, Align::bottom_right, {2.5, 3}},
      {5, 2, Align::bottom_right, {0, 0, 0, 1, 1.5}},
      {1, 8, Align::top_left, {1}},
      {2, 5, Align::top_left, {1, 1.5}},
      {5, 2, Align::top_left, {1, 1.5, 1.5, 1.5, 1.5}},
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

}  // namespace
}  // namespace onepass::cases
