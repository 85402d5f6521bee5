// Products of tiles in fast memory, counted as 2 FLOPs a multiply-add, and the scores of a tile.
#pragma once

#include "ladder/rung.h"

namespace onepass::ladder {

/// a . b, in eight sums that a compiler can keep in a vector.
inline float dot(const float* a, const float* b, std::int64_t n) {
  float sums[8] = {};
  std::int64_t k = 0;
  for (; k + 8 <= n; k += 8) {
    for (int t = 0; t < 8; ++t) sums[t] += a[k + t] * b[k + t];
  }
  float sum = 0;
  for (; k < n; ++k) sum += a[k] * b[k];
  for (const float x : sums) sum += x;
  return sum;
}

/// y += scale x.
inline void add_scaled(float* y, float scale, const float* x, std::int64_t n) {
  for (std::int64_t k = 0; k < n; ++k) y[k] += scale * x[k];
}

/// S[r][c] = A[r] . B[c].
template <class C>
void product_abt(C count, Tile<C>& s, const Tile<C>& a, const Tile<C>& b, std::int64_t rows, std::int64_t cols) {
  count.matmul(2 * rows * cols * a.cols);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) s(r, c) = dot(a.row(r), b.row(c), a.cols);
  }
}

/// O[r] += sum over c of P[r][c] V[c].
template <class C>
void add_product_ab(C count, Tile<C>& o, const Tile<C>& p, const Tile<C>& v, std::int64_t rows, std::int64_t inner) {
  count.matmul(2 * rows * inner * v.cols);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < inner; ++c) add_scaled(o.row(r), p(r, c), v.row(c), v.cols);
  }
}

/// G[c] += sum over r of P[r][c] X[r].
template <class C>
void add_product_atb(C count, Tile<C>& g, const Tile<C>& p, const Tile<C>& x, std::int64_t rows, std::int64_t cols) {
  count.matmul(2 * rows * cols * x.cols);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) add_scaled(g.row(c), p(r, c), x.row(r), x.cols);
  }
}

/// The scores of query rows i ... and keys j ...: S = mask(scale Q K^T). Scale and mask come right after the product,
/// before the maximum, where the papers put them; what the mask hides becomes -inf.
template <class C>
void score_tile(const Problem& p, C count, Tile<C>& s, const Tile<C>& q, const Tile<C>& k, std::int64_t i,
                std::int64_t rows, std::int64_t j, std::int64_t keys) {
  product_abt(count, s, q, k, rows, keys);
  count.other(rows * keys);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < keys; ++c) s(r, c) = p.sees(i + r, j + c) ? p.scale() * s(r, c) : -INFINITY;
  }
}

/// m, or 0 where a row has seen nothing: -inf minus -inf is NaN.
inline float reference(float m) {
  return m == -INFINITY ? 0.0f : m;
}

}  // namespace onepass::ladder
