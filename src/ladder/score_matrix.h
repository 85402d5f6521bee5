// The two products of standard attention, through a score matrix in slow memory: what rungs 1 to 3 share.
// They are the ideal ones of the papers' counts: a whole K (or V) is held, so that each operand moves once.
#pragma once

#include "ladder/products.h"

namespace onepass::ladder {

template <class C>
void write_scores(const Problem& p, Arrays& x, C count) {  // S = mask(scale Q K^T)
  auto Q = slow(count, Array::Q, x, p, p.d), K = slow(count, Array::K, x, p, p.d), S = slow(count, Array::S, x, p, p.N);
  Tile<C> k(count, p.N, p.d, Kind::operand), q(count, 1, p.d, Kind::operand), s(count, 1, p.N, Kind::scratch);
  K.load(k, p.N, 0);
  for (std::int64_t i = 0; i < p.N; ++i) {
    Q.load(q, 1, i);
    score_tile(p, count, s, q, k, i, 1, 0, p.N);
    S.store(s, 1, i);
  }
}

template <class C>
void weigh_values(const Problem& p, Arrays& x, C count) {  // O = P V
  auto P = slow(count, Array::P, x, p, p.N), V = slow(count, Array::V, x, p, p.d), O = slow(count, Array::O, x, p, p.d);
  Tile<C> v(count, p.N, p.d, Kind::operand), w(count, 1, p.N, Kind::scratch), o(count, 1, p.d, Kind::operand);
  V.load(v, p.N, 0);
  for (std::int64_t i = 0; i < p.N; ++i) {
    P.load(w, 1, i);
    o.fill(0);
    add_product_ab(count, o, w, v, 1, p.N);
    O.store(o, 1, i);
  }
}

/// What a rung of this kind moves and computes: passes over S and P, exponentials and softmax FLOPs a score.
inline Totals square_totals(const Problem& p, std::int64_t passes, std::int64_t exps, std::int64_t flops) {
  const std::int64_t N2 = p.N * p.N;
  return {{4 * p.N * p.d + passes * N2, 0}, 4 * N2 * p.d, (1 + flops) * N2, exps * N2, p.N * p.d + p.N + p.d};
}

}  // namespace onepass::ladder
