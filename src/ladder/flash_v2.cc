// Rung 6: FlashAttention v2 (Dao 2023, algorithm 1).
//
// The loops change places. A block of Br query rows stays in fast memory with its O, m and l while K and V pass by, so
// O is written once and m, l never leave; K and V are read Tr times instead. O stays unnormalised until the end (one
// division a row, not one a tile), and one number a row is saved for the backward, L = m + log l. Blocks of rows are
// independent of each other: they can run on different processors, which v1's outer loop over keys could not.
#include "ladder/online.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

template <class C>
void flash_v2(const Problem& p, Arrays& x, C count) {
  const Blocks b = blocks_of(p);
  auto Q = slow(count, Array::Q, x, p, p.d), K = slow(count, Array::K, x, p, p.d), V = slow(count, Array::V, x, p, p.d);
  auto O = slow(count, Array::O, x, p, p.d), L = slow(count, Array::L, x, p, 1);
  Tile<C> q(count, b.Br, p.d, Kind::operand), o(count, b.Br, p.d, Kind::operand);
  Tile<C> k(count, b.Bc, p.d, Kind::operand), v(count, b.Bc, p.d, Kind::operand);
  Tile<C> s(count, b.Br, b.Bc, Kind::scratch), m(count, b.Br, 1, Kind::scratch), l(count, b.Br, 1, Kind::scratch);
  for (std::int64_t i = 0; i < p.N; i += b.Br) {
    const std::int64_t rows = min_of(b.Br, p.N - i);
    Q.load(q, rows, i);
    o.fill(0);
    m.fill(-INFINITY);
    l.fill(0);
    for (std::int64_t j = 0; j < p.N; j += b.Bc) {
      const std::int64_t keys = min_of(b.Bc, p.N - j);
      K.load(k, keys, j);
      V.load(v, keys, j);
      score_tile(p, count, s, q, k, i, rows, j, keys);
      take_tile(count, s, m, l, &o, rows, keys);   // P, m, l; O = exp(m - m') O ...
      add_product_ab(count, o, s, v, rows, keys);  // ... + P V
    }
    finish_rows(count, o, m, l, rows);  // O / l; L = m + log l, in l's place
    O.store(o, rows, i);
    L.store(l, rows, i);
  }
}

}  // namespace

const Rung kFlashV2{.number = 6,
                    .name = "flash_v2",
                    .title = "FlashAttention v2: outer loop over Q, O unnormalised to the end",
                    .file = "src/ladder/flash_v2.cc",
                    .formula = "2Nd + N + Tr 2Nd",
                    .run = ONEPASS_RUN_RUNG(flash_v2),
                    .totals = [](const Problem& p) {
                      const Blocks b = blocks_of(p);
                      const std::int64_t N = p.N, Nd = N * p.d, Tc = b.Tc(N), d1 = p.d + 1;
                      return Totals{{2 * Nd + b.Tr(N) * 2 * Nd, N},
                                    4 * N * Nd,
                                    N * (4 * N + Tc * d1 + d1),
                                    N * (N + Tc),
                                    2 * b.Br * p.d + 2 * b.Bc * p.d + b.Br * b.Bc + 2 * b.Br};
                    }};

}  // namespace onepass::ladder
