// Parallel rung: the split of a block among its warps in the backward, without split-K (FlashAttention-2, section 3.3).
//
// Five products cannot all be split along the same side. S and dP are split by queries, Br / W a warp, and dQ with
// them: its sum over the keys is the warp's own. dV = P^T dO and dK = dS^T Q are sums over queries, so they are split
// by keys, and each warp needs its columns of P and dS from all others: both go through shared memory, once each way.
// No sum is split any more, but the barriers stay. What is saved is the W - 1 float32 copies of dQ; K and V are read W
// times for that, so with few warps little is won.
#include <deque>

#include "ladder/parallel_warps.h"

namespace onepass::ladder {
namespace {

struct Warp {  // registers
  Warp(Counting n, std::int64_t Br, std::int64_t Bc, std::int64_t W, std::int64_t d)
      : dk(n, Bc / W, d), dv(n, Bc / W, d), p(n, Br / W, Bc), ds(n, Br / W, Bc) {}
  Registers dk, dv, p, ds;
};

}  // namespace

void warps_backward_split_q(const Problem& p, const WarpBlock& block, Arrays& x, WarpCount& count,
                            std::int64_t left_out) {
  const std::int64_t W = block.warps, Br = block.blocks.Br, Bc = block.blocks.Bc, d = p.d;
  x[Array::dQ].assign(x[Array::dQ].size(), 0);
  for (std::int64_t j = 0; j < p.N; j += Bc) {  // a thread block each
    const std::int64_t keys = min_of(Bc, p.N - j);
    WarpGroup group(W, count, left_out);
    const Counting n = group.counting();
    Shared Q(group, Array::Q, p.N, d, &x[Array::Q]), K(group, Array::K, p.N, d, &x[Array::K]);
    Shared V(group, Array::V, p.N, d, &x[Array::V]), dO(group, Array::dO, p.N, d, &x[Array::dO]);
    Shared L(group, Array::L, p.N, 1, &x[Array::L]), D(group, Array::D, p.N, 1, &x[Array::D]);
    Shared P(group, Array::P, Br, Bc), dS(group, Array::dS, Br, Bc);
    std::deque<Warp> warps;
    group.each([&](std::int64_t) { warps.emplace_back(n, Br, Bc, W, d); });
    for (std::int64_t i = 0; i < p.N; i += Br) {
      const std::int64_t rows = min_of(Br, p.N - i);
      if (i > 0) group.barrier();  // P and dS of the step before have been read
      group.each([&](std::int64_t w) {
        Warp& r = warps[w];
        const Slice tile = slice_of(w, Br / W, rows), mine{i + tile.begin, tile.size};
        Registers q(n, mine.size, d), d_o(n, mine.size, d), l(n, mine.size, 1), delta(n, mine.size, 1);
        Registers k(n, keys, d), v(n, keys, d);
        Q.load(w, q, mine);
        K.load(w, k, {j, keys});
        score_tile(p, n, r.p, q, k, mine.begin, mine.size, j, keys);
        dO.load(w, d_o, mine);
        V.load(w, v, {j, keys});
        product_abt(n, r.ds, d_o, v, mine.size, keys);
        L.load(w, l, mine);
        D.load(w, delta, mine);
        gradients(p, r.p, r.ds, l, delta, mine.size, keys);
        P.store(w, r.p, tile, 0, keys);
        dS.store(w, r.ds, tile, 0, keys);
      });
      group.barrier();  // P and dS are there
      group.each([&](std::int64_t w) {
        Warp& r = warps[w];
        const Slice columns = slice_of(w, Bc / W, keys), mine = slice_of(w, Br / W, rows);
        Registers part(n, rows, columns.size), all(n, rows, d), k(n, keys, d), dq(n, mine.size, d);
        P.load(w, part, {0, rows}, columns);
        dO.load(w, all, {i, rows});
        add_product_atb(n, r.dv, part, all, rows, columns.size);
        dS.load(w, part, {0, rows}, columns);
        Q.load(w, all, {i, rows});
        add_product_atb(n, r.dk, part, all, rows, columns.size);
        K.load(w, k, {j, keys});
        add_product_ab(n, dq, r.ds, k, mine.size, keys);
        add_slow(x[Array::dQ], {i + mine.begin, mine.size}, dq, 0);
      });
    }
    group.each([&](std::int64_t w) {
      const Slice columns = slice_of(w, Bc / W, keys);
      store_slow(x[Array::dK], {j + columns.begin, columns.size}, warps[w].dk);
      store_slow(x[Array::dV], {j + columns.begin, columns.size}, warps[w].dv);
    });
  }
}

}  // namespace onepass::ladder
