// Every rung gives the reference's answer, moves exactly what its formula says, and holds no more than it may.
#include "ladder/rungs.h"

#include <gtest/gtest.h>

#include <cstring>

#include "oracle/oracle.h"

namespace onepass::ladder {
namespace {

Problem problem(std::int64_t N, std::int64_t d, std::int64_t M) {
  Problem p;
  p.N = N;
  p.d = d;
  p.M = M;
  return p;
}

/// Runs a rung from fresh arrays.
Arrays run(const Rung& rung, Problem p, Ledger* ledger, std::uint64_t seed = 1) {
  p = for_rung(rung, p);
  Arrays x = make_arrays(p, seed);
  prepare(rung, p, x);
  for (const Array a : {Array::S, Array::dP, Array::dS, Array::dQ, Array::dK, Array::dV}) x[a].assign(x[a].size(), NAN);
  if (!rung.backward) x[Array::P].assign(x[Array::P].size(), NAN);
  rung.run(p, x, ledger);
  return x;
}

TEST(Ladder, CountsEqualTheFormulas) {
  for (const Rung& rung : rungs()) {
    for (const std::int64_t N : {1, 16, 48, 64, 96, 100}) {
      for (const std::int64_t d : {1, 8, 16, 24}) {
        for (const std::int64_t M : {64, 256, 1024, 5000}) {
          for (const bool causal : {false, true}) {
            Problem p = for_rung(rung, problem(N, d, M));
            p.causal = causal;
            ASSERT_EQ(refusal(rung, p), "");
            Ledger ledger;
            run(rung, p, &ledger);
            EXPECT_EQ(ledger.moved(), rung.elements(p)) << rung.name << " N " << N << " d " << d << " M " << M;
            EXPECT_EQ(ledger.held, 0) << rung.name;
            EXPECT_EQ(ledger.tiles, 0) << rung.name;
          }
        }
      }
    }
  }
}

/// float64 O, lse and gradients.
struct Exact {
  std::vector<double> o, dq, dk, dv;
};
Exact reference_of(const Problem& p, Arrays& x) {
  const std::size_t n = static_cast<std::size_t>(p.N * p.d);
  Exact e{std::vector<double>(n), std::vector<double>(n), std::vector<double>(n), std::vector<double>(n)};
  onepass::Problem q;
  q.batch = q.heads_q = q.heads_kv = 1;
  q.seq_q = q.seq_k = q.total_q = q.total_k = p.N;
  q.head_dim = q.head_dim_v = p.d;
  q.mask.causal = p.causal;
  q.mask.window_left = p.left;
  q.mask.window_right = p.right;
  q.score.scale = 1 / std::sqrt(static_cast<double>(p.d));
  const auto in = [&](Array a) { return Tensor{x[a].data(), DType::f32, p.N * p.d, p.d, p.d}; };
  const auto out = [&](std::vector<double>& v) { return Tensor{v.data(), DType::f64, p.N * p.d, p.d, p.d}; };
  EXPECT_TRUE(oracle::forward(q, {in(Array::Q), in(Array::K), in(Array::V), out(e.o), {}}).ok());
  q.pass = Pass::backward;
  BackwardOperands b{};
  b.q = in(Array::Q);
  b.k = in(Array::K);
  b.v = in(Array::V);
  b.out = out(e.o);
  b.grad_out = in(Array::dO);
  std::vector<float> lse(static_cast<std::size_t>(p.N));
  b.lse = {lse.data(), p.N, p.N};
  b.grad_q = out(e.dq);
  b.grad_k = out(e.dk);
  b.grad_v = out(e.dv);
  EXPECT_TRUE(oracle::backward(q, b).ok());
  return e;
}

void expect_near(const std::vector<float>& got, const std::vector<double>& exact, const char* what) {
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double error = std::abs(got[i] - exact[i]);
    worst = error <= worst ? worst : error;  // NaN counts
    largest = std::max(largest, std::abs(exact[i]));
  }
  EXPECT_LE(worst, 4e-6 * std::max(largest, 1.0)) << what;
}

TEST(Ladder, EveryRungIsTheReference) {
  for (const std::int64_t N : {1, 7, 64, 100}) {
    for (const std::int64_t d : {4, 16, 33}) {
      for (const int mask : {0, 1, 2}) {
        Problem p = problem(N, d, 600);
        p.causal = mask == 1;
        if (mask == 2) p.left = 9, p.right = 5;
        Arrays inputs = make_arrays(p, 1);
        const Exact exact = reference_of(p, inputs);
        for (const Rung& rung : rungs()) {
          for (const bool honest : {false, true}) {
            p.honest = honest;
            Ledger ledger;
            const Arrays counted = run(rung, p, &ledger), plain = run(rung, p, nullptr);
            if (rung.backward) {
              expect_near(counted[Array::dQ], exact.dq, rung.name);
              expect_near(counted[Array::dK], exact.dk, rung.name);
              expect_near(counted[Array::dV], exact.dv, rung.name);
            } else {
              expect_near(counted[Array::O], exact.o, rung.name);
            }
            for (const Array a : {Array::O, Array::dQ, Array::dK, Array::dV}) {
              EXPECT_EQ(std::memcmp(counted[a].data(), plain[a].data(), counted[a].size() * 4), 0) << rung.name;
            }
          }
        }
      }
    }
  }
}

TEST(Ladder, HonestTilesFit) {
  for (const Rung& rung : rungs()) {
    if (!rung.tiled || std::string(rung.name) == "one_pass_tiles") continue;
    for (const std::int64_t d : {4, 16, 40}) {
      for (const std::int64_t M : {400, 1000, 4000, 20000}) {
        Problem p = for_rung(rung, problem(160, d, M));
        p.honest = true;
        if (!refusal(rung, p).empty()) continue;
        Ledger ledger;
        run(rung, p, &ledger);
        // Four columns at once are four processors, each with an M of its own.
        const std::int64_t processors = std::string(rung.name) == "backward_v2_parallel" ? 4 : 1;
        EXPECT_LE(ledger.held_peak, processors * M) << rung.name << " d " << d;
      }
    }
  }
}

TEST(Ladder, FastMemoryDoesNotGrowWithN) {
  for (const Rung& rung : rungs()) {
    const std::string name = rung.name;
    const bool grows = !rung.tiled && name != "two_pass_attention" && name != "one_pass_keys";
    std::int64_t peak[2];
    for (int k = 0; k < 2; ++k) {
      Ledger ledger;
      run(rung, problem(k == 0 ? 64 : 128, 8, 512), &ledger);
      peak[k] = ledger.held_peak;
    }
    if (grows) {
      EXPECT_GT(peak[1], peak[0]) << name;
    } else {
      EXPECT_EQ(peak[1], peak[0]) << name;
    }
  }
}

TEST(Ladder, NaiveSoftmaxOverflowsInFloat16) {
  // exp(x) passes float16's largest number, 65504, at x = 11.09.
  for (const float score : {11.0f, 11.2f}) {
    Problem p = problem(4, 1, 64);
    p.dtype = DType::f16;
    Arrays x = make_arrays(p, 1);
    x[Array::Q].assign(4, 1);
    x[Array::K].assign(4, score);
    x[Array::V].assign(4, 1);
    kNaive.run(p, x, nullptr);
    EXPECT_EQ(std::isfinite(x[Array::O][0]), score < 11.09f) << score;
    kStandard.run(p, x, nullptr);
    EXPECT_NEAR(x[Array::O][0], 1, 1e-3);
  }
}

TEST(Ladder, OnlineRecurrenceHoldsAtEveryStep) {
  std::uint32_t state = 1;
  double m = -INFINITY, l = 0, direct_max = -INFINITY;
  std::vector<double> seen;
  for (int n = 0; n < 500; ++n) {
    state = state * 1664525u + 1013904223u;
    const double s = static_cast<double>(state >> 8) / (1 << 24) * 40 - 20 + n * 0.05;
    const double m_new = std::max(m, s);
    l = l * std::exp(m - m_new) + std::exp(s - m_new);
    m = m_new;
    seen.push_back(s);
    direct_max = std::max(direct_max, s);
    double direct = 0;
    for (const double x : seen) direct += std::exp(x - direct_max);
    ASSERT_EQ(m, direct_max);
    ASSERT_NEAR(l, direct, 1e-12 * direct);
  }
}

TEST(Ladder, OneRescalingATileInsteadOfAKey) {
  Ledger keys, tiles;
  const Problem p = problem(64, 16, 1024);
  run(kOnePassKeys, p, &keys);
  run(kOnePassTiles, p, &tiles);
  EXPECT_EQ(keys.moved(), tiles.moved());
  EXPECT_LT(tiles.other_flops, keys.other_flops);
  EXPECT_LT(tiles.exps, keys.exps);
}

TEST(Ladder, ParallelColumnsGiveTheSameBits) {
  const Problem p = problem(200, 12, 500);
  const Arrays a = run(kBackwardV2, p, nullptr), b = run(kBackwardV2Parallel, p, nullptr);
  for (const Array array : {Array::dQ, Array::dK, Array::dV}) EXPECT_EQ(a[array], b[array]);
}

TEST(Ladder, BlocksOfThePaper) {
  // 192 KB of 2-byte numbers at d = 64, the A100's shared memory: Bc = ceil(M / 4d) = 384, Br = 64.
  const Blocks b = paper_blocks(192 * 1024 / 2, 64, 1 << 20);
  EXPECT_EQ(b.Bc, 384);
  EXPECT_EQ(b.Br, 64);
  EXPECT_EQ(honest_blocks(10, 64, 100).Br, 0);
}

TEST(Ladder, RefusesWhatHoldsNoRow) {
  Problem p = problem(64, 64, 100);
  p.honest = true;
  EXPECT_NE(refusal(kFlashV1, for_rung(kFlashV1, p)).find("259"), std::string::npos) << refusal(kFlashV1, p);
  EXPECT_EQ(refusal(kStandard, p), "");
  EXPECT_NE(refusal(kStandard, problem(4, 0, 64)), "");
  EXPECT_NE(refusal(kFlashV2, problem(4, 4, 0)), "");
  for (const Rung& rung : rungs()) {
    Ledger ledger;
    run(rung, problem(0, 8, 64), &ledger);
    EXPECT_EQ(ledger.moved(), 0) << rung.name;
  }
}

}  // namespace
}  // namespace onepass::ladder
