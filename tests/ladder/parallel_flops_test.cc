// The weighted FLOPs are those the rungs counted, and v2's saving is the one its paper names.
#include <gtest/gtest.h>

#include "ladder/parallel.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

Problem problem(std::int64_t N, std::int64_t d, std::int64_t Bc) {
  Problem p;
  p.N = N;
  p.d = d;
  p.M = 4 * d * Bc;
  return p;
}

TEST(ParallelFlops, WeighsWhatTheRungsCounted) {
  EXPECT_EQ(kOtherWeight, 16);
  const Problem p = problem(96, 16, 32);
  const auto weighed = weigh_rungs(p);
  ASSERT_EQ(weighed.size(), 4u);
  const Rung* expected[] = {&kFlashV1, &kFlashV2, &kBackwardV1, &kBackwardV2};
  for (std::size_t k = 0; k < 4; ++k) {
    const WeighedFlops& w = weighed[k];
    EXPECT_STREQ(w.rung, expected[k]->name);
    EXPECT_EQ(w.backward, k >= 2);
    EXPECT_EQ(w.matmul_flops, (k < 2 ? 4 : 10) * 96 * 96 * 16) << w.rung;  // 2 and 5 products of 2 N^2 d
    EXPECT_GE(w.exps, 96 * 96) << w.rung;
    const double others = 16.0 * static_cast<double>(w.other_flops + w.exps);
    EXPECT_DOUBLE_EQ(w.weighted, static_cast<double>(w.matmul_flops) + others) << w.rung;
    EXPECT_DOUBLE_EQ(w.other_share, others / w.weighted) << w.rung;
  }
}

TEST(ParallelFlops, V2SavesThreeRescalingsARowAndKeyBlock) {
  for (const std::int64_t d : {16, 64}) {
    for (const std::int64_t Bc : {16, 32, 64}) {
      const std::int64_t N = 128, Tc = N / Bc;
      const auto w = weigh_rungs(problem(N, d, Bc));
      // v1: 4d a row and key block; v2: d, and d once a row. What else differs does not grow with d.
      const std::int64_t saved = w[0].other_flops - w[1].other_flops, rescalings = 3 * d * N * Tc - d * N;
      EXPECT_NEAR(static_cast<double>(saved), static_cast<double>(rescalings), static_cast<double>(8 * N * (Tc + 1)));
      EXPECT_EQ(w[0].exps - w[1].exps, N * Tc);  // two factors a row and key block, and one
      EXPECT_LT(w[1].weighted, w[0].weighted);
      EXPECT_LT(w[1].other_share, w[0].other_share);
      EXPECT_LT(w[3].weighted, w[2].weighted);  // D once, no division by l
    }
  }
}

TEST(ParallelFlops, SmallerKeyBlocksGainMore) {
  double last = 2;
  for (const std::int64_t Bc : {16, 32, 64, 128}) {
    const auto w = weigh_rungs(problem(128, 64, Bc));
    const double ratio = w[0].weighted / w[1].weighted;
    EXPECT_GT(ratio, 1);
    EXPECT_LT(ratio, last) << Bc;
    last = ratio;
  }
}

TEST(ParallelFlops, NothingToWeigh) {
  for (const WeighedFlops& w : weigh_rungs(problem(0, 8, 16))) {
    EXPECT_EQ(w.weighted, 0) << w.rung;
    EXPECT_EQ(w.other_share, 0) << w.rung;
  }
}

}  // namespace
}  // namespace onepass::ladder
