// Every rung gives the reference's answer, counted or not; steps of the derivation hold; bad input is refused.
#include <cstring>

#include "ladder/measure.h"
#include "ladder/online.h"
#include "ladder_kit.h"

namespace onepass::ladder {
namespace {

double largest(const std::vector<double>& x) {
  double most = 1;
  for (const double value : x) most = std::max(most, std::abs(value));
  return most;
}

TEST(LadderAnswers, AreTheReference) {
  for (const std::int64_t N : {1, 7, 64, 100}) {
    for (const std::int64_t d : {4, 16, 33}) {
      for (const int mask : {0, 1, 2}) {
        Problem p = problem(N, d, 600);
        p.causal = mask == 1;
        if (mask == 2) p.left = 9, p.right = 5;
        const Arrays inputs = make_arrays(p, 1);
        Exact exact;
        ASSERT_TRUE(exact_of(p, inputs, true, exact).ok());
        for (const Rung& rung : rungs()) {
          for (const bool honest : {false, true}) {
            p.honest = honest;
            const Problem q = for_rung(rung, p);
            if (!chosen(rung, q)) continue;
            const double scale = rung.backward() ? std::max({largest(exact.dQ), largest(exact.dK), largest(exact.dV)})
                                                 : largest(exact.O);
            EXPECT_LE(measure(rung, q, inputs, exact).max_abs_err, 4e-6 * scale) << text(rung, q);
            Ledger ledger;
            const Arrays counted = run(rung, p, &ledger), plain = run(rung, p, nullptr);
            for (const Array a : {Array::O, Array::dQ, Array::dK, Array::dV}) {
              ASSERT_EQ(counted[a].size(), plain[a].size());

              EXPECT_EQ(std::memcmp(counted[a].data(), plain[a].data(), counted[a].size() * 4), 0) << rung.name;
            }
          }
        }
      }
    }
  }
}

TEST(LadderAnswers, OfHalfTypesAreRounded) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    Problem p = problem(64, 16, 1024);
    p.dtype = dtype;
    const Arrays inputs = make_arrays(p, 1);
    Exact exact;
    ASSERT_TRUE(exact_of(p, inputs, true, exact).ok());
    for (const Rung& rung : rungs()) {
      // Stored S, P and dS are rounded; 2^-11 and 2^-8 are half a unit of values near 1.
      const double error = measure(rung, for_rung(rung, p), inputs, exact).max_abs_err;
      const double unit = dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
      EXPECT_LE(error, 16 * unit) << rung.name;
      EXPECT_GE(error, unit / 64) << rung.name << ": was anything rounded?";
    }
  }
}

TEST(LadderAnswers, NaiveSoftmaxOverflowsInFloat16) {
  // Every float16 from 10 to 12: exp(x) rounds to infinity from 11.0938, the first above log 65520 = 11.0901.
  int finite = 0, infinite = 0;
  for (std::uint16_t bits = float_to_f16(10.0f); bits <= float_to_f16(12.0f); ++bits) {
    const float score = f16_to_float(bits);
    Problem p = problem(4, 1, 64);
    p.dtype = DType::f16;
    Arrays x = make_arrays(p, 1);
    prepare(kNaive, p, x);
    x[Array::Q].assign(4, 1);
    x[Array::K].assign(4, score);
    x[Array::V].assign(4, 1);
    kNaive.run(p, x, nullptr);
    EXPECT_EQ(std::isfinite(x[Array::O][0]), score < 11.0901f) << score;
    ++(std::isfinite(x[Array::O][0]) ? finite : infinite);
    kStandard.run(p, x, nullptr);
    EXPECT_NEAR(x[Array::O][0], 1, 1e-3) << score;
  }
  EXPECT_GT(finite, 100);
  EXPECT_GT(infinite, 100);
}

TEST(LadderAnswers, OnlineRecurrenceHoldsAtEveryStep) {
  for (const double drift : {0.05, -0.05, 0.0}) {
    std::uint32_t state = 1;
    Online row;
    std::vector<double> seen;
    double top = -INFINITY, other = 0;  // sum of exp(s - m) s: what else is summed follows by the factor
    for (int n = 0; n < 500; ++n) {
      state = state * 1664525u + 1013904223u;
      const float s = n % 50 == 7
                          ? -INFINITY
                          : static_cast<float>(state >> 8) / (1 << 24) * 40 - 20 + n * static_cast<float>(drift);
      const double alpha = row.take(s);
      const double value = std::isfinite(s) ? s : 0;
      other = other * alpha + std::exp(static_cast<double>(s) - static_cast<double>(row.m)) * value;
      seen.push_back(s);
      top = std::max(top, static_cast<double>(s));
      double direct = 0, direct_other = 0, size = 0;
      for (const double x : seen) {
        direct += std::exp(x - top);
        if (std::isfinite(x)) direct_other += std::exp(x - top) * x, size += std::exp(x - top) * std::abs(x);
      }
      ASSERT_EQ(static_cast<double>(row.m), top) << n;
      ASSERT_NEAR(row.l, direct, 1e-5 * direct) << n;
      ASSERT_NEAR(other, direct_other, 1e-5 * size) << n;
    }
  }
  Online none;
  EXPECT_EQ(none.take(-INFINITY), 0);  // nothing seen yet: no NaN
  EXPECT_EQ(none.l, 0);
}

TEST(LadderAnswers, ParallelColumnsGiveTheSameBits) {
  const Problem p = problem(200, 12, 500);
  const Arrays a = run(kBackwardV2, p, nullptr), b = run(kBackwardV2Parallel, p, nullptr);
  for (const Array array : {Array::dQ, Array::dK, Array::dV}) EXPECT_EQ(a[array], b[array]);
}

TEST(LadderAnswers, SplitsOfAnyNumberMerge) {
  Problem p = problem(20, 8, 128);
  p.left = 2, p.right = 0;  // most rows see nothing of most parts
  const Arrays inputs = make_arrays(p, 1);
  Exact exact;
  ASSERT_TRUE(exact_of(p, inputs, false, exact).ok());
  for (const std::int64_t splits : {1, 2, 3, 20, 33}) {  // 33 of 20 keys: parts without a key
    p.splits = splits;
    EXPECT_LE(measure(kSplitKeys, p, inputs, exact).max_abs_err, 4e-6);
    expect_counts(kSplitKeys, p);
  }
}

TEST(LadderAnswers, LoopOrder) {
  // v1 goes by keys and reads Q again for each block; v2 the other way round.
  const Problem p = problem(64, 8, 512);  // Bc 16, Br 8
  const auto rows_of = [&](const Rung& rung, Array array) {
    std::vector<Touch> touches;
    Ledger ledger;
    ledger.touches = &touches;
    run(rung, p, &ledger);
    std::vector<std::int64_t> rows;
    for (const Touch& t : touches) {
      if (t.array == array && !t.write) rows.push_back(t.row);
    }
    return rows;
  };
  EXPECT_EQ(rows_of(kFlashV1, Array::K), (std::vector<std::int64_t>{0, 16, 32, 48}));
  EXPECT_EQ(rows_of(kFlashV1, Array::Q).size(), 4u * 8u);
  EXPECT_EQ(rows_of(kFlashV2, Array::Q), (std::vector<std::int64_t>{0, 8, 16, 24, 32, 40, 48, 56}));
  EXPECT_EQ(rows_of(kFlashV2, Array::K).size(), 4u * 8u);
}

TEST(LadderAnswers, BlocksOfThePaper) {
  // 192 KB of 2-byte numbers at d = 64, the A100's shared memory: Bc = ceil(M / 4d) = 384, Br = 64.
  EXPECT_EQ(paper_blocks(192 * 1024 / 2, 64, 1 << 20).Bc, 384);
  EXPECT_EQ(paper_blocks(192 * 1024 / 2, 64, 1 << 20).Br, 64);
  EXPECT_EQ(paper_blocks(228 * 1024 / 2, 128, 1 << 20).Bc, 228);
  EXPECT_EQ(honest_blocks(10, 64, 100).Br, 0);
  for (const std::int64_t d : {1, 3, 64}) {
    for (std::int64_t M = 1; M < 3000; M += 7) {
      const Blocks b = honest_blocks(M, d, 1 << 20);
      const auto held = [d](std::int64_t Bc) {
        const std::int64_t Br = min_of(Bc, d);
        return 2 * Br * d + 2 * Bc * d + Br * Bc + 2 * Br;
      };
      EXPECT_LE(held(b.Bc), M);
      EXPECT_GT(held(b.Bc + 1), M);
    }
  }
}

TEST(LadderAnswers, RefusesWhatHoldsNoRow) {
  Problem p = problem(64, 64, 258);
  p.honest = true;
  EXPECT_NE(refusal(kFlashV1, for_rung(kFlashV1, p)).find("259"), std::string::npos);
  EXPECT_NE(refusal(kBackwardV1, for_rung(kBackwardV1, p)).find("518"), std::string::npos);
  p.honest = false;
  EXPECT_EQ(refusal(kFlashV1, p), "");
  p.M = 255;
  EXPECT_NE(refusal(kFlashV1, p).find("256"), std::string::npos);
  EXPECT_EQ(refusal(kStandard, p), "");
  for (const Rung& rung : rungs()) {
    EXPECT_NE(refusal(rung, problem(4, 0, 64)), "") << rung.name;
    EXPECT_NE(refusal(rung, problem(-1, 4, 64)), "") << rung.name;
    EXPECT_EQ(refusal(rung, problem(4, 4, 0)).empty(), !rung.tiled) << rung.name;
    EXPECT_EQ(refusal(rung, problem(0, 8, 64)), "") << rung.name;
    Ledger ledger;
    const Arrays x = run(rung, problem(0, 8, 64), &ledger);  // no rows: nothing moves, nothing is computed
    EXPECT_EQ(ledger.moved(), Elements{}) << rung.name;
    EXPECT_EQ(ledger.matmul_flops + ledger.exps, 0) << rung.name;
    EXPECT_TRUE(x[Array::O].empty());
  }
}

}  // namespace
}  // namespace onepass::ladder
