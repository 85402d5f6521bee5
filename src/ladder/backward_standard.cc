// Rung 9: the standard backward, from a stored P.
//
// With O = P V and P = softmax(S), the chain rule gives dV = P^T dO, dP = dO V^T, and through the softmax's Jacobian
// dS_ij = P_ij (dP_ij - sum_k P_ik dP_ik); then dQ = scale dS K, dK = scale dS^T Q (the scale is taken into dS here).
// P comes from the forward, N^2 numbers that were kept all the while; dP and dS are written and read as well.
#include "ladder/products.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

template <class C>
void backward_standard(const Problem& p, Arrays& x, C count) {
  auto Q = slow(count, Array::Q, x, p, p.d), K = slow(count, Array::K, x, p, p.d), V = slow(count, Array::V, x, p, p.d);
  auto P = slow(count, Array::P, x, p, p.N), dP = slow(count, Array::dP, x, p, p.N),
       dS = slow(count, Array::dS, x, p, p.N);
  auto dO = slow(count, Array::dO, x, p, p.d), dQ = slow(count, Array::dQ, x, p, p.d);
  auto dK = slow(count, Array::dK, x, p, p.d), dV = slow(count, Array::dV, x, p, p.d);
  Tile<C> row(count, 1, p.d, Kind::operand), w(count, 1, p.N, Kind::scratch), g(count, 1, p.N, Kind::scratch);
  {  // dV = P^T dO
    Tile<C> sum(count, p.N, p.d, Kind::operand);
    for (std::int64_t i = 0; i < p.N; ++i) {
      P.load(w, 1, i);
      dO.load(row, 1, i);
      add_product_atb(count, sum, w, row, 1, p.N);
    }
    dV.store(sum, p.N, 0);
  }
  {  // dP = dO V^T
    Tile<C> v(count, p.N, p.d, Kind::operand);
    V.load(v, p.N, 0);
    for (std::int64_t i = 0; i < p.N; ++i) {
      dO.load(row, 1, i);
      product_abt(count, g, row, v, 1, p.N);
      dP.store(g, 1, i);
    }
  }
  for (std::int64_t i = 0; i < p.N; ++i) {  // dS = scale P (dP - rowsum(P dP))
    P.load(w, 1, i);
    dP.load(g, 1, i);
    const float D = dot(w.row(0), g.row(0), p.N);
    for (std::int64_t j = 0; j < p.N; ++j) g[j] = p.scale() * (w[j] * (g[j] - D));
    count.other(5 * p.N);
    dS.store(g, 1, i);
  }
  {  // dQ = dS K
    Tile<C> k(count, p.N, p.d, Kind::operand);
    K.load(k, p.N, 0);
    for (std::int64_t i = 0; i < p.N; ++i) {
      dS.load(g, 1, i);
      row.fill(0);
      add_product_ab(count, row, g, k, 1, p.N);
      dQ.store(row, 1, i);
    }
  }
  Tile<C> sum(count, p.N, p.d, Kind::operand);  // dK = dS^T Q
  for (std::int64_t i = 0; i < p.N; ++i) {
    dS.load(g, 1, i);
    Q.load(row, 1, i);
    add_product_atb(count, sum, g, row, 1, p.N);
  }
  dK.store(sum, p.N, 0);
}

}  // namespace

const Rung kBackwardStandard{
    .number = 9,
    .name = "backward_standard",
    .title = "standard backward, P stored by the forward",
    .file = "src/ladder/backward_standard.cc",
    .formula = "8Nd + 7N^2",
    .forward = &kStandard,
    .tiled = false,
    .squares = true,
    .run = ONEPASS_RUN_RUNG(backward_standard),
    .totals = [](const Problem& p) {
      const std::int64_t N2 = p.N * p.N;
      return Totals{{8 * p.N * p.d + 7 * N2, 0}, 8 * N2 * p.d, 5 * N2, 0, p.N * p.d + 2 * p.N + p.d};
    }};

}  // namespace onepass::ladder
