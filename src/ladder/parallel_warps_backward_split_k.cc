// Parallel rung: the split of a block among its warps in the backward, split-K.
//
// Each of W warps has Bc / W keys of a tile: its dK and dV are its own and stay in registers. But dQ = dS K is a sum
// over the keys, so each warp has only a part of it: written to shared memory and added up at every step, in float32,
// W - 1 copies of dQ each way, and two barriers. Both splits start from v2's L and D, so that only the split differs.
#include <deque>

#include "ladder/parallel_warps.h"

namespace onepass::ladder {
namespace {

struct Warp {  // registers
  Warp(Counting n, std::int64_t Br, std::int64_t Bc, std::int64_t d)
      : k(n, Bc, d), v(n, Bc, d), dk(n, Bc, d), dv(n, Bc, d), dq(n, Br, d), p(n, Br, Bc), ds(n, Br, Bc) {}
  Registers k, v, dk, dv, dq, p, ds;
  Slice keys{0, 0};
};

}  // namespace

void warps_backward_split_k(const Problem& p, const WarpBlock& block, Arrays& x, WarpCount& count,
                            std::int64_t left_out) {
  const std::int64_t W = block.warps, Br = block.blocks.Br, Bc = block.blocks.Bc, d = p.d;
  WarpGroup group(W, count, left_out);
  const Counting n = group.counting();
  Shared Q(group, Array::Q, p.N, d, &x[Array::Q]), K(group, Array::K, p.N, d, &x[Array::K]);
  Shared V(group, Array::V, p.N, d, &x[Array::V]), dO(group, Array::dO, p.N, d, &x[Array::dO]);
  Shared L(group, Array::L, p.N, 1, &x[Array::L]), D(group, Array::D, p.N, 1, &x[Array::D]);
  Shared dQ(group, Array::dQ, W * Br, d);  // a part for each warp
  x[Array::dQ].assign(x[Array::dQ].size(), 0);
  std::deque<Warp> warps;
  group.each([&](std::int64_t) { warps.emplace_back(n, Br, Bc / W, d); });
  for (std::int64_t j = 0; j < p.N; j += Bc) {
    group.each([&](std::int64_t w) {
      Warp& r = warps[w];
      const Slice mine = slice_of(w, Bc / W, min_of(Bc, p.N - j));
      r.keys = {j + mine.begin, mine.size};
      K.load(w, r.k, r.keys);
      V.load(w, r.v, r.keys);
      r.dk.fill(0);
      r.dv.fill(0);
    });
    for (std::int64_t i = 0; i < p.N; i += Br) {
      const std::int64_t rows = min_of(Br, p.N - i);
      if (i + j > 0) group.barrier();  // the parts of the step before have been read
      group.each([&](std::int64_t w) {
        Warp& r = warps[w];
        Registers q(n, rows, d), d_o(n, rows, d), l(n, rows, 1), delta(n, rows, 1);
        Q.load(w, q, {i, rows});
        score_tile(p, n, r.p, q, r.k, i, rows, r.keys.begin, r.keys.size);
        dO.load(w, d_o, {i, rows});
        product_abt(n, r.ds, d_o, r.v, rows, r.keys.size);
        L.load(w, l, {i, rows});
        D.load(w, delta, {i, rows});
        gradients(p, r.p, r.ds, l, delta, rows, r.keys.size);
        dO.load(w, d_o, {i, rows});  // each product reads its tile
        add_product_atb(n, r.dv, r.p, d_o, rows, r.keys.size);
        Q.load(w, q, {i, rows});
        add_product_atb(n, r.dk, r.ds, q, rows, r.keys.size);
        r.dq.fill(0);
        add_product_ab(n, r.dq, r.ds, r.k, rows, r.keys.size);
        group.others(w, [&](std::int64_t v) {
          const Slice theirs = slice_of(v, Br / W, rows);
          dQ.store(w, r.dq, {w * Br + theirs.begin, theirs.size}, theirs.begin);
        });
      });
      group.barrier();  // the parts are there
      group.each([&](std::int64_t w) {
        Warp& r = warps[w];
        const Slice mine = slice_of(w, Br / W, rows);
        group.others(w, [&](std::int64_t v) {
          Registers part(n, mine.size, d);
          dQ.load(w, part, {v * Br + mine.begin, mine.size});
          add_rows(r.dq, mine.begin, part, mine.size);
        });
        add_slow(x[Array::dQ], {i + mine.begin, mine.size}, r.dq, mine.begin);
      });
    }
    group.each([&](std::int64_t w) {
      store_slow(x[Array::dK], warps[w].keys, warps[w].dk);
      store_slow(x[Array::dV], warps[w].keys, warps[w].dv);
    });
  }
}

}  // namespace onepass::ladder
