// The online softmax, for a score and for a tile of scores.
//
// m is the maximum of the scores so far and l the sum of exp(s - m). When the maximum grows from m to m', every term of
// the sum must be taken from m to m': sum exp(s_i - m') = exp(m - m') sum exp(s_i - m), since exp(a + b) = exp(a)
// exp(b). So l' = l exp(m - m') + exp(s - m'), and by induction l = sum exp(s_i - m) after each step. Whatever else was
// summed with the weights exp(s_i - m), as O is, is rescaled by the same factor.
#pragma once

#include "ladder/products.h"

namespace onepass::ladder {

struct Online {
  float m = -INFINITY, l = 0;
  /// One more score. Returns exp(m - m'), the factor for what was summed before.
  float take(float s) {
    const float m_new = max_of(m, s), alpha = std::exp(m - reference(m_new));
    l = l * alpha + std::exp(s - reference(m_new));
    m = m_new;
    return alpha;
  }
};

/// The same for a tile: S becomes P = exp(S - m'), not yet divided by l; m, l and O (null: none) of its rows follow.
template <class C>
void take_tile(C count, Tile<C>& s, Tile<C>& m, Tile<C>& l, Tile<C>* o, std::int64_t rows, std::int64_t keys) {
  for (std::int64_t r = 0; r < rows; ++r) {
    float m_new = m[r];
    for (std::int64_t c = 0; c < keys; ++c) m_new = max_of(m_new, s(r, c));
    const float alpha = std::exp(m[r] - reference(m_new));
    l[r] *= alpha;
    for (std::int64_t c = 0; c < keys; ++c) l[r] += s(r, c) = std::exp(s(r, c) - reference(m_new));
    for (std::int64_t c = 0; o != nullptr && c < o->cols; ++c) (*o)(r, c) *= alpha;
    m[r] = m_new;
  }
  count.exp(rows * (keys + 1));
  count.other(rows * (3 * keys + 1 + (o != nullptr ? o->cols : 0)));
}

/// After the last tile: O is divided by l once, and L = m + log l takes l's place.
template <class C>
void finish_rows(C count, Tile<C>& o, Tile<C>& m, Tile<C>& l, std::int64_t rows) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < o.cols; ++c) o(r, c) = l[r] > 0 ? o(r, c) / l[r] : 0;
    l[r] = m[r] + std::log(l[r]);
  }
  count.other(rows * (o.cols + 1));
}

}  // namespace onepass::ladder
