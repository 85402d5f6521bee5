// Rung 4: from two passes to one.
//
// With online softmax, attention needs no S in slow memory: one pass over the keys finds m and l, a second computes the
// weights exp(s - m) / l again and sums V. The second pass exists only because O needs the final m and l. But O obeys
// the same recurrence as l: what was summed under the old maximum is rescaled by exp(m - m'),
//   o' = o exp(m - m') + exp(s - m') v,     O = o / l at the end,
// so K and V are read in the same pass: FlashAttention, for one row. Its fast memory is O(d), whatever N is.
#include "ladder/products.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

template <class C>
void two_pass_attention(const Problem& p, Arrays& x, C count) {
  auto Q = slow(count, Array::Q, x, p, p.d), K = slow(count, Array::K, x, p, p.d);
  auto V = slow(count, Array::V, x, p, p.d), O = slow(count, Array::O, x, p, p.d);
  Tile<C> q(count, 1, p.d, Kind::operand), k(count, 1, p.d, Kind::operand), v(count, 1, p.d, Kind::operand);
  Tile<C> o(count, 1, p.d, Kind::operand), s(count, 1, 1, Kind::scratch), statistics(count, 1, 2, Kind::scratch);
  for (std::int64_t i = 0; i < p.N; ++i) {
    Q.load(q, 1, i);
    float m = -INFINITY, l = 0;
    for (std::int64_t j = 0; j < p.N; ++j) {  // first pass: m and l
      K.load(k, 1, j);
      product_abt(count, s, q, k, 1, 1, p.scale());
      mask_tile(p, s, i, 1, j, 1);
      const float m_new = max_of(m, s(0, 0));
      l = l * std::exp(m - reference(m_new)) + std::exp(s(0, 0) - reference(m_new));
      m = m_new;
    }
    o.fill(0);
    for (std::int64_t j = 0; j < p.N; ++j) {  // second pass: the weights, again, and O
      K.load(k, 1, j);
      V.load(v, 1, j);
      product_abt(count, s, q, k, 1, 1, p.scale());
      mask_tile(p, s, i, 1, j, 1);
      s(0, 0) = l > 0 ? std::exp(s(0, 0) - reference(m)) / l : 0;
      add_product_ab(count, o, s, v, 1, 1);
    }
    count.exp(3 * p.N);
    count.other(7 * p.N);
    O.store(o, 1, i);
  }
}

/// Keys in tiles of Bc: one rescaling of o and l a tile. Bc = 1 is key by key.
template <class C>
void row_by_tiles(const Problem& p, Arrays& x, C count, std::int64_t Bc) {
  auto Q = slow(count, Array::Q, x, p, p.d), K = slow(count, Array::K, x, p, p.d);
  auto V = slow(count, Array::V, x, p, p.d), O = slow(count, Array::O, x, p, p.d);
  Tile<C> q(count, 1, p.d, Kind::operand), o(count, 1, p.d, Kind::operand);
  Tile<C> k(count, Bc, p.d, Kind::operand), v(count, Bc, p.d, Kind::operand);
  Tile<C> s(count, 1, Bc, Kind::scratch), statistics(count, 1, 2, Kind::scratch);
  for (std::int64_t i = 0; i < p.N; ++i) {
    Q.load(q, 1, i);
    o.fill(0);
    float m = -INFINITY, l = 0;
    for (std::int64_t j = 0; j < p.N; j += Bc) {
      const std::int64_t keys = min_of(Bc, p.N - j);
      K.load(k, keys, j);
      V.load(v, keys, j);
      product_abt(count, s, q, k, 1, keys, p.scale());
      mask_tile(p, s, i, 1, j, keys);
      float m_new = m;
      for (std::int64_t c = 0; c < keys; ++c) m_new = max_of(m_new, s(0, c));
      const float alpha = std::exp(m - reference(m_new));
      l *= alpha;
      for (std::int64_t c = 0; c < keys; ++c) l += s(0, c) = std::exp(s(0, c) - reference(m_new));
      for (std::int64_t c = 0; c < p.d; ++c) o(0, c) *= alpha;
      add_product_ab(count, o, s, v, 1, keys);
      m = m_new;
      count.exp(keys + 1);
      count.other(3 * keys + p.d + 1);
    }
    for (std::int64_t c = 0; c < p.d; ++c) o(0, c) = l > 0 ? o(0, c) / l : 0;
    count.other(p.d);
    O.store(o, 1, i);
  }
}

template <class C>
void one_pass_keys(const Problem& p, Arrays& x, C count) {
  row_by_tiles(p, x, count, 1);
}
template <class C>
void one_pass_tiles(const Problem& p, Arrays& x, C count) {
  row_by_tiles(p, x, count, blocks_of(p).Bc);
}

constexpr const char* kFile = "src/ladder/one_pass.cc";

}  // namespace

const Rung kTwoPassAttention{"two_pass_attention",
                             "two-pass attention, no S in slow memory",
                             kFile,
                             false,
                             false,
                             ONEPASS_RUN_RUNG(two_pass_attention),
                             [](const Problem& p) { return 2 * p.N * p.d + 3 * p.N * p.N * p.d; },
                             "2Nd + 3N^2 d"};
const Rung kOnePassKeys{"one_pass_keys",
                        "one pass, a row at a time, key by key",
                        kFile,
                        false,
                        false,
                        ONEPASS_RUN_RUNG(one_pass_keys),
                        [](const Problem& p) { return 2 * p.N * p.d + 2 * p.N * p.N * p.d; },
                        "2Nd + 2N^2 d"};
const Rung kOnePassTiles{"one_pass_tiles",
                         "one pass, a row at a time, K/V in tiles",
                         kFile,
                         false,
                         true,
                         ONEPASS_RUN_RUNG(one_pass_tiles),
                         [](const Problem& p) { return 2 * p.N * p.d + 2 * p.N * p.N * p.d; },
                         "2Nd + 2N^2 d"};

}  // namespace onepass::ladder
