// Parallel rung: the split of a block among its warps, v2's: split-Q (FlashAttention-2, section 3.3).
//
// Each of W warps has Br / W queries and all of K and V. A row's maximum, sum and O are its warp's own for good, in
// registers until the end: the warps write nothing to shared memory and never wait for each other. The price is that K
// and V are read W times, where split-K read Q W times; of O, which split-K sent around in float32, nothing is left.
#include <deque>

#include "ladder/parallel_warps.h"

namespace onepass::ladder {
namespace {

struct Warp {  // registers
  Warp(Counting n, std::int64_t Br, std::int64_t Bc, std::int64_t d)
      : q(n, Br, d), o(n, Br, d), s(n, Br, Bc), m(n, Br, 1), l(n, Br, 1) {}
  Registers q, o, s, m, l;
  Slice rows{0, 0};
};

}  // namespace

void warps_split_q(const Problem& p, const WarpBlock& block, Arrays& x, WarpCount& count, std::int64_t left_out) {
  const std::int64_t W = block.warps, Br = block.blocks.Br, Bc = block.blocks.Bc, d = p.d;
  WarpGroup group(W, count, left_out);
  const Counting n = group.counting();
  Shared Q(group, Array::Q, p.N, d, &x[Array::Q]), K(group, Array::K, p.N, d, &x[Array::K]);
  Shared V(group, Array::V, p.N, d, &x[Array::V]);
  std::deque<Warp> warps;
  group.each([&](std::int64_t) { warps.emplace_back(n, Br / W, Bc, d); });
  for (std::int64_t i = 0; i < p.N; i += Br) {  // a thread block each
    group.each([&](std::int64_t w) {
      Warp& r = warps[w];
      const Slice mine = slice_of(w, Br / W, min_of(Br, p.N - i));
      r.rows = {i + mine.begin, mine.size};
      Q.load(w, r.q, r.rows);
      r.o.fill(0);
      r.m.fill(-INFINITY);
      r.l.fill(0);
    });
    for (std::int64_t j = 0; j < p.N; j += Bc) {
      const std::int64_t keys = min_of(Bc, p.N - j);
      group.each([&](std::int64_t w) {
        Warp& r = warps[w];
        Registers k(n, keys, d), v(n, keys, d), m_tile(n, Br / W, 1);
        K.load(w, k, {j, keys});
        score_tile(p, n, r.s, r.q, k, r.rows.begin, r.rows.size, j, keys);
        row_max(m_tile, r.s, r.rows.size, keys);
        for (std::int64_t t = 0; t < r.rows.size; ++t) {
          const float m_new = max_of(r.m[t], m_tile[t]), alpha = std::exp(r.m[t] - reference(m_new));
          r.m[t] = m_new;
          r.l[t] *= alpha;
          for (std::int64_t c = 0; c < d; ++c) r.o(t, c) *= alpha;
        }
        exponentials(r.s, r.l, r.m, r.rows.size, keys);
        V.load(w, v, {j, keys});
        add_product_ab(n, r.o, r.s, v, r.rows.size, keys);
      });
    }
    group.each([&](std::int64_t w) {
      Warp& r = warps[w];
      for (std::int64_t t = 0; t < r.rows.size; ++t) {
        const std::int64_t row = r.rows.begin + t;
        for (std::int64_t c = 0; c < d; ++c) x[Array::O][row * d + c] = r.l[t] > 0 ? r.o(t, c) / r.l[t] : 0;
        x[Array::L][row] = r.m[t] + std::log(r.l[t]);
      }
    });
  }
}

}  // namespace onepass::ladder
