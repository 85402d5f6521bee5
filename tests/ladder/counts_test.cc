// What rungs count is what their formulas say, exactly, and what must fit fits.
#include "ladder_kit.h"

namespace onepass::ladder {
namespace {

TEST(LadderCounts, EqualTheFormulas) {
  for (const Rung& rung : rungs()) {
    for (const std::int64_t N : {1, 2, 16, 48, 64, 97, 100}) {
      for (const std::int64_t d : {1, 8, 16, 24}) {
        for (const std::int64_t M : {96, 256, 1024, 5000}) {
          for (const int mask : {0, 1, 2, 3}) {
            Problem p = for_rung(rung, problem(N, d, M));
            p.causal = mask == 1 || mask == 3;
            if (mask >= 2) p.left = 11, p.right = mask == 2 ? 3 : -1;
            ASSERT_EQ(refusal(rung, p), "") << text(rung, p);
            expect_counts(rung, p);
          }
        }
      }
    }
  }
}

TEST(LadderCounts, TilesThatMustFitDo) {
  for (const Rung& rung : rungs()) {
    for (const std::int64_t N : {1, 40, 160}) {
      for (const std::int64_t d : {1, 4, 16, 40}) {
        // From the least that holds a row of tiles.
        const std::int64_t least = (rung.backward() ? 2 : 1) * (4 * d + 3);
        for (const std::int64_t M : {least, least + 1, 2 * least, std::int64_t{4000}, std::int64_t{20000}}) {
          Problem p = for_rung(rung, problem(N, d, M));
          p.honest = true;
          ASSERT_EQ(refusal(rung, p), "") << text(rung, p);
          expect_counts(rung, p);  // an overrun is an error
          p.M = least - 1;
          EXPECT_EQ(refusal(rung, p).empty(), !rung.tiled) << text(rung, p);
        }
      }
    }
  }
}

TEST(LadderCounts, AnOverrunIsAnError) {
  Problem p = for_rung(kFlashV2, problem(64, 8, 500));
  p.honest = true;
  const Blocks fitting = blocks_of(p);
  EXPECT_EQ(overrun(kFlashV2, p, ledger_of(kFlashV2, p)), "");
  p.Bc = fitting.Bc + 1;  // the largest that fits is the largest
  EXPECT_NE(overrun(kFlashV2, p, ledger_of(kFlashV2, p)), "");
  p.honest = false;  // the papers' tiles may: S, m and l come on top
  EXPECT_EQ(overrun(kFlashV2, p, ledger_of(kFlashV2, p)), "");
}

TEST(LadderCounts, ThePapersTilesFillMAndTheRestComesOnTop) {
  const Problem p = problem(512, 32, 8192);  // Bc = 64, Br = 32
  const Ledger ledger = ledger_of(kFlashV1, p);
  EXPECT_EQ(ledger.tiles_peak, 2 * 64 * 32 + 2 * 32 * 32);  // K, V; Q, O
  EXPECT_LE(ledger.tiles_peak, p.M);
  EXPECT_EQ(ledger.held_peak, ledger.tiles_peak + 32 * 64 + 2 * 32);
}

// The formulas in N, d and M alone, where blocks divide N; the ragged term where they do not.
TEST(LadderCounts, ClosedFormsOfThePapers) {
  for (const std::int64_t d : {8, 16}) {
    for (const std::int64_t Bc : {16, 32}) {
      const std::int64_t M = 4 * d * Bc;
      for (const std::int64_t N : {64, 128, 100}) {
        const std::int64_t Nd = N * d, ragged = N % Bc != 0 ? Bc - N % Bc : 0;  // keys that the last block lacks
        const Problem p = problem(N, d, M);
        // v1: 3Nd + 2N + (4 d / M) (N + ragged) (3Nd + 4N)
        EXPECT_EQ(M * (kFlashV1.totals(p).moved.stored + kFlashV1.totals(p).moved.float32),
                  M * (3 * Nd + 2 * N) + 4 * d * (N + ragged) * (3 * Nd + 4 * N));
        const std::int64_t Br = min_of(Bc, d), short_rows = N % Br != 0 ? Br - N % Br : 0;
        // v2: 2Nd + N + (N + ragged rows) / Br 2Nd
        EXPECT_EQ(Br * (kFlashV2.totals(p).moved.stored + kFlashV2.totals(p).moved.float32),
                  Br * (2 * Nd + N) + (N + short_rows) * 2 * Nd);
      }
    }
  }
}

TEST(LadderCounts, ByTensor) {
  const Problem p = problem(96, 8, 4 * 8 * 16);  // Bc 16, Br 8: Tc 6, Tr 12
  const std::int64_t N = p.N, Nd = N * p.d, Tc = 6, Tr = 12;
  const Ledger one = ledger_of(kFlashV1, p), two = ledger_of(kFlashV2, p);
  EXPECT_EQ(read(one, Array::K), Nd);
  EXPECT_EQ(read(one, Array::V), Nd);
  EXPECT_EQ(read(one, Array::Q), Tc * Nd);
  EXPECT_EQ(read(one, Array::O), Tc * Nd);
  EXPECT_EQ(written(one, Array::O), Nd + Tc * Nd);
  EXPECT_EQ(written(one, Array::m), N + Tc * N);
  EXPECT_EQ(read(two, Array::Q), Nd);
  EXPECT_EQ(read(two, Array::K), Tr * Nd);
  EXPECT_EQ(written(two, Array::O), Nd);
  EXPECT_EQ(written(two, Array::L), N);
  EXPECT_EQ(written(two, Array::m), 0);
  // The standard rungs alone touch S and P.
  for (const Rung& rung : rungs()) {
    const Ledger ledger = ledger_of(rung, p);
    for (const Array a : {Array::S, Array::P, Array::dS, Array::dP}) {
      if (rung.squares) continue;
      EXPECT_EQ(read(ledger, a) + written(ledger, a), 0) << rung.name;
    }
    EXPECT_EQ(rung.squares, read(ledger, Array::P) > 0) << rung.name;
  }
}

TEST(LadderCounts, FastMemoryDoesNotGrowWithN) {
  for (const Rung& rung : rungs()) {
    const Ledger small = ledger_of(rung, problem(64, 8, 512)), large = ledger_of(rung, problem(256, 8, 512));
    if (rung.squares) {
      EXPECT_GT(large.held_peak, small.held_peak) << rung.name;
    } else {
      EXPECT_EQ(large.held_peak, small.held_peak) << rung.name;
    }
  }
}

TEST(LadderCounts, BytesAreOfTheType) {
  Problem p = problem(64, 16, 1024);
  const std::int64_t float32 = ledger_of(kFlashV2, p).moved().bytes(p.dtype);
  p.dtype = DType::f16;
  const Ledger half = ledger_of(kFlashV2, p);
  EXPECT_EQ(2 * half.moved().bytes(DType::f16), float32 + 4 * p.N);  // L stays float32
  EXPECT_EQ(half.moved().float32, p.N);
}

TEST(LadderCounts, WhatEachStepBuys) {
  const Problem p = problem(128, 16, 1024);
  const auto bytes = [&](const Rung& rung) { return ledger_of(rung, p).moved().bytes(p.dtype); };
  EXPECT_LT(bytes(kTwoPass), bytes(kThreePass));
  EXPECT_LT(bytes(kOnePassKeys), bytes(kTwoPassAttention));
  EXPECT_LT(bytes(kFlashV1), bytes(kOnePassTiles));
  EXPECT_LT(bytes(kBackwardV1), bytes(kBackwardStandard));
  EXPECT_LT(bytes(kBackwardV1), bytes(kBackwardV1Statistics));
  EXPECT_LT(bytes(kBackwardV2), bytes(kBackwardV1));
  // One rescaling a tile instead of one a key.
  EXPECT_LT(ledger_of(kOnePassTiles, p).other_flops, ledger_of(kOnePassKeys, p).other_flops);
  EXPECT_LT(ledger_of(kOnePassTiles, p).exps, ledger_of(kOnePassKeys, p).exps);
  // v2: as many matmul FLOPs as v1, fewer others.
  EXPECT_EQ(ledger_of(kFlashV2, p).matmul_flops, ledger_of(kFlashV1, p).matmul_flops);
  EXPECT_LT(ledger_of(kFlashV2, p).other_flops, ledger_of(kFlashV1, p).other_flops);
  EXPECT_LT(ledger_of(kFlashV2, p).exps, ledger_of(kFlashV1, p).exps);
  EXPECT_LT(ledger_of(kBackwardV2, p).other_flops, ledger_of(kBackwardV1, p).other_flops);
}

TEST(LadderCounts, MoreRowsDoNotSaveV1Traffic) {
  // Br beyond d: the same bytes, but S outgrows the quarter of M that a tile has.
  Problem p = problem(256, 16, 2048);  // Bc = 32
  std::int64_t bytes = 0;
  for (const std::int64_t rows : {4, 8, 16, 32, 64, 128}) {
    p.Br = rows;
    const Ledger ledger = ledger_of(kFlashV1, p);
    if (bytes == 0) bytes = ledger.moved().bytes(p.dtype);
    EXPECT_EQ(ledger.moved().bytes(p.dtype), bytes) << rows;
    EXPECT_EQ(blocks_of(p).Br * blocks_of(p).Bc <= p.M / 4, rows <= p.d) << rows;
    EXPECT_EQ(ledger.tiles_peak <= p.M, rows <= 32) << rows;
  }
}

/// Key blocks with a pair that is visible, by looking at every pair.
std::int64_t keys_of_visible_blocks(const Problem& p) {
  const Blocks b = blocks_of(p);
  std::int64_t keys = 0;
  for (std::int64_t i = 0; i < p.N; i += b.Br) {
    for (std::int64_t j = 0; j < p.N; j += b.Bc) {
      bool visible = false;
      for (std::int64_t r = i; r < min_of(i + b.Br, p.N); ++r) {
        for (std::int64_t c = j; c < min_of(j + b.Bc, p.N); ++c) visible = visible || p.sees(r, c);
      }
      if (visible) keys += min_of(b.Bc, p.N - j);
    }
  }
  return keys;
}

TEST(LadderCounts, SkippingLoadsTheVisibleBlocksAlone) {
  for (const std::int64_t N : {1, 17, 64, 100}) {
    for (const std::int64_t M : {64, 256, 1000}) {
      for (const int mask : {0, 1, 2, 3, 4, 5}) {
        Problem p = problem(N, 8, M);
        p.causal = mask % 2 == 1;
        if (mask >= 2) p.left = mask < 4 ? 5 : 0, p.right = mask == 4 ? 0 : mask == 2 ? 30 : -1;
        const Ledger ledger = ledger_of(kFlashV2Skipping, p);
        EXPECT_EQ(read(ledger, Array::K), p.d * keys_of_visible_blocks(p)) << text(kFlashV2Skipping, p);
        EXPECT_EQ(read(ledger, Array::V), read(ledger, Array::K));
      }
    }
  }
  // Half of the blocks, and of the FLOPs, of a causal mask: Tc (Tc + 1) / 2 where Br = Bc.
  Problem p = problem(256, 16, 1024);
  p.causal = true;
  EXPECT_EQ(ledger_of(kFlashV2Skipping, p).matmul_flops * 2 * 16, ledger_of(kFlashV2, p).matmul_flops * (16 + 1));
}

TEST(LadderCounts, OffIsNothing) {
  // The policy that does not count has no state, no constructor and no effect: a view is its address and its shape, a
  // tile its numbers. That the bits do not depend on it: LadderAnswers.AreTheReference.
  struct View {
    float* data;
    std::int64_t cols;
    Array name;
    DType dtype;
  };
  struct Numbers {
    std::int64_t rows, cols;
    std::vector<float> data;
    Kind kind;
  };
  static_assert(std::is_empty_v<Silent> && std::is_trivial_v<Silent>);
  static_assert(sizeof(Slow<Silent>) == sizeof(View) && sizeof(Slow<Counting>) > sizeof(View));
  static_assert(sizeof(Tile<Silent>) == sizeof(Numbers) && sizeof(Tile<Counting>) > sizeof(Numbers));
  constexpr bool nothing_happens = [] {  // what has an effect is no constant
    Silent{}.touch(Array::Q, true, 0, 1, 1);
    Silent{}.matmul(1);
    Silent{}.other(1);
    Silent{}.exp(1);
    Silent{}.hold(1, true);
    return true;
  }();
  EXPECT_TRUE(nothing_happens);
}

}  // namespace
}  // namespace onepass::ladder
