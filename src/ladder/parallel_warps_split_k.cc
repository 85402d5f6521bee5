// Parallel rung: the split of a block among its warps, v1's: split-K (FlashAttention-2, section 3.3).
//
// Each of W warps has Bc / W keys of a tile and all of Q. So each has only a part of every row's sum over the keys, and
// v1's loops are done with a row at each step: all warps write their parts to shared memory, wait, and add up. The row
// maxima have to be agreed on first. A step costs two barriers, and O goes through shared memory W - 1 times each way.
#include <deque>

#include "ladder/parallel_warps.h"

namespace onepass::ladder {
namespace {

struct Warp {  // registers
  Warp(Counting n, std::int64_t Br, std::int64_t Bc, std::int64_t d)
      : k(n, Bc, d), v(n, Bc, d), o(n, Br, d), s(n, Br, Bc), m(n, Br, 1), l(n, Br, 1) {}
  Registers k, v, o, s, m, l;
  Slice keys{0, 0};
};

/// v1's update of rows i ... of O, m and l in slow memory by the sums of a key tile.
void update(Arrays& x, std::int64_t d, std::int64_t i, Warp& r, Slice rows) {
  for (std::int64_t n = rows.begin; n < rows.end(); ++n) {
    float &m = x[Array::m][i + n], &l = x[Array::l][i + n];
    const float m_new = max_of(m, r.m[n]);
    const float old_part = std::exp(m - reference(m_new)) * l, new_part = std::exp(r.m[n] - reference(m_new));
    const float l_new = old_part + new_part * r.l[n], inverse = l_new > 0 ? 1 / l_new : 0;
    for (std::int64_t c = 0; c < d; ++c) {
      float& o = x[Array::O][(i + n) * d + c];
      o = inverse * (old_part * o + new_part * r.o(n, c));
    }
    m = m_new;
    l = l_new;
  }
}

}  // namespace

void warps_split_k(const Problem& p, const WarpBlock& block, Arrays& x, WarpCount& count, std::int64_t left_out) {
  const std::int64_t W = block.warps, Br = block.blocks.Br, Bc = block.blocks.Bc, d = p.d;
  WarpGroup group(W, count, left_out);
  const Counting n = group.counting();
  Shared Q(group, Array::Q, p.N, d, &x[Array::Q]), K(group, Array::K, p.N, d, &x[Array::K]);
  Shared V(group, Array::V, p.N, d, &x[Array::V]), O(group, Array::O, W * Br, d);  // O, m, l: a part for each warp
  Shared m(group, Array::m, W * Br, 1), l(group, Array::l, W * Br, 1);
  x[Array::O].assign(x[Array::O].size(), 0);
  x[Array::m].assign(x[Array::m].size(), -INFINITY);
  x[Array::l].assign(x[Array::l].size(), 0);
  std::deque<Warp> warps;
  group.each([&](std::int64_t) { warps.emplace_back(n, Br, Bc / W, d); });
  for (std::int64_t j = 0; j < p.N; j += Bc) {
    group.each([&](std::int64_t w) {
      const Slice mine = slice_of(w, Bc / W, min_of(Bc, p.N - j));
      warps[w].keys = {j + mine.begin, mine.size};
      K.load(w, warps[w].k, warps[w].keys);
      V.load(w, warps[w].v, warps[w].keys);
    });
    for (std::int64_t i = 0; i < p.N; i += Br) {
      const std::int64_t rows = min_of(Br, p.N - i);
      group.each([&](std::int64_t w) {
        Warp& r = warps[w];
        Registers q(n, rows, d);
        Q.load(w, q, {i, rows});
        score_tile(p, n, r.s, q, r.k, i, rows, r.keys.begin, r.keys.size);
        row_max(r.m, r.s, rows, r.keys.size);
        m.store(w, r.m, {w * Br, rows}, 0);
      });
      group.barrier();  // the maxima are there
      group.each([&](std::int64_t w) {
        Warp& r = warps[w];
        group.others(w, [&](std::int64_t v) {
          Registers other(n, rows, 1);
          m.load(w, other, {v * Br, rows});
          for (std::int64_t t = 0; t < rows; ++t) r.m[t] = max_of(r.m[t], other[t]);
        });
        r.l.fill(0);
        r.o.fill(0);
        exponentials(r.s, r.l, r.m, rows, r.keys.size);
        add_product_ab(n, r.o, r.s, r.v, rows, r.keys.size);
        group.others(w, [&](std::int64_t v) {
          const Slice theirs = slice_of(v, Br / W, rows);
          O.store(w, r.o, {w * Br + theirs.begin, theirs.size}, theirs.begin);
          l.store(w, r.l, {w * Br + theirs.begin, theirs.size}, theirs.begin);
        });
      });
      group.barrier();  // the parts of O and l are there
      group.each([&](std::int64_t w) {
        Warp& r = warps[w];
        const Slice mine = slice_of(w, Br / W, rows);
        group.others(w, [&](std::int64_t v) {
          Registers part(n, mine.size, d), other(n, mine.size, 1);
          O.load(w, part, {v * Br + mine.begin, mine.size});
          l.load(w, other, {v * Br + mine.begin, mine.size});
          add_rows(r.o, mine.begin, part, mine.size);
          add_rows(r.l, mine.begin, other, mine.size);
        });
        update(x, d, i, r, mine);
      });
    }
  }
}

}  // namespace onepass::ladder
