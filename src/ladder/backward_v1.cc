// Rungs 10 and 11: the backward by recomputation (FlashAttention v1, algorithm 4).
//
// P is not kept: S = Q K^T is computed again in fast memory, and P = exp(S - m) / l from the m and l that the forward
// saved, 2N numbers for N^2. The row sum of P dP is rowsum(dO O), since sum_j P_ij (dO_i . V_j) = dO_i . O_i: no row of
// P needed. The outer loop is over K/V blocks, whose dK and dV stay; dQ is read, added to and written for each of them.
// Rung 11 saves not even m and l and finds them by one more pass: what saving 2N numbers buys is Q once and K Tr times.
#include "ladder/products.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

/// m and l of every row, by a pass of v2's shape.
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
      product_abt(count, s, q, k, rows, keys, p.scale());
      mask_tile(p, s, i, rows, j, keys);
      for (std::int64_t r = 0; r < rows; ++r) {
        float m_new = m[r];
        for (std::int64_t c = 0; c < keys; ++c) m_new = max_of(m_new, s(r, c));
        l[r] *= std::exp(m[r] - reference(m_new));
        for (std::int64_t c = 0; c < keys; ++c) l[r] += std::exp(s(r, c) - reference(m_new));
        m[r] = m_new;
      }
      count.exp(rows * (keys + 1));
      count.other(rows * (3 * keys + 1));
    }
    M.store(m, rows, i);
    L.store(l, rows, i);
  }
}

template <class C>
void backward(const Problem& p, Arrays& x, C count) {
  const Blocks b = blocks_of(p);
  auto Q = slow(count, Array::Q, x, p, p.d), K = slow(count, Array::K, x, p, p.d), V = slow(count, Array::V, x, p, p.d);
  auto O = slow(count, Array::O, x, p, p.d), dO = slow(count, Array::dO, x, p, p.d);
  auto dQ = slow(count, Array::dQ, x, p, p.d), dK = slow(count, Array::dK, x, p, p.d),
       dV = slow(count, Array::dV, x, p, p.d);
  auto M = slow(count, Array::m, x, p, 1), L = slow(count, Array::l, x, p, 1);
  {
    Tile<C> zero(count, 1, p.d, Kind::operand);
    for (std::int64_t i = 0; i < p.N; ++i) dQ.store(zero, 1, i);
  }
  Tile<C> k(count, b.Bc, p.d, Kind::operand), v(count, b.Bc, p.d, Kind::operand);
  Tile<C> dk(count, b.Bc, p.d, Kind::operand), dv(count, b.Bc, p.d, Kind::operand);
  Tile<C> q(count, b.Br, p.d, Kind::operand), o(count, b.Br, p.d, Kind::operand);
  Tile<C> d_o(count, b.Br, p.d, Kind::operand), dq(count, b.Br, p.d, Kind::operand);
  Tile<C> s(count, b.Br, b.Bc, Kind::scratch), ds(count, b.Br, b.Bc, Kind::scratch);
  Tile<C> m(count, b.Br, 1, Kind::scratch), l(count, b.Br, 1, Kind::scratch);
  for (std::int64_t j = 0; j < p.N; j += b.Bc) {
    const std::int64_t keys = min_of(b.Bc, p.N - j);
    K.load(k, keys, j);
    V.load(v, keys, j);
    dk.fill(0);
    dv.fill(0);
    for (std::int64_t i = 0; i < p.N; i += b.Br) {
      const std::int64_t rows = min_of(b.Br, p.N - i);
      Q.load(q, rows, i);
      O.load(o, rows, i);
      dO.load(d_o, rows, i);
      dQ.load(dq, rows, i);
      M.load(m, rows, i);
      L.load(l, rows, i);
      product_abt(count, s, q, k, rows, keys, p.scale());
      mask_tile(p, s, i, rows, j, keys);
      product_abt(count, ds, d_o, v, rows, keys, 1);
      for (std::int64_t r = 0; r < rows; ++r) {
        float D = 0;
        for (std::int64_t c = 0; c < p.d; ++c) D += d_o(r, c) * o(r, c);
        for (std::int64_t c = 0; c < keys; ++c) {
          s(r, c) = l[r] > 0 ? std::exp(s(r, c) - reference(m[r])) / l[r] : 0;
          ds(r, c) = s(r, c) * (ds(r, c) - D);
        }
      }
      count.exp(rows * keys);
      count.other(rows * (4 * keys + 2 * p.d));
      add_product_atb(count, dv, s, d_o, rows, keys);
      add_product_atb(count, dk, ds, q, rows, keys, p.scale());
      add_product_ab(count, dq, ds, k, rows, keys, p.scale());
      dQ.store(dq, rows, i);
    }
    dK.store(dk, keys, j);
    dV.store(dv, keys, j);
  }
}

template <class C>
void recompute_all(const Problem& p, Arrays& x, C count) {
  statistics(p, x, count);
  backward(p, x, count);
}

std::int64_t saved(const Problem& p) {
  return 5 * p.N * p.d + blocks_of(p).Tc(p.N) * (5 * p.N * p.d + 2 * p.N);
}
constexpr const char* kFile = "src/ladder/backward_v1.cc";

}  // namespace

const Rung kBackwardV1{"backward_v1", "v1 backward: P recomputed from the saved m and l",
                       kFile,         true,
                       true,          ONEPASS_RUN_RUNG(backward),
                       saved,         "5Nd + Tc (5Nd + 2N)"};
const Rung kBackwardV1Statistics{
    "backward_v1_statistics",
    "v1 backward, m and l recomputed too",
    kFile,
    true,
    true,
    ONEPASS_RUN_RUNG(recompute_all),
    [](const Problem& p) { return saved(p) + p.N * p.d + blocks_of(p).Tr(p.N) * p.N * p.d + 2 * p.N; },
    "6Nd + 2N + Tr Nd + Tc (5Nd + 2N)"};

}  // namespace onepass::ladder
