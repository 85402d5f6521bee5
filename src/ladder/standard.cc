// Rungs 1 to 3: attention with the score matrix in slow memory.
//
// Standard attention is three kernels: S = Q K^T, P = softmax(S), O = P V. Each writes an N x N matrix that the next
// one reads, and that traffic, not the arithmetic, is its cost. The softmax has three ages:
//   naive        P = exp(S) / sum exp(S): one pass, but exp overflows (in float16 from x = 11.09 on)
//   three passes the maximum, then the sum of exp(S - m), then P: safe, and every pass reads S again
//   two passes   m and l together ("online", Milakov and Gimelshein 2018): when the maximum grows from m to m', the sum
//                so far is rescaled, l' = l exp(m - m') + exp(x - m'). By induction l = sum exp(x_i - m) after each
//                step: sum exp(x_i - m') = exp(m - m') sum exp(x_i - m).
// The products are the ideal ones of the papers' counts: a whole K (or V) is held, so that each operand moves once.
#include "ladder/products.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

template <class C>
void write_scores(const Problem& p, Arrays& x, C count) {  // S = Q K^T
  auto Q = slow(count, Array::Q, x, p, p.d), K = slow(count, Array::K, x, p, p.d), S = slow(count, Array::S, x, p, p.N);
  Tile<C> k(count, p.N, p.d, Kind::operand), q(count, 1, p.d, Kind::operand), s(count, 1, p.N, Kind::scratch);
  K.load(k, p.N, 0);
  for (std::int64_t i = 0; i < p.N; ++i) {
    Q.load(q, 1, i);
    product_abt(count, s, q, k, 1, p.N, p.scale());
    mask_tile(p, s, i, 1, 0, p.N);
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
      if (!safe && p.dtype == DType::f16) e = f16_to_float(float_to_f16(e));  // where the naive form breaks
      l += s(0, j) = e;
    }
    for (std::int64_t j = 0; j < p.N; ++j) s(0, j) = l > 0 ? s(0, j) / l : 0;
    count.exp(p.N);
    count.other((safe ? 4 : 2) * p.N);
    P.store(s, 1, i);
  }
}

/// S streams through fast memory element by element: three reads, or two with m and l kept online.
template <class C>
void softmax_streamed(const Problem& p, Arrays& x, C count, bool online) {
  auto S = slow(count, Array::S, x, p, p.N), P = slow(count, Array::P, x, p, p.N);
  for (std::int64_t i = 0; i < p.N; ++i) {
    Tile<C> statistics(count, 1, 2, Kind::scratch);
    float m = -INFINITY, l = 0;
    if (online) {
      for (std::int64_t j = 0; j < p.N; ++j) {
        const float s = S.get(i, j), m_new = max_of(m, s);
        l = l * std::exp(m - reference(m_new)) + std::exp(s - reference(m_new));
        m = m_new;
      }
      count.exp(2 * p.N);
      count.other(5 * p.N);
    } else {
      for (std::int64_t j = 0; j < p.N; ++j) m = max_of(m, S.get(i, j));
      for (std::int64_t j = 0; j < p.N; ++j) l += std::exp(S.get(i, j) - reference(m));
      count.exp(p.N);
      count.other(3 * p.N);
    }
    for (std::int64_t j = 0; j < p.N; ++j) P.put(i, j, l > 0 ? std::exp(S.get(i, j) - reference(m)) / l : 0);
    count.exp(p.N);
    count.other(2 * p.N);
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
template <class C>
void three_pass(const Problem& p, Arrays& x, C count) {
  write_scores(p, x, count);
  softmax_streamed(p, x, count, false);
  weigh_values(p, x, count);
}
template <class C>
void two_pass(const Problem& p, Arrays& x, C count) {
  write_scores(p, x, count);
  softmax_streamed(p, x, count, true);
  weigh_values(p, x, count);
}

constexpr const char* kFile = "src/ladder/standard.cc";
std::int64_t squares(const Problem& p, std::int64_t n) {
  return 4 * p.N * p.d + n * p.N * p.N;
}

}  // namespace

const Rung kNaive{"naive",
                  "standard attention, naive softmax",
                  kFile,
                  false,
                  false,
                  ONEPASS_RUN_RUNG(naive),
                  [](const Problem& p) { return squares(p, 4); },
                  "4Nd + 4N^2"};
const Rung kStandard{"standard",
                     "standard attention, a row of S at a time",
                     kFile,
                     false,
                     false,
                     ONEPASS_RUN_RUNG(standard),
                     [](const Problem& p) { return squares(p, 4); },
                     "4Nd + 4N^2"};
const Rung kThreePass{"three_pass",
                      "safe softmax in three passes over S",
                      kFile,
                      false,
                      false,
                      ONEPASS_RUN_RUNG(three_pass),
                      [](const Problem& p) { return squares(p, 6); },
                      "4Nd + 6N^2"};
const Rung kTwoPass{"two_pass",
                    "online softmax in two passes over S",
                    kFile,
                    false,
                    false,
                    ONEPASS_RUN_RUNG(two_pass),
                    [](const Problem& p) { return squares(p, 5); },
                    "4Nd + 5N^2"};

}  // namespace onepass::ladder
