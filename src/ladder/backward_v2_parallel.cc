// Rung 13: v2's backward, parallel over blocks of keys.
//
// Blocks of keys own their dK and dV and can run at the same time; only dQ is shared. Atomic additions to it would come
// in another order in every run, and sums of floats depend on their order. Here a worker waits until it is its turn at
// a block of dQ, which goes from key block to key block in their order. So the sums, and every bit, are those of the
// sequential loop. The workers are simulated: the youngest moves first, as the scheduler that is worst for the order.
#include <memory>

#include "ladder/backward_v2.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

constexpr std::int64_t kWorkers = 4;

template <class C>
struct Worker {
  std::unique_ptr<Column<C>> column;
  std::int64_t number, i = 0;
};

template <class C>
void backward_v2_parallel(const Problem& p, Arrays& x, C count) {
  const Blocks b = blocks_of(p);
  row_sums(p, x, count);
  std::vector<std::int64_t> turn(static_cast<std::size_t>(b.Tr(p.N)), 0);  // whose turn it is at each block of dQ
  std::vector<Worker<C>> workers;
  std::int64_t next = 0;
  while (next < b.Tc(p.N) || !workers.empty()) {
    while (next < b.Tc(p.N) && static_cast<std::int64_t>(workers.size()) < kWorkers) {
      workers.push_back({std::make_unique<Column<C>>(p, x, count, next * b.Bc), next});
      ++next;
    }
    for (auto w = workers.rbegin(); w != workers.rend(); ++w) {  // a step of each that may
      std::int64_t& whose = turn[static_cast<std::size_t>(w->i / b.Br)];
      if (whose != w->number) continue;
      visit(p, x, count, *w->column, w->i);
      w->i += b.Br;
      ++whose;
    }
    std::erase_if(workers, [&](const Worker<C>& w) {
      if (w.i >= p.N) w.column->store(p, x, count);
      return w.i >= p.N;
    });
  }
}

}  // namespace

const Rung kBackwardV2Parallel{.number = 13,
                               .name = "backward_v2_parallel",
                               .title = "v2 backward, four columns at once, dQ in a fixed order",
                               .file = "src/ladder/backward_v2_parallel.cc",
                               .formula = "7Nd + N + Tc (4Nd + 2N)",
                               .forward = &kFlashV2,
                               .processors = kWorkers,
                               .run = ONEPASS_RUN_RUNG(backward_v2_parallel),
                               .totals = [](const Problem& p) { return backward_v2_totals(p, kWorkers); }};

}  // namespace onepass::ladder
