// Rows without keys, by the mask or by a bias of -inf on all that they see: out 0, lse -inf or the sink, gradients 0,
// whatever Q, K, V and dO hold.
#include <cmath>

#include "cpu/every_kernel.h"

namespace onepass {
namespace {

using namespace every_kernel;

constexpr double kInfinity = HUGE_VAL;

bool emptied(const Index& i) {
  return i[2] % 3 == 1 || i[2] >= 70;
}

/// Bias -inf on every key of some rows; NaN in what only those rows see, in one operand.
Case emptied_case(Pass pass, DType dtype, bool sinks, int poisoned) {
  CaseSpec spec = sized(pass, dtype, pass == Pass::decode ? 14 : 130, 200, 40);
  spec.heads_q = 2;
  spec.bias = true;
  spec.sinks = sinks;
  spec.causal = true;  // the last rows, which are emptied, alone see the last keys
  spec.grad_lse = pass == Pass::backward;
  Case c(spec);
  const auto last = static_cast<std::int64_t>(pass == Pass::decode ? 12 : 70), first_key = 200 - spec.seq_q + last;
  fill(c.bias, [&](const Index& i) { return emptied(i) || i[2] >= last ? -kInfinity : 0.1; });
  Array* operands[] = {&c.v, &c.k, &c.q, &c.grad_out};
  fill(*operands[poisoned], [&](const Index& i) {
    const bool lost = poisoned < 2 ? i[1] >= first_key : emptied({0, 0, i[1], 0}) || i[1] >= last;
    const Array& array = *operands[poisoned];
    return lost ? std::nan("") : array.get(array.offset(i));
  });
  if (pass == Pass::backward) refresh(c);
  return c;
}

TEST(EmptyRows, BiasOfMinusInfinityEmptiesARow) {
  for (const Pass pass : {Pass::forward, Pass::decode}) {
    for (const DType dtype : kStorage) {
      for (const bool sinks : {false, true}) {
        for (int poisoned = 0; poisoned < 3; ++poisoned) {
          if (!kit::chosen(dtype_name(dtype) + std::to_string(4 * poisoned + 2 * sinks), 5e5)) continue;
          Case c = emptied_case(pass, dtype, sinks, poisoned);
          expect_right(c, [&](const Kernel& kernel) {
            for (std::int64_t h = 0; h < 2; ++h) {
              const double sink = sinks ? c.sinks.get(c.sinks.offset({0, h, 0, 0})) : -kInfinity;
              for (const std::int64_t row : {std::int64_t{1}, c.spec().seq_q - 1}) {
                EXPECT_EQ(at(c.out, 0, row, h, 7), 0) << kernel.name;
                EXPECT_EQ(lse_at(c.lse, 0, row, h), sink) << kernel.name;
              }
              EXPECT_TRUE(std::isfinite(at(c.out, 0, 0, h, 7))) << kernel.name;
              EXPECT_NE(at(c.out, 0, 0, h, 7), 0) << kernel.name;
            }
          });
        }
      }
    }
  }
}

TEST(EmptyRows, NoGradientGoesThroughThem) {
  for (const DType dtype : kStorage) {
    for (const bool sinks : {false, true}) {
      for (int poisoned = 0; poisoned < 4; ++poisoned) {
        if (!kit::chosen(dtype_name(dtype) + std::to_string(2 * poisoned + sinks), 1e6)) continue;
        Case c = emptied_case(Pass::backward, dtype, sinks, poisoned);
        expect_right(c, [&](const Kernel& kernel) {
          for (const Array* array : {&c.grad_q, &c.grad_k, &c.grad_v, &c.grad_bias, &c.grad_sinks}) {
            if (!*array) continue;
            array->each(
                [&](const Index&, std::int64_t n) { ASSERT_TRUE(std::isfinite(array->get(n))) << kernel.name; });
          }
          for (std::int64_t x = 0; x < 40; ++x) {
            EXPECT_EQ(at(c.grad_q, 0, 1, 0, x), 0) << kernel.name;
            EXPECT_EQ(at(c.grad_k, 0, 199, 0, x), 0) << kernel.name;
            EXPECT_EQ(at(c.grad_v, 0, 199, 0, x), 0) << kernel.name;
          }
        });
      }
    }
  }
}

/// The sink of a problem of empty rows alone gets the gradient of lse, which is the sink.
TEST(EmptyRows, SinkGradientIsThatOfLse) {
  for (const bool by_bias : {false, true}) {
    CaseSpec spec = sized(Pass::backward, DType::bf16, 70, by_bias ? 90 : 0, 16);
    spec.sinks = spec.grad_lse = true;
    spec.bias = by_bias;
    Case c(spec);
    if (by_bias) fill(c.bias, [](const Index&) { return -kInfinity; });
    fill(c.grad_out, [](const Index&) { return std::nan(""); });
    fill(c.v, [](const Index&) { return std::nan(""); });
    refresh(c);
    double sum = 0;
    c.grad_lse.each([&](const Index&, std::int64_t n) { sum += c.grad_lse.get(n); });
    run_every(c, [&](const Kernel& kernel) { EXPECT_NEAR(c.grad_sinks.get(0), sum, 1e-5) << kernel.name; });
  }
}

/// Some keys of a row with a bias of -inf have weight 0; they are visible, and NaN in them is NaN in the row.
TEST(EmptyRows, OneFiniteBiasKeepsARow) {
  for (const DType dtype : kStorage) {
    CaseSpec spec = sized(Pass::forward, dtype, 5, 90, 16);
    spec.bias = spec.sinks = true;
    Case one(spec);
    fill(one.bias, [](const Index& i) { return i[3] == 17 * i[2] ? 0.0 : -kInfinity; });
    expect_right(one, [&](const Kernel& kernel) {
      for (std::int64_t row = 0; row < 5; ++row) EXPECT_NE(at(one.out, 0, row, 0, 3), 0) << kernel.name;
    });
    fill(one.v, [&](const Index& i) { return i[1] == 80 ? std::nan("") : one.v.get(one.v.offset(i)); });
    expect_right(one);
  }
}

TEST(EmptyRows, C03Backward) {
  for (const DType dtype : kStorage) {
    CaseSpec spec = sized(Pass::backward, dtype, 8, 8, 8);
    spec.bias = true;
    Case corner(spec);
    fill(corner.bias, [](const Index& i) { return i[2] < 4 && i[3] < 4 ? 0.0 : -kInfinity; });
    refresh(corner);
    spec.causal = true;
    Case half(spec);
    fill(half.bias, [](const Index& i) { return i[3] < 4 ? -kInfinity : 0.0; });
    refresh(half);
    const auto expect_zero = [dtype](Case& c, std::int64_t first, std::int64_t last) {
      run(*find_kernel("bwd_cpu_oracle"), c);
      Array right(DType::f64, c.grad_q.size());
      fill(right, [&](const Index& i) { return c.grad_q.get(c.grad_q.offset(i)); });
      run_every(c, [&](const Kernel& kernel) {
        for (std::int64_t row = 0; row < 8; ++row) {
          for (std::int64_t x = 0; x < 8; ++x) {
            const double got = at(c.grad_q, 0, row, 0, x), unit = dtype == DType::f32 ? 1e-6 : 0.01;
            EXPECT_NEAR(got, at(right, 0, row, 0, x), unit) << kernel.name;
            EXPECT_TRUE(row < first || row >= last || got == 0) << kernel.name;
          }
        }
      });
    };
    expect_zero(corner, 4, 8);
    expect_zero(half, 0, 4);
    CaseSpec window = sized(Pass::backward, dtype, 8, 4, 8);
    window.align = Align::top_left;
    window.causal = true;
    window.window_left = 1;
    Case past(window);
    expect_zero(past, 5, 8);
  }
}

TEST(EmptyRows, C02MoreQueriesThanKeys) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const std::int64_t excess : {1, 63, 64, 65, 127, 128, 129}) {
      CaseSpec spec = sized(pass, kStorage[excess % 3], 130 + excess, 130, 64);
      spec.heads_q = spec.heads_kv = 2;
      spec.causal = true;
      if (!kit::chosen(spec)) continue;
      Case c(spec);
      expect_right(c, [&](const Kernel& kernel) {
        const Array& rows = pass == Pass::forward ? c.out : c.grad_q;
        for (std::int64_t i = 0; i < spec.seq_q; ++i) {
          bool zero = true;
          for (std::int64_t x = 0; x < 64; ++x) zero = zero && at(rows, 0, i, 1, x) == 0;
          // The first row with a key sees one: its weights cannot change, and its dQ may be 0.
          if (i != excess || pass == Pass::forward) {
            EXPECT_EQ(zero, i < excess) << kernel.name << " row " << i;
          }
          if (pass == Pass::forward) {
            EXPECT_EQ(lse_at(c.lse, 0, i, 1) == -kInfinity, i < excess) << kernel.name;
          }
        }
      });
    }
  }
}

TEST(EmptyRows, C05LeftPadding) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    CaseSpec spec = sized(pass, DType::bf16, 33, 33, 128);
    if (!kit::chosen(spec)) continue;
    spec.batch = 2;
    spec.heads_q = spec.heads_kv = 32;
    spec.causal = true;
    spec.k_start = {0, 27};
    spec.k_length = {33, 6};
    Case c(spec);
    CaseSpec alone_spec = spec;
    alone_spec.batch = 1;
    alone_spec.k_start = {0};
    alone_spec.k_length = {33};
    Case alone(alone_spec);  // item 0's values: taken from the batch
    for (Array Case::*operand : {&Case::q, &Case::k, &Case::v, &Case::grad_out}) {
      if (!(c.*operand)) continue;
      fill(alone.*operand, [&](const Index& i) { return (c.*operand).get((c.*operand).offset(i)); });
    }
    if (pass == Pass::backward) refresh(alone);
    Array Case::*result = pass == Pass::forward ? &Case::out : &Case::grad_q;
    std::vector<std::uint64_t> bits;
    run_every(alone, [&](const Kernel&) { bits.push_back((alone.*result).bits()); });
    std::size_t n = 0;
    expect_right(c);
    run_every(c, [&](const Kernel& kernel) {
      const Array& rows = c.*result;
      Array first(rows.dtype(), (alone.*result).size());
      fill(first, [&](const Index& i) { return rows.get(rows.offset(i)); });
      EXPECT_EQ(first.bits(), bits[n++]) << kernel.name;
      for (std::int64_t i = 0; i < 33; ++i) {
        bool zero = true;
        for (std::int64_t x = 0; x < 128; ++x) zero = zero && at(rows, 1, i, 31, x) == 0;
        if (i != 27 || pass == Pass::forward) {
          EXPECT_EQ(zero, i < 27) << kernel.name << " row " << i;
        }
      }
    });
  }
}

TEST(EmptyRows, C39SeveralQueriesBeforeTheKeys) {
  for (const DType dtype : kStorage) {
    CaseSpec spec = sized(Pass::forward, dtype, 97, 64, 64);
    spec.heads_q = spec.heads_kv = 32;
    spec.causal = true;
    if (!kit::chosen(spec)) continue;
    Case c(spec);
    fill(c.v, [](const Index&) { return 1.0; });
    run_every(c, [&](const Kernel& kernel) {
      for (std::int64_t i = 0; i < 97; ++i) {
        EXPECT_NEAR(at(c.out, 0, i, 31, 63), i < 33 ? 0 : 1, i < 33 ? 0 : 1e-3) << kernel.name << " row " << i;
        EXPECT_EQ(lse_at(c.lse, 0, i, 31) == -kInfinity, i < 33) << kernel.name;
      }
    });
  }
}

}  // namespace
}  // namespace onepass
