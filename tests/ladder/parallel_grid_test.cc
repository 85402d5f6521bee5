// The grid model: list scheduling against a clock that ticks, its bounds, and what the papers say of it.
#include <gtest/gtest.h>

#include <map>

#include "kit/kit.h"
#include "ladder/parallel.h"

namespace onepass::ladder {
namespace {

Grid grid(std::int64_t batch, std::int64_t heads, std::int64_t N, bool causal = false) {
  Grid g;
  g.batch = batch;
  g.heads = heads;
  g.N = N;
  g.causal = causal;
  return g;
}

/// The same schedule by another way: tick by tick, each free slot in turn takes the next block.
std::int64_t ticking(const GridRun& run) {
  std::vector<std::int64_t> left(static_cast<std::size_t>(run.slots), 0);
  std::size_t next = 0;
  std::int64_t clock = 0;
  for (;; ++clock) {
    bool busy = false;
    for (std::int64_t& slot : left) {
      if (slot == 0 && next < run.placed.size()) {
        slot = run.placed[next].end - run.placed[next].start;
        ++next;
      }
      busy = busy || slot > 0;
      slot -= slot > 0;
    }
    if (!busy) return clock;
  }
}

/// Calls f(grid, block, order) over a sweep.
template <class F>
void sweep(F f) {
  for (const std::int64_t heads : {1, 3, 8, 40}) {
    for (const std::int64_t N : {1, 100, 1024, 2500}) {
      for (const std::int64_t Br : {64, 128}) {
        for (const std::int64_t SMs : {1, 7, 108}) {
          for (const std::int64_t per_sm : {1, 2}) {
            for (const bool causal : {false, true}) {
              Grid g = grid(2, heads, N, causal);
              g.Br = Br;
              g.Bc = 64;
              g.SMs = SMs;
              g.blocks_per_sm = per_sm;
              for (const BlockOf block : {BlockOf::head, BlockOf::query_block}) {
                for (const Order order : {Order::plain, Order::longest_first}) f(g, block, order);
              }
            }
          }
        }
      }
    }
  }
}

TEST(ParallelGrid, SchedulesAsAClockWould) {
  sweep([](const Grid& g, BlockOf block, Order order) {
    ASSERT_EQ(refusal(g), "");
    const GridRun run = run_grid(g, block, order);
    ASSERT_EQ(ticking(run), run.makespan) << g.heads << " heads, N " << g.N << ", SMs " << g.SMs;
  });
}

TEST(ParallelGrid, SlotsHoldOneBlockAtATimeAndAllWorkIsDone) {
  sweep([](const Grid& g, BlockOf block, Order order) {
    const GridRun run = run_grid(g, block, order);
    std::int64_t work = 0, longest = 0;
    std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> end_of;  // slots that got a block
    for (const PlacedBlock& b : run.placed) {
      ASSERT_TRUE(0 <= b.sm && b.sm < g.SMs && 0 <= b.slot && b.slot < g.blocks_per_sm);
      ASSERT_LT(b.start, b.end);
      auto& free = end_of[{b.sm, b.slot}];
      ASSERT_EQ(free, b.start);
      free = b.end;
      work += b.end - b.start;
      longest = std::max(longest, b.end - b.start);
    }
    // Every tile with a visible score, head by head.
    std::int64_t tiles = 0;
    for (std::int64_t i = 0; i < g.N; i += g.Br) {
      for (std::int64_t j = 0; j < g.N; j += g.Bc) tiles += !g.causal || j <= std::min(i + g.Br, g.N) - 1;
    }
    ASSERT_EQ(work, run.work);
    ASSERT_EQ(work, g.batch * g.heads * tiles);
    ASSERT_EQ(run.blocks, g.batch * g.heads * (block == BlockOf::head ? 1 : ceil_div(g.N, g.Br)));
    ASSERT_EQ(run.waves, ceil_div(run.blocks, run.slots));
    ASSERT_EQ(run.idle_sms, std::max<std::int64_t>(0, g.SMs - run.blocks));
    std::int64_t first_out = static_cast<std::int64_t>(end_of.size()) < run.slots ? 0 : run.makespan;
    for (const auto& [slot, end] : end_of) first_out = std::min(first_out, end);
    ASSERT_EQ(run.tail, run.makespan - first_out);
    ASSERT_NEAR(run.idle_share, 1 - double(work) / double(run.slots * run.makespan), 1e-12);
    // Graham's bounds of list scheduling.
    ASSERT_GE(run.makespan, std::max(longest, ceil_div(work, run.slots)));
    ASSERT_LE(run.makespan * run.slots, work + (run.slots - 1) * longest);
    ASSERT_LE(run.tail, longest);
    if (block == BlockOf::head || !g.causal) {
      ASSERT_EQ(run.makespan, run.waves * longest);
    }
  });
}

TEST(ParallelGrid, LongestFirstShortensTheCausalTail) {
  for (const std::int64_t heads : {1, 2, 16, 27, 64, 100}) {
    for (const std::int64_t N : {1024, 4096, 8192}) {
      const Grid g = grid(1, heads, N, true);
      const GridRun plain = run_grid(g, BlockOf::query_block, Order::plain);
      const GridRun first = run_grid(g, BlockOf::query_block, Order::longest_first);
      EXPECT_LE(first.makespan, plain.makespan) << heads << " heads, N " << N;
      EXPECT_LE(first.tail, plain.tail) << heads << " heads, N " << N;
    }
  }
  // 16 heads of 4,096: 512 blocks of 1 ... 32 tiles on 108 SMs.
  const Grid g = grid(1, 16, 4096, true);
  const GridRun plain = run_grid(g, BlockOf::query_block, Order::plain);
  const GridRun first = run_grid(g, BlockOf::query_block, Order::longest_first);
  EXPECT_EQ(plain.work, 16 * 32 * 33 / 2);
  EXPECT_LT(first.idle_share, 0.05);
  EXPECT_GT(plain.idle_share, 2 * first.idle_share);
}

TEST(ParallelGrid, FewHeadsLeaveMostProcessorsIdle) {
  // One sequence of 1,024 and 4 heads: v1 has 4 blocks for 108 SMs, v2 32; even v2 leaves 76 of them idle.
  const Grid g = grid(1, 4, 1024);
  const GridRun v1 = run_grid(g, BlockOf::head, Order::plain), v2 = run_grid(g, BlockOf::query_block, Order::plain);
  EXPECT_EQ(v1.idle_sms, 104);
  EXPECT_EQ(v2.idle_sms, 76);
  EXPECT_EQ(v1.makespan, 8 * v2.makespan);
  EXPECT_NEAR(v1.idle_share, 104.0 / 108, 1e-12);
  EXPECT_NEAR(v2.idle_share, 76.0 / 108, 1e-12);
  // Two blocks an SM are two halves of it: 32 blocks, an SM each, fill 32 of 216.
  Grid two = g;
  two.blocks_per_sm = 2;
  const GridRun halves = run_grid(two, BlockOf::query_block, Order::plain);
  EXPECT_EQ(halves.idle_sms, 76);
  EXPECT_NEAR(halves.idle_share, 184.0 / 216, 1e-12);
}

TEST(ParallelGrid, RuleOfThumbAgainstTheModel) {
  const RuleOfThumb r = rule_of_thumb();
  EXPECT_NEAR(r.busy, 80.0 / 108, 1e-12);  // 80 blocks: a quarter idle
  EXPECT_EQ(r.worst_blocks, 109);          // one more than a wave: half idle, so "at least 80" alone does not do
  EXPECT_NEAR(r.worst_busy, 109.0 / 216, 1e-12);
  EXPECT_EQ(r.safe_from, 240);
  EXPECT_EQ(rule_of_thumb(108, 108).safe_from, -1);  // nothing stays at a full wave's share
  EXPECT_EQ(rule_of_thumb(5, 1).safe_from, 5);
  // The closed forms against grids of equal blocks, which is what v1's are.
  for (const std::int64_t slots : {1, 2, 5, 12, 13}) {
    for (std::int64_t blocks = 1; blocks <= 30; ++blocks) {
      if (!kit::chosen(std::to_string(slots) + " " + std::to_string(blocks), 2e6)) continue;
      const RuleOfThumb rule = rule_of_thumb(blocks, slots);
      std::int64_t bad = 0;
      double worst = 1;
      for (std::int64_t n = 400; n >= blocks; --n) {
        Grid g = grid(n, 1, 256);
        g.SMs = slots;
        const double busy = 1 - run_grid(g, BlockOf::head, Order::plain).idle_share;
        worst = std::min(worst, busy);
        if (busy < rule.busy - 1e-9) bad = std::max(bad, n);
        if (n == blocks) {
          EXPECT_NEAR(busy, rule.busy, 1e-12);
        }
        if (n == rule.worst_blocks) {
          EXPECT_NEAR(busy, rule.worst_busy, 1e-12);
        }
      }
      EXPECT_NEAR(worst, rule.worst_busy, 1e-12) << blocks << " blocks, " << slots << " slots";
      if (rule.safe_from < 0) {
        EXPECT_GT(bad, 400 - slots - 1);
      } else {
        EXPECT_EQ(rule.safe_from, std::max(blocks, bad + 1)) << blocks << " blocks, " << slots << " slots";
      }
    }
  }
}

TEST(ParallelGrid, NothingToDo) {
  for (const Grid& g : {grid(0, 4, 64), grid(2, 0, 64), grid(2, 4, 0)}) {
    ASSERT_EQ(refusal(g), "");
    for (const BlockOf block : {BlockOf::head, BlockOf::query_block}) {
      const GridRun run = run_grid(g, block, Order::plain);
      EXPECT_EQ(run.blocks + run.waves + run.work + run.makespan + run.tail, 0);
      EXPECT_EQ(run.idle_sms, 108);
      EXPECT_EQ(run.idle_share, 0);
    }
  }
}

TEST(ParallelGrid, RefusesWhatItCannotRun) {
  const std::int64_t huge = std::int64_t{1} << 62;
  for (std::int64_t Grid::*field :
       {&Grid::batch, &Grid::heads, &Grid::N, &Grid::Br, &Grid::Bc, &Grid::SMs, &Grid::blocks_per_sm}) {
    for (const std::int64_t value : {std::int64_t{-1}, huge}) {
      Grid g = grid(2, 2, 64);
      g.*field = value;
      EXPECT_NE(refusal(g).find("not " + std::to_string(value)), std::string::npos) << refusal(g);
    }
  }
  Grid g = grid(2, 2, 64);
  g.Br = 0;
  EXPECT_NE(refusal(g).find("Br must be 1 "), std::string::npos) << refusal(g);
  EXPECT_NE(refusal(grid(1 << 20, 1 << 20, 64)), "");
  EXPECT_NE(refusal(grid(1 << 10, 1 << 10, 1 << 20)), "");
}

}  // namespace
}  // namespace onepass::ladder
