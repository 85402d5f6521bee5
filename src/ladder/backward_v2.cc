// Rung 12: the backward of FlashAttention v2 (algorithm 2).
//
// D = rowsum(dO O) is found once, before the loops, so O is not read again in them; L = m + log l replaces m and l, and
// P = exp(S - L) needs no division. The outer loop is over blocks of keys, each with its dK and dV in fast memory; dQ
// is read, added to and written for each of them. backward_v2.h has the body of the loops.
#include "ladder/backward_v2.h"

#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

template <class C>
void backward_v2(const Problem& p, Arrays& x, C count) {
  const Blocks b = blocks_of(p);
  row_sums(p, x, count);
  for (std::int64_t j = 0; j < p.N; j += b.Bc) {
    Column<C> column(p, x, count, j);
    for (std::int64_t i = 0; i < p.N; i += b.Br) visit(p, x, count, column, i);
    column.store(p, x, count);
  }
}

}  // namespace

const Rung kBackwardV2{.number = 12,
                       .name = "backward_v2",
                       .title = "v2 backward: D once, L for m and l",
                       .file = "src/ladder/backward_v2.cc",
                       .formula = "7Nd + N + Tc (4Nd + 2N)",
                       .forward = &kFlashV2,
                       .run = ONEPASS_RUN_RUNG(backward_v2),
                       .totals = [](const Problem& p) { return backward_v2_totals(p, 1); }};

}  // namespace onepass::ladder
