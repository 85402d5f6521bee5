// Rung 4: from two passes to one.
//
// The second pass of rung 3 exists only because O = sum exp(s - m) / l v needs the final m and l. But the sum without
// the division, o = sum exp(s_i - m) v_i, obeys the same recurrence as l: when the maximum grows from m to m',
//   o' = o exp(m - m') + exp(s - m') v.
// Start both at 0, divide at the end, O = o / l, and K and V are read in the same pass: FlashAttention, for one row.
// Its fast memory is a few rows of d numbers, whatever N is. Keys in tiles of Bc cost one rescaling a tile instead of
// one a key.
#include "ladder/online.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

template <class C>
void one_pass_keys(const Problem& p, Arrays& x, C count) {
  auto Q = slow(count, Array::Q, x, p, p.d), K = slow(count, Array::K, x, p, p.d);
  auto V = slow(count, Array::V, x, p, p.d), O = slow(count, Array::O, x, p, p.d);
  Tile<C> q(count, 1, p.d, Kind::operand), k(count, 1, p.d, Kind::operand), v(count, 1, p.d, Kind::operand);
  Tile<C> o(count, 1, p.d, Kind::operand), s(count, 1, 1, Kind::scratch), statistics(count, 1, 2, Kind::scratch);
  for (std::int64_t i = 0; i < p.N; ++i) {
    Q.load(q, 1, i);
    o.fill(0);
    Online row;
    for (std::int64_t j = 0; j < p.N; ++j) {
      K.load(k, 1, j);
      V.load(v, 1, j);
      score_tile(p, count, s, q, k, i, 1, j, 1);
      const float alpha = row.take(s[0]);                    // exp(m - m')
      for (std::int64_t c = 0; c < p.d; ++c) o[c] *= alpha;  // o exp(m - m') ...
      s[0] = std::exp(s[0] - reference(row.m));              // ... + exp(s - m') v
      add_product_ab(count, o, s, v, 1, 1);
    }
    for (std::int64_t c = 0; c < p.d; ++c) o[c] /= row.l;
    count.exp(2 * p.N);
    count.other(p.N * (5 + p.d) + p.d);
    O.store(o, 1, i);
  }
}

template <class C>
void one_pass_tiles(const Problem& p, Arrays& x, C count) {
  const std::int64_t Bc = blocks_of(p).Bc;
  auto Q = slow(count, Array::Q, x, p, p.d), K = slow(count, Array::K, x, p, p.d);
  auto V = slow(count, Array::V, x, p, p.d), O = slow(count, Array::O, x, p, p.d);
  Tile<C> q(count, 1, p.d, Kind::operand), o(count, 1, p.d, Kind::operand);
  Tile<C> k(count, Bc, p.d, Kind::operand), v(count, Bc, p.d, Kind::operand);
  Tile<C> s(count, 1, Bc, Kind::scratch), m(count, 1, 1, Kind::scratch), l(count, 1, 1, Kind::scratch);
  for (std::int64_t i = 0; i < p.N; ++i) {
    Q.load(q, 1, i);
    o.fill(0);
    m.fill(-INFINITY);
    l.fill(0);
    for (std::int64_t j = 0; j < p.N; j += Bc) {
      const std::int64_t keys = min_of(Bc, p.N - j);
      K.load(k, keys, j);
      V.load(v, keys, j);
      score_tile(p, count, s, q, k, i, 1, j, keys);
      take_tile(count, s, m, l, &o, 1, keys);
      add_product_ab(count, o, s, v, 1, keys);
    }
    finish_rows(count, o, m, l, 1);
    O.store(o, 1, i);
  }
}

Totals totals(const Problem& p, std::int64_t other, std::int64_t exps, std::int64_t Bc) {
  const std::int64_t N2 = p.N * p.N;
  return {{2 * p.N * p.d + 2 * N2 * p.d, 0}, 4 * N2 * p.d, other, exps, 2 * p.d + 2 * Bc * p.d + Bc + 2};
}

}  // namespace

const Rung kOnePassKeys{
    .number = 4,
    .name = "one_pass_keys",
    .title = "one pass, a row at a time, key by key",
    .file = "src/ladder/one_pass.cc",
    .formula = "2Nd + 2N^2 d",
    .tiled = false,
    .run = ONEPASS_RUN_RUNG(one_pass_keys),
    .totals = [](const Problem& p) { return totals(p, p.N * p.N * (6 + p.d) + p.N * p.d, 2 * p.N * p.N, 1); }};

const Rung kOnePassTiles{.number = 4,
                         .name = "one_pass_tiles",
                         .title = "one pass, a row at a time, K/V in tiles",
                         .file = "src/ladder/one_pass.cc",
                         .formula = "2Nd + 2N^2 d",
                         .run = ONEPASS_RUN_RUNG(one_pass_tiles),
                         .totals = [](const Problem& p) {
                           const Blocks b = blocks_of(p);
                           const std::int64_t N = p.N, Tc = b.Tc(N), d1 = p.d + 1;
                           return totals(p, N * (4 * N + Tc * d1 + d1), N * (N + Tc), b.Bc);
                         }};

}  // namespace onepass::ladder
