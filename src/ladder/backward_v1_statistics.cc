// Rung 11: what saving m and l buys.
//
// Had the forward not even kept m and l, the backward would find them first: one more pass over the keys for every
// block of query rows, Q read once and K Tr times, another 2 N^2 d of matmul FLOPs and N^2 exponentials. Then rung 10.
// 2N saved numbers spare all that.
#include "ladder/online.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

template <class C>
void statistics(const Problem& p, Arrays& x, C count) {
  const Blocks b = blocks_of(p);
  auto Q = slow(count, Array::Q, x, p, p.d), K = slow(count, Array::K, x, p, p.d);
  auto M = slow(count, Array::m, x, p, 1), L = slow(count, Array::l, x, p, 1);
  Tile<C> q(count, b.Br, p.d, Kind::operand), k(count, b.Bc, p.d, Kind::operand), s(count, b.Br, b.Bc, Kind::scratch);
  Tile<C> m(count, b.Br, 1, Kind::scratch), l(count, b.Br, 1, Kind::scratch);
  for (std::int64_t i = 0; i < p.N; i += b.Br) {
    const std::int64_t rows = min_of(b.Br, p.N - i);
    Q.load(q, rows, i);
    m.fill(-INFINITY);
    l.fill(0);
    for (std::int64_t j = 0; j < p.N; j += b.Bc) {
      const std::int64_t keys = min_of(b.Bc, p.N - j);
      K.load(k, keys, j);
      score_tile(p, count, s, q, k, i, rows, j, keys);
      take_tile<C>(count, s, m, l, nullptr, rows, keys);
    }
    M.store(m, rows, i);
    L.store(l, rows, i);
  }
}

void backward_v1_statistics(const Problem& p, Arrays& x, Ledger* ledger) {
  if (ledger != nullptr) {
    statistics(p, x, Counting{ledger});
  } else {
    statistics(p, x, Silent{});
  }
  kBackwardV1.run(p, x, ledger);
}

}  // namespace

const Rung kBackwardV1Statistics{.number = 11,
                                 .name = "backward_v1_statistics",
                                 .title = "v1 backward, m and l recomputed too",
                                 .file = "src/ladder/backward_v1_statistics.cc",
                                 .formula = "6Nd + 2N + Tr Nd + Tc (5Nd + 2N)",
                                 .forward = &kFlashV1,
                                 .run = backward_v1_statistics,
                                 .totals = [](const Problem& p) {
                                   Totals t = kBackwardV1.totals(p);
                                   const Blocks b = blocks_of(p);
                                   const std::int64_t N = p.N, Nd = N * p.d, Tc = b.Tc(N);
                                   t.moved.stored += Nd + b.Tr(N) * Nd;
                                   t.moved.float32 += 2 * N;
                                   t.matmul_flops += 2 * N * Nd;
                                   t.other_flops += N * (4 * N + Tc);
                                   t.exps += N * (N + Tc);
                                   return t;
                                 }};

}  // namespace onepass::ladder
