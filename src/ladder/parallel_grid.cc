// Parallel rung: the grid of thread blocks (FlashAttention-2, section 3.2).
//
// v1 gives a thread block a whole head, since its outer loop over keys returns to every row: batch x heads blocks, the
// same length each. With fewer of them than processors the rest stand idle, and long sequences come with small batches.
// v2's rows need nothing of each other, so a block takes Br rows of a head, and there are Tr times as many. Few heads
// and few query blocks still leave most processors idle; then the keys have to be split as well (rung 8). With a
// causal mask the blocks differ in length: if the longest come last, the others wait for them; longest first, they fit.
#include <algorithm>
#include <queue>

#include "ladder/parallel.h"

namespace onepass::ladder {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 22;  // blocks, tiles and slots that a run may have

/// Key tiles that some row of query block i sees.
std::int64_t key_tiles(const Grid& g, std::int64_t i) {
  const std::int64_t keys = g.causal ? min_of((i + 1) * g.Br, g.N) : g.N;
  return ceil_div(keys, g.Bc);
}

std::string out_of_range(const char* what, std::int64_t value, std::int64_t least) {
  if (value >= least && value <= kMost) return "";
  const std::int64_t nearest = value < least ? least : kMost;
  return std::string(what) + " must be " + std::to_string(least) + " ... " + std::to_string(kMost) + ", not " +
         std::to_string(value) + "; the nearest is " + std::to_string(nearest);
}

}  // namespace

std::string refusal(const Grid& g) {
  std::string text;
  const auto ok = [&](const char* what, std::int64_t value, std::int64_t least) {
    text = out_of_range(what, value, least);
    return text.empty();
  };
  // In this order: no product is formed of what is out of range.
  ok("batch", g.batch, 0) && ok("heads", g.heads, 0) && ok("N", g.N, 0) && ok("Br", g.Br, 1) && ok("Bc", g.Bc, 1) &&
      ok("the number of SMs", g.SMs, 1) && ok("blocks per SM", g.blocks_per_sm, 1) &&
      ok("SMs x blocks per SM", g.SMs * g.blocks_per_sm, 1) && ok("batch x heads", g.batch * g.heads, 0) &&
      ok("batch x heads x query blocks", g.batch * g.heads * ceil_div(g.N, g.Br), 0);
  return text;
}

GridRun run_grid(const Grid& g, BlockOf block, Order order) {
  const std::int64_t Tr = ceil_div(g.N, g.Br);
  GridRun run;
  run.slots = g.SMs * g.blocks_per_sm;
  for (std::int64_t head = 0; head < (g.N == 0 ? 0 : g.batch * g.heads); ++head) {
    std::int64_t tiles = 0;
    for (std::int64_t i = 0; i < Tr; ++i) {
      tiles += key_tiles(g, i);
      if (block == BlockOf::query_block) run.placed.push_back({head, i, 0, 0, 0, key_tiles(g, i)});
    }
    if (block == BlockOf::head) run.placed.push_back({head, -1, 0, 0, 0, tiles});
    run.work += tiles;
  }
  run.blocks = static_cast<std::int64_t>(run.placed.size());
  run.waves = ceil_div(run.blocks, run.slots);
  run.idle_sms = max_of<std::int64_t>(0, g.SMs - run.blocks);
  if (run.blocks == 0) return run;
  if (order == Order::longest_first) {
    std::stable_sort(run.placed.begin(), run.placed.end(),
                     [](const PlacedBlock& a, const PlacedBlock& b) { return a.end > b.end; });
  }
  using Free = std::pair<std::int64_t, std::int64_t>;  // when, which slot; slot s belongs to SM s % SMs
  std::priority_queue<Free, std::vector<Free>, std::greater<>> free;
  for (std::int64_t slot = 0; slot < run.slots; ++slot) free.push({0, slot});
  for (PlacedBlock& b : run.placed) {
    const auto [when, slot] = free.top();
    free.pop();
    b.sm = slot % g.SMs;
    b.slot = slot / g.SMs;
    b.start = when;
    b.end += when;
    run.makespan = max_of(run.makespan, b.end);
    free.push({b.end, slot});
  }
  run.tail = run.makespan - free.top().first;
  run.idle_share =
      1 - static_cast<double>(run.work) / (static_cast<double>(run.slots) * static_cast<double>(run.makespan));
  return run;
}

RuleOfThumb rule_of_thumb(std::int64_t blocks, std::int64_t slots) {
  const auto busy = [&](std::int64_t n) {
    return static_cast<double>(n) / static_cast<double>(slots * ceil_div(n, slots));
  };
  // The share falls where a wave begins: least at `blocks` itself or at the first block of the next wave. In wave w, n
  // blocks are as good as `blocks` in c waves if n / w >= blocks / c, and the first of it, (w - 1) slots + 1, is worse
  // while w (c slots - blocks) < c (slots - 1).
  const std::int64_t c = ceil_div(blocks, slots), next = c * slots + 1, lost = c * slots - blocks;
  RuleOfThumb r{blocks, busy(blocks), blocks, busy(blocks), -1};
  if (busy(next) < r.busy) r.worst_blocks = next, r.worst_busy = busy(next);
  if (lost > 0)
    r.safe_from = max_of(blocks, ceil_div(blocks * max_of<std::int64_t>((c * (slots - 1) - 1) / lost, 0), c));
  if (slots == 1) r.safe_from = blocks;
  return r;
}

}  // namespace onepass::ladder
