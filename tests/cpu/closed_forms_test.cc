// Inputs that broke attention libraries, on every kernel of this machine, where the right result can be written down.
#include <cmath>

#include "check/random.h"
#include "cpu/every_kernel.h"
#include "cpu/merge.h"

namespace onepass {
namespace {

using namespace every_kernel;

TEST(ClosedForms, C09NanInTheSecondKey) {
  for (const DType dtype : kStorage) {
    for (const double bad : {std::nan(""), HUGE_VAL}) {
      for (const bool in_v : {false, true}) {
        for (const bool causal : {false, true}) {
          CaseSpec spec = sized(Pass::forward, dtype, 2, 2, 4);
          spec.causal = causal;
          if (!causal) spec.k_length = {1};
          Case c(spec);
          Array& operand = in_v ? c.v : c.k;
          fill(c.q, [](const Index& i) { return i[3] == 0 ? 1.0 : 0.25; });
          const auto rows_with = [&](double value) {
            fill(operand, [&](const Index& i) { return i[1] == 1 ? value : 0.5 + static_cast<double>(i[3]); });
            std::vector<std::array<double, 2>> rows;
            run_every(c, [&](const Kernel&) {
              for (std::int64_t i = 0; i < 2; ++i) rows.push_back({at(c.out, 0, i, 0, 1), lse_at(c.lse, 0, i)});
            });
            return rows;
          };
          if (!in_v) fill(c.v, [](const Index& i) { return static_cast<double>(i[1]); });
          if (in_v) fill(c.k, [](const Index& i) { return static_cast<double>(i[1]); });
          const auto zeros = rows_with(0), rows = rows_with(bad);
          for (std::size_t n = 0; n < rows.size(); ++n) {
            if (n % 2 == 0 || !causal) {
              EXPECT_EQ(rows[n], zeros[n]);
            } else {
              EXPECT_TRUE(in_v || std::isinf(bad) || std::isnan(rows[n][0]));
              EXPECT_TRUE(!in_v || !std::isfinite(rows[n][0]));
            }
          }
        }
      }
    }
  }
}

TEST(ClosedForms, C14OneKeyGivesExactZeros) {
  for (const DType dtype : kStorage) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      Case c(sized(Pass::backward, dtype, 1, 1, 16));
      check::Random random(seed);
      const auto eighths = [&](const Index&) { return std::round(24 * random.normal()) / 8; };
      for (Array* array : {&c.q, &c.k, &c.v}) fill(*array, eighths);
      fill(c.grad_out, [](const Index&) { return 1.0; });
      refresh(c);
      run_every(c, [&](const Kernel& kernel) {
        for (std::int64_t x = 0; x < 16; ++x) {
          EXPECT_EQ(at(c.grad_q, 0, 0, 0, x), 0) << kernel.name;
          EXPECT_EQ(at(c.grad_k, 0, 0, 0, x), 0) << kernel.name;
          EXPECT_EQ(at(c.grad_v, 0, 0, 0, x), 1) << kernel.name;
        }
      });
    }
  }
}

/// Rows that see one key have a weight that no score can change, whatever the rest of the problem does.
TEST(ClosedForms, OneVisibleKeyGivesExactZeros) {
  for (const DType dtype : kStorage) {
    CaseSpec spec = sized(Pass::backward, dtype, 150, 150, 16);
    spec.window_left = spec.window_right = 0;
    Case c(spec);
    check::Random random(3);
    const auto eighths = [&](const Index&) { return std::round(8 * random.normal()) / 8; };
    for (Array* array : {&c.q, &c.k, &c.v, &c.grad_out}) fill(*array, eighths);
    refresh(c);
    run_every(c, [&](const Kernel& kernel) {
      for (std::int64_t i = 0; i < 150; ++i) {
        for (std::int64_t x = 0; x < 16; ++x) {
          ASSERT_EQ(at(c.grad_q, 0, i, 0, x), 0) << kernel.name;
          ASSERT_EQ(at(c.grad_k, 0, i, 0, x), 0) << kernel.name;
          ASSERT_EQ(at(c.grad_v, 0, i, 0, x), at(c.grad_out, 0, i, 0, x)) << kernel.name;
        }
      }
    });
  }
}

TEST(ClosedForms, C15ConstantOperands) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const double value : {1.0, 1e2, 1e3}) {
      Case c(sized(Pass::backward, dtype, 50, 50, 64));
      for (Array* array : {&c.q, &c.k, &c.v}) fill(*array, [&](const Index&) { return value; });
      fill(c.grad_out, [](const Index&) { return 1.0; });
      refresh(c);
      const double score = value * value * 8;
      // P (dP - D) is 0 but for the rounding of dP and D, 64 value each; the lse of a score of 8e6 is good to 0.5.
      const double weight = std::exp(score * 0x1p-22) / 50, rounding = 64 * value * 64 * 0x1p-24;
      const double bound = 50 * weight * rounding * value / 8;
      run_every(c, [&](const Kernel& kernel) {
        for (std::int64_t i = 0; i < 50; ++i) {
          for (std::int64_t x = 0; x < 64; ++x) {
            ASSERT_LE(std::abs(at(c.grad_q, 0, i, 0, x)), bound) << kernel.name << " " << value;
            ASSERT_LE(std::abs(at(c.grad_k, 0, i, 0, x)), bound) << kernel.name << " " << value;
            ASSERT_NEAR(at(c.grad_v, 0, i, 0, x), 1, 0.01 + std::expm1(score * 0x1p-22)) << kernel.name << " " << value;
          }
        }
      });
    }
  }
}

TEST(ClosedForms, C16OddLengthsAndDims) {
  for (const std::int64_t seq : {1, 2, 97, 113, 127, 129, 203, 257}) {
    for (const std::int64_t dim : {32, 40, 64, 128}) {
      CaseSpec spec = sized(Pass::backward, kStorage[(seq + dim / 8) % 3], seq, seq, dim);
      for (const bool causal : {false, true}) {
        spec.causal = causal;
        expect_right(spec);
        if (spec.dtype != DType::bf16 && dim == 64) {
          CaseSpec other = spec;
          other.dtype = DType::bf16;
          expect_right(other);
        }
      }
    }
  }
}

/// Two keys, scores s0 and s1 before the cap: out is the logistic function of c tanh(s0 / c) - c tanh(s1 / c).
TEST(ClosedForms, C20SoftcapOfTwoKeys) {
  for (const double cap : {10.0, 0.5}) {
    for (const DType dtype : kStorage) {
      for (const Pass pass : {Pass::forward, Pass::decode, Pass::backward}) {
        CaseSpec spec = sized(pass, dtype, 3, 2, 64);
        spec.softcap = cap;
        spec.scale = 1;
        Case c(spec);
        const double k0 = 12.5, k1 = 0.75, q = 8;
        fill(c.q, [&](const Index& i) { return i[3] == 5 ? q : 0; });
        fill(c.k, [&](const Index& i) { return i[3] == 5 ? i[1] == 0 ? k0 : k1 : 0; });
        fill(c.v, [](const Index& i) { return i[1] == 0 ? 1.0 : 0.0; });
        const double t0 = std::tanh(q * k0 / cap), t1 = std::tanh(q * k1 / cap);
        const double out = 1 / (1 + std::exp(cap * (t1 - t0)));
        const double unit = dtype == DType::f32 ? 2e-6 : dtype == DType::f16 ? 0x1p-10 : 0x1p-7;
        if (pass != Pass::backward) {
          run_every(c, [&](const Kernel& kernel) { EXPECT_NEAR(at(c.out, 0, 2, 0, 9), out, unit) << kernel.name; });
          continue;
        }
        fill(c.grad_out, [](const Index& i) { return i[3] == 1 ? 1.0 : 0.0; });
        refresh(c);
        const double ds = out * (1 - out), dq = ds * ((1 - t0 * t0) * k0 - (1 - t1 * t1) * k1);
        run_every(c, [&](const Kernel& kernel) {
          EXPECT_NEAR(at(c.grad_q, 0, 2, 0, 5), dq, unit * (std::abs(dq) + 1)) << kernel.name;
          EXPECT_NEAR(at(c.grad_k, 0, 1, 0, 5), -3 * ds * (1 - t1 * t1) * q, unit * 10) << kernel.name;
          EXPECT_NEAR(at(c.grad_v, 0, 0, 0, 1), 3 * out, 3 * unit) << kernel.name;
        });
      }
    }
  }
}

TEST(ClosedForms, C21C22C28C32Bf16Backward) {
  for (const double sink : {-HUGE_VAL, 0.0, 5.0}) {
    for (const std::int64_t window : {-1, 4}) {
      CaseSpec spec = sized(Pass::backward, DType::bf16, 33, 33, 64);
      spec.heads_q = 6;
      spec.heads_kv = 2;
      spec.window_left = window;
      spec.sinks = spec.grad_lse = true;
      if (!kit::chosen(check::describe(spec) + std::to_string(sink), 1e6)) continue;
      Case c(spec);
      fill(c.sinks, [&](const Index&) { return sink; });
      refresh(c);
      expect_right(c, [&](const Kernel& kernel) {
        if (std::isinf(sink)) {
          EXPECT_EQ(c.grad_sinks.get(0), 0) << kernel.name;
        }
      });
    }
  }
  for (const auto& broadcast :
       {std::array<bool, 4>{true, false, false, false}, {false, true, true, false}, {true, true, false, false}}) {
    CaseSpec spec = sized(Pass::backward, DType::bf16, 128, 128, 32);
    spec.batch = 8;
    spec.heads_q = spec.heads_kv = 4;
    spec.bias = true;
    spec.bias_broadcast = broadcast;
    expect_right(spec);
  }
  for (int zero = 0; zero < 32; ++zero) {
    CaseSpec spec =
        sized(Pass::backward, DType::bf16, (zero & 1) != 0 ? 0 : 5, (zero & 2) != 0 ? 0 : 7, (zero & 4) != 0 ? 0 : 4);
    spec.heads_q = spec.heads_kv = (zero & 8) != 0 ? 0 : 2;
    spec.batch = (zero & 16) != 0 ? 0 : 2;
    spec.scale = 1;
    spec.causal = zero % 3 == 0;
    expect_right(spec);
  }
  for (int n = 0; n < 16; ++n) {
    CaseSpec spec = sized(Pass::backward, DType::bf16, 1 + (n & 1), 1 + (n >> 1 & 1), 64);
    spec.heads_q = spec.heads_kv = 1 + (n >> 2 & 1);
    spec.batch = 1 + (n >> 3 & 1);
    expect_right(spec);
  }
}

/// One sequence in chunks of keys, whose partial results are merged, a sink once: as unsplit, for any number of chunks.
TEST(ClosedForms, C21C52MergedChunks) {
  for (const DType dtype : kStorage) {
    CaseSpec spec = sized(Pass::decode, dtype, 4, 1024, 64);
    spec.out_f32 = true;
    Case c(spec);
    constexpr double kSink = 4;
    // Kernels that round weights to the storage type round them against each chunk's own maximum, and take them from a
    // short polynomial.
    const double tolerance = dtype == DType::f32 ? 2e-6 : dtype == DType::f16 ? 1e-3 : 4e-3;
    run_every(c, [&](const Kernel& kernel) {
      for (const std::int64_t chunks : {1, 8, 64}) {
        std::vector<float> out(4 * 64, 0), lse(4, -HUGE_VALF), part(4 * 64), part_lse(4);
        Problem p = c.problem();
        p.seq_k = p.total_k = 1024 / chunks;
        const auto tensor = [](std::vector<float>& x) { return Tensor{x.data(), DType::f32, 256, 64, 64}; };
        const auto rows = [](std::vector<float>& x) { return RowTensor{x.data(), 4, 4}; };
        for (std::int64_t n = 0; n < chunks; ++n) {
          ForwardOperands x = c.forward_operands();
          x.k.data = x.k.row(0, n * p.seq_k, 0);
          x.v.data = x.v.row(0, n * p.seq_k, 0);
          x.out = tensor(part);
          x.lse = rows(part_lse);
          run(kernel, p, x);
          ASSERT_TRUE(
              cpu::merge_partial(p, tensor(out), rows(lse), tensor(part), rows(part_lse), tensor(out), rows(lse), 1)
                  .ok());
        }
        std::vector<float> nothing(4 * 64, 0), sink(4, static_cast<float>(kSink));
        ASSERT_TRUE(
            cpu::merge_partial(p, tensor(out), rows(lse), tensor(nothing), rows(sink), tensor(out), rows(lse), 1).ok());
        for (std::int64_t i = 0; i < 4; ++i) {
          const double unsplit = lse_at(c.lse, 0, i), with_sink = unsplit + std::log1p(std::exp(kSink - unsplit));
          EXPECT_NEAR(lse[static_cast<std::size_t>(i)], with_sink, dtype == DType::bf16 ? 3e-5 : 4e-6)
              << kernel.name << " " << chunks;
          const double factor = std::exp(unsplit - with_sink);
          for (std::int64_t x = 0; x < 64; ++x) {
            EXPECT_NEAR(out[static_cast<std::size_t>(i * 64 + x)], factor * at(c.out, 0, i, 0, x), tolerance)
                << kernel.name << " " << chunks;
          }
        }
      }
    });
  }
}

}  // namespace
}  // namespace onepass
