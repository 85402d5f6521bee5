// Rung 8: split over keys, then merge (Flash-Decoding; Dao, Haziza, Massa, Sizov 2023).
//
// Few query rows leave most processors idle, so the keys are shared out too. Each part gives an O and an L of its own
// keys; parts merge exactly, since exp(L) is the part's share of the row's sum: L = log sum exp(Li), and
// O = sum exp(Li - L) Oi. The parts' results go through slow memory: S (Nd + N) more, written and read.
#include "ladder/online.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

/// v2 over the keys [begin, end), into rows of part n of Oi and Li.
template <class C>
void attend_part(const Problem& p, Arrays& x, C count, std::int64_t n, std::int64_t begin, std::int64_t end) {
  const Blocks b = blocks_of(p);
  auto Q = slow(count, Array::Q, x, p, p.d), K = slow(count, Array::K, x, p, p.d), V = slow(count, Array::V, x, p, p.d);
  auto Oi = slow(count, Array::Oi, x, p, p.d), Li = slow(count, Array::Li, x, p, 1);
  Tile<C> q(count, b.Br, p.d, Kind::operand), o(count, b.Br, p.d, Kind::operand);
  Tile<C> k(count, b.Bc, p.d, Kind::operand), v(count, b.Bc, p.d, Kind::operand);
  Tile<C> s(count, b.Br, b.Bc, Kind::scratch), m(count, b.Br, 1, Kind::scratch), l(count, b.Br, 1, Kind::scratch);
  for (std::int64_t i = 0; i < p.N; i += b.Br) {
    const std::int64_t rows = min_of(b.Br, p.N - i);
    Q.load(q, rows, i);
    o.fill(0);
    m.fill(-INFINITY);
    l.fill(0);
    for (std::int64_t j = begin; j < end; j += b.Bc) {
      const std::int64_t keys = min_of(b.Bc, end - j);
      K.load(k, keys, j);
      V.load(v, keys, j);
      score_tile(p, count, s, q, k, i, rows, j, keys);
      take_tile(count, s, m, l, &o, rows, keys);
      add_product_ab(count, o, s, v, rows, keys);
    }
    finish_rows(count, o, m, l, rows);
    Oi.store(o, rows, n * p.N + i);
    Li.store(l, rows, n * p.N + i);
  }
}

template <class C>
void split_keys(const Problem& p, Arrays& x, C count) {
  for (std::int64_t n = 0; n < p.splits; ++n) {
    attend_part(p, x, count, n, p.N * n / p.splits, p.N * (n + 1) / p.splits);
  }
  auto Oi = slow(count, Array::Oi, x, p, p.d), Li = slow(count, Array::Li, x, p, 1);
  auto O = slow(count, Array::O, x, p, p.d), L = slow(count, Array::L, x, p, 1);
  Tile<C> sum(count, 1, p.d, Kind::operand), part(count, 1, p.d, Kind::operand);
  Tile<C> weight(count, p.splits, 1, Kind::scratch);
  for (std::int64_t i = 0; i < p.N; ++i) {
    Online all;
    for (std::int64_t n = 0; n < p.splits; ++n) all.take(weight[n] = Li.get(n * p.N + i));
    sum.fill(0);
    for (std::int64_t n = 0; n < p.splits; ++n) {
      Oi.load(part, 1, n * p.N + i);
      weight[n] = std::exp(weight[n] - reference(all.m)) / all.l;  // exp(Li - L)
      for (std::int64_t c = 0; c < p.d; ++c) sum[c] += weight[n] * part[c];
    }
    count.exp(3 * p.splits);
    count.other(p.splits * (2 * p.d + 7));
    O.store(sum, 1, i);
    L.put(i, 0, all.m + std::log(all.l));
  }
}

Totals totals(const Problem& p) {
  const Blocks b = blocks_of(p);
  const std::int64_t N = p.N, d = p.d, Nd = N * d, S = p.splits;
  std::int64_t tiles = 0;
  for (std::int64_t n = 0; n < S; ++n) tiles += b.Tc(N * (n + 1) / S - N * n / S);
  const std::int64_t attend = 2 * b.Br * d + 2 * b.Bc * d + b.Br * b.Bc + 2 * b.Br;
  return {{S * Nd + b.Tr(N) * 2 * Nd + Nd, 2 * S * (Nd + N) + N},
          4 * N * Nd,
          N * (4 * N + (tiles + S) * (d + 1) + S * (2 * d + 7)),
          N * (N + tiles + 3 * S),
          N == 0 ? 2 * d + S : max_of(attend, 2 * d + S)};
}

}  // namespace

const Rung kSplitKeys{.number = 8,
                      .name = "split_keys",
                      .title = "v2 split over keys, and a merge (Flash-Decoding)",
                      .file = "src/ladder/split_keys.cc",
                      .formula = "S Nd + Tr 2Nd + 2S (Nd + N) + Nd + N",
                      .run = ONEPASS_RUN_RUNG(split_keys),
                      .totals = totals};

}  // namespace onepass::ladder
