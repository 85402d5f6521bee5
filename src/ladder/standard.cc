// Rung 1: standard attention, and the softmax that breaks.
//
// Three kernels: S = Q K^T, P = softmax(S), O = P V. Each writes an N x N matrix that the next one reads, and that
// traffic, not the arithmetic, is its cost: 4N^2 of it against 4Nd for Q, K, V and O.
// The softmax as it is written in books, P = exp(S) / sum exp(S), overflows: the largest float16 is 65,504, and exp(x)
// rounds to infinity from x = 11.09 on (from 88.7 in float32). The safe one subtracts the maximum m of the row first,
// which changes nothing, exp(s - m) / sum exp(s - m) being the same fraction, and leaves no exponent above 0.
#include "ladder/rungs.h"
#include "ladder/score_matrix.h"

namespace onepass::ladder {
namespace {

/// A whole row of S in fast memory: read once. `safe`: the maximum is subtracted.
template <class C>
void softmax_row(const Problem& p, Arrays& x, C count, bool safe) {
  auto S = slow(count, Array::S, x, p, p.N), P = slow(count, Array::P, x, p, p.N);
  Tile<C> s(count, 1, p.N, Kind::scratch);
  for (std::int64_t i = 0; i < p.N; ++i) {
    S.load(s, 1, i);
    float m = safe ? -INFINITY : 0, l = 0;
    for (std::int64_t j = 0; j < p.N && safe; ++j) m = max_of(m, s(0, j));
    for (std::int64_t j = 0; j < p.N; ++j) {
      float e = std::exp(s(0, j) - reference(m));
      if (!safe && p.dtype == DType::f16) e = f16_to_float(float_to_f16(e));  // in float16, as the book has it
      l += s(0, j) = e;
    }
    for (std::int64_t j = 0; j < p.N; ++j) s(0, j) = l > 0 ? s(0, j) / l : 0;
    count.exp(p.N);
    count.other((safe ? 4 : 2) * p.N);  // maximum, difference; sum, quotient
    P.store(s, 1, i);
  }
}

template <class C>
void naive(const Problem& p, Arrays& x, C count) {
  write_scores(p, x, count);
  softmax_row(p, x, count, false);
  weigh_values(p, x, count);
}

template <class C>
void standard(const Problem& p, Arrays& x, C count) {
  write_scores(p, x, count);
  softmax_row(p, x, count, true);
  weigh_values(p, x, count);
}

}  // namespace

const Rung kNaive{.number = 1,
                  .name = "naive",
                  .title = "standard attention, naive softmax",
                  .file = "src/ladder/standard.cc",
                  .formula = "4Nd + 4N^2",
                  .tiled = false,
                  .squares = true,
                  .run = ONEPASS_RUN_RUNG(naive),
                  .totals = [](const Problem& p) { return square_totals(p, 4, 1, 2); }};

const Rung kStandard{.number = 1,
                     .name = "standard",
                     .title = "standard attention, safe softmax of a row in fast memory",
                     .file = "src/ladder/standard.cc",
                     .formula = "4Nd + 4N^2",
                     .tiled = false,
                     .squares = true,
                     .run = ONEPASS_RUN_RUNG(standard),
                     .totals = [](const Problem& p) { return square_totals(p, 4, 1, 4); }};

}  // namespace onepass::ladder
