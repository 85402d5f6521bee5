// The warps of a block: they compute attention, move what the formulas say, and need every barrier they have.
#include "ladder/parallel_warps.h"

#include <gtest/gtest.h>

#include <string>

#include "kit/kit.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

Problem problem(std::int64_t N, std::int64_t d) {
  Problem p;
  p.N = N;
  p.d = d;
  p.M = 4 * d * 16;
  return p;
}

struct Run {
  Arrays arrays;
  WarpCount count;
};
Run run(const WarpRung& rung, const Problem& p, const WarpBlock& block, std::int64_t left_out = 0) {
  Run r{make_arrays(p, 1), {}};
  prepare_warps(rung, p, r.arrays);
  for (const Array a : {Array::O, Array::dQ, Array::dK, Array::dV}) {
    if (rung.backward != (a == Array::O)) r.arrays[a].assign(r.arrays[a].size(), NAN);
  }
  rung.run(p, block, r.arrays, r.count, left_out);
  return r;
}

/// Calls f(problem, block) over a sweep; blocks need not divide N.
template <class F>
void sweep(F f) {
  for (const std::int64_t W : {1, 2, 4, 8}) {
    for (const Blocks blocks : {Blocks{8, 8}, {16, 8}, {8, 32}}) {
      for (const std::int64_t N : {0, 1, 16, 32, 50}) {
        for (const std::int64_t d : {1, 4, 12}) f(problem(N, d), WarpBlock{W, blocks});
      }
    }
  }
}

TEST(ParallelWarps, CountsEqualTheFormulas) {
  for (const WarpRung& rung : warp_rungs()) {
    sweep([&](const Problem& p, const WarpBlock& block) {
      ASSERT_EQ(refusal(p, block), "");
      const WarpCount count = run(rung, p, block).count, formula = rung.formula(p, block);
      for (int a = 0; a < kArrays; ++a) {
        ASSERT_EQ(count.ledger.read[a], formula.ledger.read[a]) << rung.name << " reads " << kArrayNames[a];
        ASSERT_EQ(count.ledger.written[a], formula.ledger.written[a]) << rung.name << " writes " << kArrayNames[a];
      }
      ASSERT_EQ(count.barriers, formula.barriers) << rung.name << " N " << p.N;
      ASSERT_EQ(count.races, 0) << rung.name << " N " << p.N << " W " << block.warps;
      // Splitting the work neither repeats nor skips a product: 2 forward and 5 backward, of 2 N^2 d FLOPs.
      ASSERT_EQ(count.ledger.matmul_flops, (rung.backward ? 10 : 4) * p.N * p.N * p.d) << rung.name;
    });
  }
}

TEST(ParallelWarps, TextsAreTheFormulas) {
  struct Text {
    const char *reads, *writes, *barriers;
    std::int64_t read, written, waits;
  };
  sweep([](const Problem& p, const WarpBlock& block) {
    if (p.N == 0) return;
    const std::int64_t N = p.N, Nd = p.N * p.d, W = block.warps, Tr = block.blocks.Tr(N), Tc = block.blocks.Tc(N);
    const Text texts[] = {
        {"2Nd + Tc (2W - 1) Nd + Tc (W^2 - 1) N", "Tc (W - 1) Nd + Tc (2W - 1) N", "2 Tr Tc",
         2 * Nd + Tc * (2 * W - 1) * Nd + Tc * (W * W - 1) * N, Tc * (W - 1) * Nd + Tc * (2 * W - 1) * N, 2 * Tr * Tc},
        {"Nd + Tr 2W Nd", "0", "0", Nd + Tr * 2 * W * Nd, 0, 0},
        {"2Nd + Tc (5W - 1) Nd + Tc 2W N", "Tc (W - 1) Nd", "2 Tr Tc - 1",
         2 * Nd + Tc * (5 * W - 1) * Nd + Tc * 2 * W * N, Tc * (W - 1) * Nd, 2 * Tr * Tc - 1},
        {"Tc 2 (W + 1) Nd + Tr 3W Nd + 2 Tc N + 2N^2", "2N^2", "Tc (2 Tr - 1)",
         Tc * 2 * (W + 1) * Nd + Tr * 3 * W * Nd + 2 * Tc * N + 2 * N * N, 2 * N * N, Tc * (2 * Tr - 1)}};
    const auto rungs = warp_rungs();
    ASSERT_EQ(rungs.size(), std::size(texts));
    for (std::size_t k = 0; k < rungs.size(); ++k) {
      ASSERT_STREQ(rungs[k].reads, texts[k].reads);
      ASSERT_STREQ(rungs[k].writes, texts[k].writes);
      ASSERT_STREQ(rungs[k].barriers, texts[k].barriers);
      const WarpCount formula = rungs[k].formula(p, block);
      ASSERT_EQ(formula.read(), texts[k].read) << rungs[k].name;
      ASSERT_EQ(formula.written(), texts[k].written) << rungs[k].name;
      ASSERT_EQ(formula.barriers, texts[k].waits) << rungs[k].name;
    }
  });
}

void expect_near(const std::vector<float>& got, const std::vector<float>& plain, const char* what) {
  double worst = 0, largest = 1;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    const double error = std::abs(double{got[i]} - plain[i]);
    worst = error <= worst ? worst : error;  // NaN counts
    largest = std::max(largest, std::abs(double{plain[i]}));
  }
  EXPECT_LE(worst, 4e-6 * largest) << what;
}

TEST(ParallelWarps, ComputeWhatTheStandardRungsDo) {
  for (const int mask : {0, 1, 2}) {
    sweep([&](Problem p, const WarpBlock& block) {
      p.causal = mask == 1;
      if (mask == 2) p.left = 9, p.right = 5;
      const std::string name = std::to_string(p.N) + " " + std::to_string(p.d) + " " + std::to_string(mask);
      if (!kit::chosen(name + " " + std::to_string(block.warps), static_cast<double>(500 * p.N * p.N))) return;
      Arrays plain = make_arrays(p, 1);
      prepare(kBackwardV2, p, plain);  // L
      prepare(kBackwardStandard, p, plain);
      kStandard.run(p, plain, nullptr);
      kBackwardStandard.run(p, plain, nullptr);
      for (const WarpRung& rung : warp_rungs()) {
        const Arrays got = run(rung, p, block).arrays;
        if (rung.backward) {
          for (const Array a : {Array::dQ, Array::dK, Array::dV}) expect_near(got[a], plain[a], rung.name);
        } else {
          expect_near(got[Array::O], plain[Array::O], rung.name);
        }
      }
      // m and l of split-K and L of split-Q are the statistics of v1 and v2.
      const Arrays k = run(warp_rungs()[0], p, block).arrays, q = run(warp_rungs()[1], p, block).arrays;
      std::vector<float> joined(k[Array::m]);
      for (std::size_t i = 0; i < joined.size(); ++i) joined[i] += std::log(k[Array::l][i]);
      expect_near(joined, plain[Array::L], "m + log l");
      expect_near(q[Array::L], plain[Array::L], "L");
    });
  }
}

TEST(ParallelWarps, EveryBarrierIsNeeded) {
  for (const WarpRung& rung : warp_rungs()) {
    for (const std::int64_t W : {2, 4, 8}) {
      const Problem p = problem(48, 4);
      const WarpBlock block{W, {16, 16}};
      const std::int64_t barriers = run(rung, p, block).count.barriers;
      for (std::int64_t n = 1; n <= barriers; ++n) {
        const WarpCount without = run(rung, p, block, n).count;
        EXPECT_EQ(without.barriers, barriers) << rung.name;
        EXPECT_GT(without.races, 0) << rung.name << ": barrier " << n << " of " << barriers << " protects nothing";
      }
    }
    EXPECT_EQ(run(rung, problem(48, 4), {1, {16, 16}}, 1).count.races, 0) << rung.name;  // one warp has no other
  }
}

TEST(ParallelWarps, RacesAreAccessesWithoutABarrierBetween) {
  struct Access {
    bool writes;
    std::int64_t warp;
  };
  const auto races = [](const std::vector<Access>& accesses, bool waits) {
    WarpCount count;
    WarpGroup group(32, count, 0);
    Shared cells(group, Array::S, 1, 1);
    Registers tile(group.counting(), 1, 1);
    for (const Access& a : accesses) {
      a.writes ? cells.store(a.warp, tile, {0, 1}, 0) : cells.load(a.warp, tile, {0, 1});
      if (waits) group.barrier();
    }
    return count.races;
  };
  const Access r0{false, 0}, r1{false, 1}, r31{false, 31}, w0{true, 0}, w1{true, 1};
  for (const auto& [accesses, expected] : std::vector<std::pair<std::vector<Access>, std::int64_t>>{
           {{w0, r1}, 1},          // read what another has just written
           {{w0, w1}, 1},          // written twice
           {{r0, w1}, 1},          // written while another may still read
           {{r1, r0, w0}, 1},      // the same, the writer having read as well
           {{r31, r0, w0}, 1},     // the last warp
           {{r0, r1, r31}, 0},     // any number may read
           {{w0, r0, w0, r0}, 0},  // a warp's own element
           {{w0, r0, r1, r31}, 2}}) {
    EXPECT_EQ(races(accesses, false), expected);
    EXPECT_EQ(races(accesses, true), 0);
  }
  WarpCount count;  // readers before a barrier are forgotten after it
  WarpGroup group(2, count, 0);
  Shared cells(group, Array::S, 1, 1);
  Registers tile(group.counting(), 1, 1);
  cells.load(1, tile, {0, 1});
  group.barrier();
  cells.load(0, tile, {0, 1});
  cells.store(0, tile, {0, 1}, 0);
  EXPECT_EQ(count.races, 0);
}

TEST(ParallelWarps, SplitQSavesTrafficAndSynchronisation) {
  const auto rungs = warp_rungs();
  for (const std::int64_t d : {64, 128}) {
    const Problem p = problem(1024, d);
    for (const std::int64_t W : {4, 8}) {
      const WarpBlock block{W, {64, 64}};
      const WarpCount k = rungs[0].formula(p, block), q = rungs[1].formula(p, block);
      EXPECT_EQ(q.barriers + q.written(), 0);
      EXPECT_EQ(k.barriers, 2 * 16 * 16);
      EXPECT_LT(q.read(), k.read() + k.written());
      EXPECT_LT(q.bytes(), 0.6 * static_cast<double>(k.bytes())) << W << " warps";
      // Backward: it waits as often; the traffic is less, and with more warps more so.
      const WarpCount bk = rungs[2].formula(p, block), bq = rungs[3].formula(p, block);
      EXPECT_LE(bk.barriers - bq.barriers, 16);
      EXPECT_LT(bq.bytes(), bk.bytes()) << W << " warps, d " << d;
    }
    const auto gain = [&](std::int64_t W, int k) {
      const WarpBlock block{W, {64, 64}};
      return static_cast<double>(rungs[k].formula(p, block).bytes()) / rungs[k + 1].formula(p, block).bytes();
    };
    EXPECT_GT(gain(8, 0), gain(4, 0));
    EXPECT_GT(gain(8, 2), gain(4, 2));
  }
}

TEST(ParallelWarps, BytesWeighSumsTwice) {
  WarpCount count;
  count.ledger.read[static_cast<int>(Array::K)] = 10;
  count.ledger.written[static_cast<int>(Array::dS)] = 3;
  count.ledger.written[static_cast<int>(Array::O)] = 5;
  count.ledger.read[static_cast<int>(Array::dQ)] = 7;
  EXPECT_EQ(count.bytes(), 2 * 13 + 4 * 12);
}

TEST(ParallelWarps, RefusesWhatCannotBeShared) {
  const Problem p = problem(64, 8);
  const auto refused = [&](std::int64_t W, std::int64_t Br, std::int64_t Bc) {
    return refusal(p, WarpBlock{W, {Br, Bc}});
  };
  EXPECT_EQ(refused(32, 32, 4096), "");
  EXPECT_NE(refused(0, 64, 64).find("not 0; the nearest is 1"), std::string::npos);
  EXPECT_NE(refused(33, 64, 64).find("not 33; the nearest is 32"), std::string::npos);
  EXPECT_NE(refused(4, 62, 64).find("Br must be a multiple of the 4 warps"), std::string::npos);
  EXPECT_NE(refused(4, 64, 61).find("Bc must be a multiple of the 4 warps"), std::string::npos);
  EXPECT_NE(refused(4, 64, 61).find("the nearest is 60"), std::string::npos) << refused(4, 64, 61);
  EXPECT_NE(refused(4, 64, 63).find("the nearest is 64"), std::string::npos) << refused(4, 64, 63);
  EXPECT_NE(refused(4, 0, 64).find("the nearest is 4"), std::string::npos) << refused(4, 0, 64);
  EXPECT_NE(refused(3, std::int64_t{1} << 62, 64).find("the nearest is 4095"), std::string::npos);
  EXPECT_NE(refused(4, -8, 64), "");
  EXPECT_NE(refusal(problem(-1, 8), {}), "");
  EXPECT_NE(refusal(problem(4, 0), {}), "");
}

}  // namespace
}  // namespace onepass::ladder
