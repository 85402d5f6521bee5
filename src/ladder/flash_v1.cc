// Rung 5: FlashAttention v1 (Dao, Fu, Ermon, Rudra, Re 2022, algorithm 1).
//
// Many rows share what is loaded: K and V come once, in Tc blocks of Bc keys, and for each of them all of Q passes by
// in Tr blocks of Br rows. So O, l and m of every row are read, rescaled and written back Tc times: the price of the
// loop order. Bc = ceil(M / 4d) lets a K, a V, a Q and an O tile fill M. Br is held to d so that S, Br x Bc, stays
// within d * M / 4d = M / 4 and does not outgrow the tiles; more rows would not save traffic, which depends on Tc
// alone (`onepass ladder --rows` measures it). O is kept normalised: each step multiplies by the old l and divides by
// the new one.
#include "ladder/online.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

template <class C>
void flash_v1(const Problem& p, Arrays& x, C count) {
  const Blocks b = blocks_of(p);
  auto Q = slow(count, Array::Q, x, p, p.d), K = slow(count, Array::K, x, p, p.d), V = slow(count, Array::V, x, p, p.d);
  auto O = slow(count, Array::O, x, p, p.d), M = slow(count, Array::m, x, p, 1), L = slow(count, Array::l, x, p, 1);
  {
    Tile<C> zero(count, 1, p.d, Kind::operand);
    for (std::int64_t i = 0; i < p.N; ++i) {
      O.store(zero, 1, i);
      M.put(i, 0, -INFINITY);
      L.put(i, 0, 0);
    }
  }
  Tile<C> k(count, b.Bc, p.d, Kind::operand), v(count, b.Bc, p.d, Kind::operand);
  Tile<C> q(count, b.Br, p.d, Kind::operand), o(count, b.Br, p.d, Kind::operand);
  Tile<C> s(count, b.Br, b.Bc, Kind::scratch), m(count, b.Br, 1, Kind::scratch), l(count, b.Br, 1, Kind::scratch);
  for (std::int64_t j = 0; j < p.N; j += b.Bc) {
    const std::int64_t keys = min_of(b.Bc, p.N - j);
    K.load(k, keys, j);
    V.load(v, keys, j);
    for (std::int64_t i = 0; i < p.N; i += b.Br) {
      const std::int64_t rows = min_of(b.Br, p.N - i);
      Q.load(q, rows, i);
      O.load(o, rows, i);
      M.load(m, rows, i);
      L.load(l, rows, i);
      score_tile(p, count, s, q, k, i, rows, j, keys);
      for (std::int64_t r = 0; r < rows; ++r) {
        float m_tile = -INFINITY, l_tile = 0;
        for (std::int64_t c = 0; c < keys; ++c) m_tile = max_of(m_tile, s(r, c));
        for (std::int64_t c = 0; c < keys; ++c) l_tile += s(r, c) = std::exp(s(r, c) - reference(m_tile));
        const float m_new = max_of(m[r], m_tile);
        const float old_part = std::exp(m[r] - reference(m_new)), new_part = std::exp(m_tile - reference(m_new));
        const float l_new = old_part * l[r] + new_part * l_tile, inverse = l_new > 0 ? 1 / l_new : 0;
        for (std::int64_t c = 0; c < p.d; ++c) {  // O = (l exp(m - m') O + exp(m_tile - m') P V) / l'
          float sum = 0;
          for (std::int64_t n = 0; n < keys; ++n) sum += s(r, n) * v(n, c);
          o(r, c) = inverse * (l[r] * old_part * o(r, c) + new_part * sum);
        }
        m[r] = m_new;
        l[r] = l_new;
      }
      count.matmul(2 * rows * keys * p.d);
      count.exp(rows * (keys + 2));
      count.other(rows * (3 * keys + 4 * p.d + 4));
      O.store(o, rows, i);
      M.store(m, rows, i);
      L.store(l, rows, i);
    }
  }
}

}  // namespace

const Rung kFlashV1{.number = 5,
                    .name = "flash_v1",
                    .title = "FlashAttention v1: outer loop over K/V, O rescaled in slow memory",
                    .file = "src/ladder/flash_v1.cc",
                    .formula = "3Nd + 2N + Tc (3Nd + 4N)",
                    .run = ONEPASS_RUN_RUNG(flash_v1),
                    .totals = [](const Problem& p) {
                      const Blocks b = blocks_of(p);
                      const std::int64_t N = p.N, Nd = N * p.d, Tc = b.Tc(N);
                      return Totals{{3 * Nd + Tc * 3 * Nd, 2 * N + Tc * 4 * N},
                                    4 * N * Nd,
                                    N * (4 * N + Tc * (4 * p.d + 4)),
                                    N * (N + 2 * Tc),
                                    2 * b.Br * p.d + 2 * b.Bc * p.d + b.Br * b.Bc + 2 * b.Br};
                    }};

}  // namespace onepass::ladder
