// Rung 3: the online softmax, two passes (Milakov and Gimelshein 2018).
//
// m and l are found together: whenever the maximum grows, the sum so far is rescaled (online.h has the proof). So S is
// read twice, not three times.
// And S need not exist: a first pass over the keys finds m and l from scores that are forgotten at once, a second one
// computes the scores again and sums exp(s - m) / l v. No N x N matrix is left, only K twice and V once for every row.
#include "ladder/online.h"
#include "ladder/rungs.h"
#include "ladder/score_matrix.h"

namespace onepass::ladder {
namespace {

template <class C>
void two_pass(const Problem& p, Arrays& x, C count) {
  write_scores(p, x, count);
  {
    auto S = slow(count, Array::S, x, p, p.N), P = slow(count, Array::P, x, p, p.N);
    for (std::int64_t i = 0; i < p.N; ++i) {
      Tile<C> statistics(count, 1, 2, Kind::scratch);  // m and l
      Online row;
      for (std::int64_t j = 0; j < p.N; ++j) row.take(S.get(i, j));
      for (std::int64_t j = 0; j < p.N; ++j) P.put(i, j, std::exp(S.get(i, j) - reference(row.m)) / row.l);
      count.exp(3 * p.N);
      count.other(7 * p.N);  // maximum, two differences, product and sum; difference and quotient
    }
  }
  weigh_values(p, x, count);
}

template <class C>
void two_pass_attention(const Problem& p, Arrays& x, C count) {
  auto Q = slow(count, Array::Q, x, p, p.d), K = slow(count, Array::K, x, p, p.d);
  auto V = slow(count, Array::V, x, p, p.d), O = slow(count, Array::O, x, p, p.d);
  Tile<C> q(count, 1, p.d, Kind::operand), k(count, 1, p.d, Kind::operand), v(count, 1, p.d, Kind::operand);
  Tile<C> o(count, 1, p.d, Kind::operand), s(count, 1, 1, Kind::scratch), statistics(count, 1, 2, Kind::scratch);
  for (std::int64_t i = 0; i < p.N; ++i) {
    Q.load(q, 1, i);
    Online row;
    for (std::int64_t j = 0; j < p.N; ++j) {  // first pass: m and l
      K.load(k, 1, j);
      score_tile(p, count, s, q, k, i, 1, j, 1);
      row.take(s[0]);
    }
    o.fill(0);
    for (std::int64_t j = 0; j < p.N; ++j) {  // second pass: the scores again, and O
      K.load(k, 1, j);
      V.load(v, 1, j);
      score_tile(p, count, s, q, k, i, 1, j, 1);
      s[0] = std::exp(s[0] - reference(row.m)) / row.l;
      add_product_ab(count, o, s, v, 1, 1);
    }
    count.exp(3 * p.N);
    count.other(7 * p.N);
    O.store(o, 1, i);
  }
}

}  // namespace

const Rung kTwoPass{.number = 3,
                    .name = "two_pass",
                    .title = "online softmax in two passes over S",
                    .file = "src/ladder/two_pass.cc",
                    .formula = "4Nd + 5N^2",
                    .tiled = false,
                    .squares = true,
                    .run = ONEPASS_RUN_RUNG(two_pass),
                    .totals = [](const Problem& p) { return square_totals(p, 5, 3, 7); }};

const Rung kTwoPassAttention{
    .number = 3,
    .name = "two_pass_attention",
    .title = "attention in two passes over the keys, no S in slow memory",
    .file = "src/ladder/two_pass.cc",
    .formula = "2Nd + 3N^2 d",
    .tiled = false,
    .run = ONEPASS_RUN_RUNG(two_pass_attention),
    .totals = [](const Problem& p) {
      const std::int64_t N2 = p.N * p.N;
      return Totals{{2 * p.N * p.d + 3 * N2 * p.d, 0}, 6 * N2 * p.d, 9 * N2, 3 * N2, 4 * p.d + 3};
    }};

}  // namespace onepass::ladder
