// Products of tiles in fast memory, counted as 2 FLOPs a multiply-add.
#pragma once

#include "ladder/rung.h"

namespace onepass::ladder {

/// S[r][c] = scale * A[r] . B[c].
template <class C>
void product_abt(C count, Tile<C>& s, const Tile<C>& a, const Tile<C>& b, std::int64_t rows, std::int64_t cols,
                 float scale) {
  count.matmul(2 * rows * cols * a.cols);
  if (scale != 1) count.other(rows * cols);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      float sum = 0;
      for (std::int64_t k = 0; k < a.cols; ++k) sum += a(r, k) * b(c, k);
      s(r, c) = scale * sum;
    }
  }
}

/// O[r] += sum over c of P[r][c] V[c].
template <class C>
void add_product_ab(C count, Tile<C>& o, const Tile<C>& p, const Tile<C>& v, std::int64_t rows, std::int64_t inner,
                    float scale = 1) {
  count.matmul(2 * rows * inner * v.cols);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < inner; ++c) {
      const float x = scale * p(r, c);
      for (std::int64_t k = 0; k < v.cols; ++k) o(r, k) += x * v(c, k);
    }
  }
}

/// G[c] += sum over r of P[r][c] X[r].
template <class C>
void add_product_atb(C count, Tile<C>& g, const Tile<C>& p, const Tile<C>& x, std::int64_t rows, std::int64_t cols,
                     float scale = 1) {
  count.matmul(2 * rows * cols * x.cols);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      const float y = scale * p(r, c);
      for (std::int64_t k = 0; k < x.cols; ++k) g(c, k) += y * x(r, k);
    }
  }
}

/// Scores that the mask hides become -inf.
template <class C>
void mask_tile(const Problem& problem, Tile<C>& s, std::int64_t i, std::int64_t rows, std::int64_t j,
               std::int64_t cols) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      if (!problem.sees(i + r, j + c)) s(r, c) = -INFINITY;
    }
  }
}

/// m, or 0 where a row has seen nothing: -inf minus -inf is NaN.
inline float reference(float m) {
  return m == -INFINITY ? 0.0f : m;
}

}  // namespace onepass::ladder
