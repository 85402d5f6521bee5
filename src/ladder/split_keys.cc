// Rung 8: split over keys, then merge (Flash-Decoding; Dao, Haziza, Massa, Sizov 2023).
//
// Few query rows leave most processors idle, so the keys are shared out too. Each part gives an O and an L of its own
// keys; two parts merge exactly: L = log(exp La + exp Lb), O = exp(La - L) Oa + exp(Lb - L) Ob. The parts' O and L go
// through slow memory: S (Nd + N) more, written and read.
#include "ladder/products.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

struct Part {
  std::int64_t begin, keys;
};
Part part_of(const Problem& p, std::int64_t n) {
  const std::int64_t begin = p.N * n / p.splits;
  return {begin, p.N * (n + 1) / p.splits - begin};
}

template <class C>
void attend_part(const Problem& p, Arrays& x, C count, const Part& part, Slow<C>& O, Slow<C>& L) {
  const Blocks b = blocks_of(p);
  auto Q = slow(count, Array::Q, x, p, p.d), K = slow(count, Array::K, x, p, p.d), V = slow(count, Array::V, x, p, p.d);
  Tile<C> q(count, b.Br, p.d, Kind::operand), o(count, b.Br, p.d, Kind::operand);
  Tile<C> k(count, b.Bc, p.d, Kind::operand), v(count, b.Bc, p.d, Kind::operand);
  Tile<C> s(count, b.Br, b.Bc, Kind::scratch), m(count, b.Br, 1, Kind::scratch), l(count, b.Br, 1, Kind::scratch);
  for (std::int64_t i = 0; i < p.N; i += b.Br) {
    const std::int64_t rows = min_of(b.Br, p.N - i);
    Q.load(q, rows, i);
    o.fill(0);
    m.fill(-INFINITY);
    l.fill(0);
    for (std::int64_t j = part.begin; j < part.begin + part.keys; j += b.Bc) {
      const std::int64_t keys = min_of(b.Bc, part.begin + part.keys - j);
      K.load(k, keys, j);
      V.load(v, keys, j);
      product_abt(count, s, q, k, rows, keys, p.scale());
      mask_tile(p, s, i, rows, j, keys);
      for (std::int64_t r = 0; r < rows; ++r) {
        float m_new = m[r];
        for (std::int64_t c = 0; c < keys; ++c) m_new = max_of(m_new, s(r, c));
        const float alpha = std::exp(m[r] - reference(m_new));
        l[r] *= alpha;
        for (std::int64_t c = 0; c < keys; ++c) l[r] += s(r, c) = std::exp(s(r, c) - reference(m_new));
        for (std::int64_t c = 0; c < p.d; ++c) o(r, c) *= alpha;
        m[r] = m_new;
      }
      add_product_ab(count, o, s, v, rows, keys);
      count.exp(rows * (keys + 1));
      count.other(rows * (3 * keys + p.d + 1));
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < p.d; ++c) o(r, c) = l[r] > 0 ? o(r, c) / l[r] : 0;
      l[r] = m[r] + std::log(l[r]);
    }
    count.other(rows * (p.d + 1));
    O.store(o, rows, i);
    L.store(l, rows, i);
  }
}

template <class C>
void split_keys(const Problem& p, Arrays& x, C count) {
  const std::size_t parts = static_cast<std::size_t>(p.splits);
  std::vector<std::vector<float>> o(parts, std::vector<float>(static_cast<std::size_t>(p.N * p.d)));
  std::vector<std::vector<float>> l(parts, std::vector<float>(static_cast<std::size_t>(p.N)));
  std::vector<Slow<C>> Os, Ls;  // partial results are float32 whatever the type
  for (std::size_t n = 0; n < parts; ++n) {
    Os.emplace_back(count, Array::O, o[n], p.d, DType::f32);
    Ls.emplace_back(count, Array::L, l[n], 1, DType::f32);
    attend_part(p, x, count, part_of(p, static_cast<std::int64_t>(n)), Os[n], Ls[n]);
  }
  auto O = slow(count, Array::O, x, p, p.d), L = slow(count, Array::L, x, p, 1);
  Tile<C> sum(count, 1, p.d, Kind::operand), one(count, 1, p.d, Kind::operand), logs(count, 1, p.splits, Kind::scratch);
  for (std::int64_t i = 0; i < p.N; ++i) {
    float top = -INFINITY, total = 0;
    for (std::size_t n = 0; n < parts; ++n) top = max_of(top, logs(0, static_cast<std::int64_t>(n)) = Ls[n].get(i));
    for (std::size_t n = 0; n < parts; ++n) total += std::exp(logs(0, static_cast<std::int64_t>(n)) - reference(top));
    sum.fill(0);
    for (std::size_t n = 0; n < parts; ++n) {
      Os[n].load(one, 1, i);
      const float weight = total > 0 ? std::exp(logs(0, static_cast<std::int64_t>(n)) - reference(top)) / total : 0;
      for (std::int64_t c = 0; c < p.d; ++c) sum(0, c) += weight * one(0, c);
    }
    count.exp(2 * p.splits);
    count.other(p.splits * (2 * p.d + 4));
    O.store(sum, 1, i);
    L.put(i, 0, top + std::log(total));
  }
}

std::int64_t elements(const Problem& p) {
  const std::int64_t Nd = p.N * p.d;
  return p.splits * Nd + blocks_of(p).Tr(p.N) * 2 * Nd + 2 * p.splits * (Nd + p.N) + Nd + p.N;
}

}  // namespace

const Rung kSplitKeys{"split_keys",
                      "v2 split over keys, and a merge (Flash-Decoding)",
                      "src/ladder/split_keys.cc",
                      false,
                      true,
                      ONEPASS_RUN_RUNG(split_keys),
                      elements,
                      "S Nd + Tr 2Nd + 2S (Nd + N) + Nd + N"};

}  // namespace onepass::ladder
