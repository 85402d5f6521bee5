// What rungs 12 and 13 share: D, and what a block of keys does with a block of query rows.
#pragma once

#include "ladder/products.h"

namespace onepass::ladder {

template <class C>
void row_sums(const Problem& p, Arrays& x, C count) {  // D = rowsum(dO O); dQ = 0
  auto O = slow(count, Array::O, x, p, p.d), dO = slow(count, Array::dO, x, p, p.d);
  auto D = slow(count, Array::D, x, p, 1), dQ = slow(count, Array::dQ, x, p, p.d);
  Tile<C> o(count, 1, p.d, Kind::operand), d_o(count, 1, p.d, Kind::operand), zero(count, 1, p.d, Kind::operand);
  for (std::int64_t i = 0; i < p.N; ++i) {
    O.load(o, 1, i);
    dO.load(d_o, 1, i);
    count.other(2 * p.d);
    D.put(i, 0, dot(d_o.row(0), o.row(0), p.d));
    dQ.store(zero, 1, i);
  }
}

/// A block of keys: its K and V, and the dK and dV that grow while the query rows pass by.
template <class C>
struct Column {
  Column(const Problem& p, Arrays& x, C count, std::int64_t first)
      : j(first),
        keys(min_of(blocks_of(p).Bc, p.N - first)),
        k(count, blocks_of(p).Bc, p.d, Kind::operand),
        v(count, blocks_of(p).Bc, p.d, Kind::operand),
        dk(count, blocks_of(p).Bc, p.d, Kind::operand),
        dv(count, blocks_of(p).Bc, p.d, Kind::operand) {
    slow(count, Array::K, x, p, p.d).load(k, keys, j);
    slow(count, Array::V, x, p, p.d).load(v, keys, j);
  }
  void store(const Problem& p, Arrays& x, C count) {
    slow(count, Array::dK, x, p, p.d).store(dk, keys, j);
    slow(count, Array::dV, x, p, p.d).store(dv, keys, j);
  }

  std::int64_t j, keys;
  Tile<C> k, v, dk, dv;
};

/// Query rows i ... pass by: dK, dV of the column and dQ of the rows get their share.
template <class C>
void visit(const Problem& p, Arrays& x, C count, Column<C>& column, std::int64_t i) {
  const Blocks b = blocks_of(p);
  const std::int64_t rows = min_of(b.Br, p.N - i), keys = column.keys;
  auto dQ = slow(count, Array::dQ, x, p, p.d);
  Tile<C> q(count, b.Br, p.d, Kind::operand), d_o(count, b.Br, p.d, Kind::operand), dq(count, b.Br, p.d, Kind::operand);
  Tile<C> s(count, b.Br, b.Bc, Kind::scratch), ds(count, b.Br, b.Bc, Kind::scratch);
  Tile<C> l(count, b.Br, 1, Kind::scratch), D(count, b.Br, 1, Kind::scratch);
  slow(count, Array::Q, x, p, p.d).load(q, rows, i);
  slow(count, Array::dO, x, p, p.d).load(d_o, rows, i);
  slow(count, Array::L, x, p, 1).load(l, rows, i);
  slow(count, Array::D, x, p, 1).load(D, rows, i);
  dQ.load(dq, rows, i);
  score_tile(p, count, s, q, column.k, i, rows, column.j, keys);
  product_abt(count, ds, d_o, column.v, rows, keys);  // dP
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < keys; ++c) {
      s(r, c) = std::exp(s(r, c) - reference(l[r]));  // P, by one subtraction
      ds(r, c) = p.scale() * (s(r, c) * (ds(r, c) - D[r]));
    }
  }
  count.exp(rows * keys);
  count.other(4 * rows * keys);
  add_product_atb(count, column.dv, s, d_o, rows, keys);
  add_product_atb(count, column.dk, ds, q, rows, keys);
  add_product_ab(count, dq, ds, column.k, rows, keys);
  dQ.store(dq, rows, i);
}

/// Of both rungs; `columns` at once.
inline Totals backward_v2_totals(const Problem& p, std::int64_t columns) {
  const Blocks b = blocks_of(p);
  const std::int64_t N = p.N, d = p.d, Nd = N * d, Tc = b.Tc(N);
  const std::int64_t held = min_of(columns, Tc) * 4 * b.Bc * d + 3 * b.Br * d + 2 * b.Br * b.Bc + 2 * b.Br;
  return {{7 * Nd + Tc * 4 * Nd, N + Tc * 2 * N}, 10 * N * Nd, 5 * N * N + 2 * Nd, N * N, max_of(held, 3 * d)};
}

}  // namespace onepass::ladder
