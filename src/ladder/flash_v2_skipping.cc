// Rung 7: v2 with a mask: blocks that nobody sees are skipped (Dao 2023, section 3.1.1).
//
// The keys that a row sees are an interval, and so are the blocks of keys that some row of a block sees. The inner loop
// starts at the first of them and stops after the last: of a causal mask half of the blocks are never loaded, of a
// window all but a band. In the other rungs hidden scores are computed and thrown away.
#include "ladder/online.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

struct Range {
  std::int64_t begin, end;
};

/// Of the keys that rows i ... i + rows - 1 see, whole blocks. A row sees itself at least, so this is not empty.
Range visible_keys(const Problem& p, std::int64_t Bc, std::int64_t i, std::int64_t rows) {
  const std::int64_t first = p.first_key(i), end = p.end_key(i + rows - 1);  // both grow with the row
  return {first / Bc * Bc, min_of(round_up(end, Bc), p.N)};
}

template <class C>
void flash_v2_skipping(const Problem& p, Arrays& x, C count) {
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
    const Range visible = visible_keys(p, b.Bc, i, rows);
    for (std::int64_t j = visible.begin; j < visible.end; j += b.Bc) {
      const std::int64_t keys = min_of(b.Bc, p.N - j);
      K.load(k, keys, j);
      V.load(v, keys, j);
      score_tile(p, count, s, q, k, i, rows, j, keys);
      take_tile(count, s, m, l, &o, rows, keys);
      add_product_ab(count, o, s, v, rows, keys);
    }
    finish_rows(count, o, m, l, rows);
    O.store(o, rows, i);
    L.store(l, rows, i);
  }
}

Totals totals(const Problem& p) {
  const Blocks b = blocks_of(p);
  std::int64_t loaded = 0, pairs = 0, steps = 0;  // keys, scores, rows of tiles
  for (std::int64_t i = 0; i < p.N; i += b.Br) {
    const std::int64_t rows = min_of(b.Br, p.N - i);
    const Range visible = visible_keys(p, b.Bc, i, rows);
    loaded += visible.end - visible.begin;
    pairs += rows * (visible.end - visible.begin);
    steps += rows * ceil_div(visible.end - visible.begin, b.Bc);
  }
  return {{2 * p.N * p.d + 2 * loaded * p.d, p.N},
          4 * pairs * p.d,
          4 * pairs + (steps + p.N) * (p.d + 1),
          pairs + steps,
          2 * b.Br * p.d + 2 * b.Bc * p.d + b.Br * b.Bc + 2 * b.Br};
}

}  // namespace

const Rung kFlashV2Skipping{.number = 7,
                            .name = "flash_v2_skipping",
                            .title = "v2, key blocks that no row sees are skipped",
                            .file = "src/ladder/flash_v2_skipping.cc",
                            .formula = "2Nd + N + 2d sum of keys in visible blocks",
                            .run = ONEPASS_RUN_RUNG(flash_v2_skipping),
                            .totals = totals};

}  // namespace onepass::ladder
