// Rungs 6 and 7: FlashAttention v2 (Dao 2023, algorithm 1).
//
// The loops change places. A block of Br query rows stays in fast memory with its O, m and l while K and V pass by, so
// O is written once and m, l never leave; K and V are read Tr times instead. O stays unnormalised until the end (one
// division a row, not one a tile), and one number a row is saved for the backward, L = m + log l. Blocks of rows are
// independent of each other: they can run on different processors, which v1's outer loop over keys could not.
// With a mask, blocks of keys that no row of the block sees are not loaded at all: the causal half is really saved.
#include "ladder/products.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

/// Blocks of keys [begin, end) that some row of [i, i + rows) sees.
Blocks key_blocks(const Problem& p, const Blocks& b, std::int64_t i, std::int64_t rows, bool skip) {
  if (!skip) return {0, b.Tc(p.N)};
  const std::int64_t first = p.first_key(i), last = p.end_key(i + rows - 1);
  return {first / b.Bc, last <= first ? first / b.Bc : ceil_div(last, b.Bc)};
}

template <class C>
void attend(const Problem& p, Arrays& x, C count, bool skip) {
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
    const Blocks range = key_blocks(p, b, i, rows, skip);
    for (std::int64_t j = range.Br * b.Bc; j < min_of(range.Bc * b.Bc, p.N); j += b.Bc) {
      const std::int64_t keys = min_of(b.Bc, p.N - j);
      K.load(k, keys, j);
      V.load(v, keys, j);
      product_abt(count, s, q, k, rows, keys, p.scale());
      mask_tile(p, s, i, rows, j, keys);
      for (std::int64_t r = 0; r < rows; ++r) {
        float m_new = m[r];
        for (std::int64_t c = 0; c < keys; ++c) m_new = max_of(m_new, s(r, c));
        const float alpha = std::exp(m[r] - reference(m_new));
        l[r] *= alpha;
        for (std::int64_t c = 0; c < keys; ++c) l[r] += s(r, c) = std::exp(s(r, c) - reference(m_new));
        for (std::int64_t c = 0; c < p.d; ++c) o(r, c) *= alpha;
        m[r] = m_new;
      }
      add_product_ab(count, o, s, v, rows, keys);
      count.exp(rows * (keys + 1));
      count.other(rows * (3 * keys + p.d + 1));
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < p.d; ++c) o(r, c) = l[r] > 0 ? o(r, c) / l[r] : 0;
      l[r] = m[r] + std::log(l[r]);  // L, in l's place
    }
    count.other(rows * (p.d + 1));
    O.store(o, rows, i);
    L.store(l, rows, i);
  }
}

template <class C>
void flash_v2(const Problem& p, Arrays& x, C count) {
  attend(p, x, count, false);
}
template <class C>
void flash_v2_skipping(const Problem& p, Arrays& x, C count) {
  attend(p, x, count, true);
}

std::int64_t elements(const Problem& p) {
  return 2 * p.N * p.d + p.N + blocks_of(p).Tr(p.N) * 2 * p.N * p.d;
}
std::int64_t elements_skipping(const Problem& p) {
  const Blocks b = blocks_of(p);
  std::int64_t keys = 0;  // loaded, by all blocks of rows
  for (std::int64_t i = 0; i < p.N; i += b.Br) {
    const Blocks range = key_blocks(p, b, i, min_of(b.Br, p.N - i), true);
    keys += max_of<std::int64_t>(min_of(range.Bc * b.Bc, p.N) - range.Br * b.Bc, 0);
  }
  return 2 * p.N * p.d + p.N + 2 * keys * p.d;
}

constexpr const char* kFile = "src/ladder/flash_v2.cc";

}  // namespace

const Rung kFlashV2{"flash_v2", "FlashAttention v2: outer loop over Q, O unnormalised to the end",
                    kFile,      false,
                    true,       ONEPASS_RUN_RUNG(flash_v2),
                    elements,   "2Nd + N + Tr 2Nd"};
const Rung kFlashV2Skipping{"flash_v2_skipping",
                            "v2, key blocks that no row sees are skipped",
                            kFile,
                            false,
                            true,
                            ONEPASS_RUN_RUNG(flash_v2_skipping),
                            elements_skipping,
                            "2Nd + N + 2d sum of the keys in visible blocks"};

}  // namespace onepass::ladder
