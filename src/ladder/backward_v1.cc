// Rung 10: the backward by recomputation (FlashAttention v1, algorithm 4).
//
// P is not kept: S = Q K^T is computed again in fast memory, and P = exp(S - m) / l from the m and l that the forward
// saved, 2N numbers for N^2. The row sum of P dP is rowsum(dO O), since sum_j P_ij (dO_i . V_j) = dO_i . O_i: no row of
// P needed. The outer loop is over K/V blocks, whose dK and dV stay; dQ is read, added to and written for each of them.
#include "ladder/products.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

template <class C>
void backward_v1(const Problem& p, Arrays& x, C count) {
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
      score_tile(p, count, s, q, k, i, rows, j, keys);
      product_abt(count, ds, d_o, v, rows, keys);  // dP
      for (std::int64_t r = 0; r < rows; ++r) {
        const float D = dot(d_o.row(r), o.row(r), p.d);  // rowsum(dO O), again for each block of keys
        for (std::int64_t c = 0; c < keys; ++c) {
          s(r, c) = std::exp(s(r, c) - reference(m[r])) / l[r];
          ds(r, c) = p.scale() * (s(r, c) * (ds(r, c) - D));
        }
      }
      count.exp(rows * keys);
      count.other(rows * (5 * keys + 2 * p.d));
      add_product_atb(count, dv, s, d_o, rows, keys);
      add_product_atb(count, dk, ds, q, rows, keys);
      add_product_ab(count, dq, ds, k, rows, keys);
      dQ.store(dq, rows, i);
    }
    dK.store(dk, keys, j);
    dV.store(dv, keys, j);
  }
}

}  // namespace

const Rung kBackwardV1{.number = 10,
                       .name = "backward_v1",
                       .title = "v1 backward: P recomputed from the saved m and l",
                       .file = "src/ladder/backward_v1.cc",
                       .formula = "5Nd + Tc (5Nd + 2N)",
                       .forward = &kFlashV1,
                       .run = ONEPASS_RUN_RUNG(backward_v1),
                       .totals = [](const Problem& p) {
                         const Blocks b = blocks_of(p);
                         const std::int64_t N = p.N, Nd = N * p.d, Tc = b.Tc(N);
                         return Totals{{5 * Nd + Tc * 5 * Nd, Tc * 2 * N},
                                       10 * N * Nd,
                                       6 * N * N + Tc * 2 * Nd,
                                       N * N,
                                       4 * b.Bc * p.d + 4 * b.Br * p.d + 2 * b.Br * b.Bc + 2 * b.Br};
                       }};

}  // namespace onepass::ladder
