// Rung 2: safe softmax in three passes.
//
// Where a row of S is too long for fast memory it streams through, and every pass of the softmax reads it again: the
// maximum m; the sum l of exp(s - m); the weights exp(s - m) / l. Two numbers of fast memory do, and S is read three
// times.
#include "ladder/rungs.h"
#include "ladder/score_matrix.h"

namespace onepass::ladder {
namespace {

template <class C>
void softmax_in_three_passes(const Problem& p, Arrays& x, C count) {
  auto S = slow(count, Array::S, x, p, p.N), P = slow(count, Array::P, x, p, p.N);
  for (std::int64_t i = 0; i < p.N; ++i) {
    Tile<C> statistics(count, 1, 2, Kind::scratch);
    float &m = statistics[0], &l = statistics[1];
    m = -INFINITY;
    for (std::int64_t j = 0; j < p.N; ++j) m = max_of(m, S.get(i, j));
    for (std::int64_t j = 0; j < p.N; ++j) l += std::exp(S.get(i, j) - reference(m));
    for (std::int64_t j = 0; j < p.N; ++j) P.put(i, j, l > 0 ? std::exp(S.get(i, j) - reference(m)) / l : 0);
    count.exp(2 * p.N);
    count.other(5 * p.N);
  }
}

template <class C>
void three_pass(const Problem& p, Arrays& x, C count) {
  write_scores(p, x, count);
  softmax_in_three_passes(p, x, count);
  weigh_values(p, x, count);
}

}  // namespace

const Rung kThreePass{.number = 2,
                      .name = "three_pass",
                      .title = "safe softmax in three passes over S",
                      .file = "src/ladder/three_pass.cc",
                      .formula = "4Nd + 6N^2",
                      .tiled = false,
                      .squares = true,
                      .run = ONEPASS_RUN_RUNG(three_pass),
                      .totals = [](const Problem& p) { return square_totals(p, 6, 2, 5); }};

}  // namespace onepass::ladder
