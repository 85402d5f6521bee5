// Rungs 12 and 13: the backward of FlashAttention v2 (algorithm 2).
//
// D = rowsum(dO O) is found once, before the loops, so O is not read again in them; L = m + log l replaces m and l, and
// P = exp(S - L) needs no division. Blocks of keys own their dK and dV and can run in parallel; only dQ is shared. Rung
// 13 takes the blocks in any order, as parallel workers would, and adds to dQ in the order of the keys: a worker waits
// until it is its turn at a block of dQ. The sums, and so every bit, are those of the sequential loop.
#include <memory>

#include "ladder/products.h"
#include "ladder/rungs.h"

namespace onepass::ladder {
namespace {

template <class C>
void row_sums(const Problem& p, Arrays& x, C count) {  // D = rowsum(dO O); dQ = 0
  auto O = slow(count, Array::O, x, p, p.d), dO = slow(count, Array::dO, x, p, p.d);
  auto D = slow(count, Array::D, x, p, 1), dQ = slow(count, Array::dQ, x, p, p.d);
  Tile<C> o(count, 1, p.d, Kind::operand), d_o(count, 1, p.d, Kind::operand), zero(count, 1, p.d, Kind::operand);
  for (std::int64_t i = 0; i < p.N; ++i) {
    O.load(o, 1, i);
    dO.load(d_o, 1, i);
    float sum = 0;
    for (std::int64_t c = 0; c < p.d; ++c) sum += d_o(0, c) * o(0, c);
    count.other(2 * p.d);
    D.put(i, 0, sum);
    dQ.store(zero, 1, i);
  }
}

/// What one block of keys does; dQ of block i is ready for it when turn[i] has come to its number.
template <class C>
class Column {
 public:
  Column(const Problem& p, Arrays& x, C count, std::int64_t number)
      : p_(p),
        x_(x),
        count_(count),
        b_(blocks_of(p)),
        j_(number * b_.Bc),
        keys_(min_of(b_.Bc, p.N - j_)),
        number_(number),
        k_(count, b_.Bc, p.d, Kind::operand),
        v_(count, b_.Bc, p.d, Kind::operand),
        dk_(count, b_.Bc, p.d, Kind::operand),
        dv_(count, b_.Bc, p.d, Kind::operand) {
    slow(count, Array::K, x, p, p.d).load(k_, keys_, j_);
    slow(count, Array::V, x, p, p.d).load(v_, keys_, j_);
  }

  /// The next block of query rows if its turn has come; false if this has to wait.
  bool step(std::vector<std::int64_t>& turn) {
    if (turn[static_cast<std::size_t>(i_ / b_.Br)] != number_) return false;
    ++turn[static_cast<std::size_t>(i_ / b_.Br)];
    const std::int64_t rows = min_of(b_.Br, p_.N - i_);
    auto load = [&](Array a, Tile<C>& tile) { slow(count_, a, x_, p_, tile.cols).load(tile, rows, i_); };
    Tile<C> q(count_, b_.Br, p_.d, Kind::operand), d_o(count_, b_.Br, p_.d, Kind::operand);
    Tile<C> dq(count_, b_.Br, p_.d, Kind::operand), s(count_, b_.Br, b_.Bc, Kind::scratch);
    Tile<C> ds(count_, b_.Br, b_.Bc, Kind::scratch), l(count_, b_.Br, 1, Kind::scratch),
        D(count_, b_.Br, 1, Kind::scratch);
    load(Array::Q, q);
    load(Array::dO, d_o);
    load(Array::dQ, dq);
    load(Array::L, l);
    load(Array::D, D);
    product_abt(count_, s, q, k_, rows, keys_, p_.scale());
    mask_tile(p_, s, i_, rows, j_, keys_);
    product_abt(count_, ds, d_o, v_, rows, keys_, 1);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < keys_; ++c) {
        s(r, c) = std::exp(s(r, c) - reference(l[r]));
        ds(r, c) = s(r, c) * (ds(r, c) - D[r]);
      }
    }
    count_.exp(rows * keys_);
    count_.other(3 * rows * keys_);
    add_product_atb(count_, dv_, s, d_o, rows, keys_);
    add_product_atb(count_, dk_, ds, q, rows, keys_, p_.scale());
    add_product_ab(count_, dq, ds, k_, rows, keys_, p_.scale());
    slow(count_, Array::dQ, x_, p_, p_.d).store(dq, rows, i_);
    i_ += b_.Br;
    return true;
  }
  bool done() const { return i_ >= p_.N; }
  void finish() {
    slow(count_, Array::dK, x_, p_, p_.d).store(dk_, keys_, j_);
    slow(count_, Array::dV, x_, p_, p_.d).store(dv_, keys_, j_);
  }

 private:
  const Problem& p_;
  Arrays& x_;
  C count_;
  Blocks b_;
  std::int64_t j_, keys_, number_, i_ = 0;
  Tile<C> k_, v_, dk_, dv_;
};

/// `workers` columns at a time, a step of one of them after the other, the youngest first.
template <class C>
void columns(const Problem& p, Arrays& x, C count, std::int64_t workers) {
  row_sums(p, x, count);
  const Blocks b = blocks_of(p);
  std::vector<std::int64_t> turn(static_cast<std::size_t>(b.Tr(p.N)), 0);
  std::vector<std::unique_ptr<Column<C>>> running;
  std::int64_t next = 0;
  while (next < b.Tc(p.N) || !running.empty()) {
    while (next < b.Tc(p.N) && static_cast<std::int64_t>(running.size()) < workers) {
      running.push_back(std::make_unique<Column<C>>(p, x, count, next++));
    }
    for (auto column = running.rbegin(); column != running.rend(); ++column) (*column)->step(turn);
    std::erase_if(running, [](const auto& column) {
      if (column->done()) column->finish();
      return column->done();
    });
  }
}

template <class C>
void backward_v2(const Problem& p, Arrays& x, C count) {
  columns(p, x, count, 1);
}
template <class C>
void backward_v2_parallel(const Problem& p, Arrays& x, C count) {
  columns(p, x, count, 4);
}

std::int64_t elements(const Problem& p) {
  return 3 * p.N * p.d + p.N + 4 * p.N * p.d + blocks_of(p).Tc(p.N) * (4 * p.N * p.d + 2 * p.N);
}
constexpr const char* kFile = "src/ladder/backward_v2.cc";

}  // namespace

const Rung kBackwardV2{"backward_v2", "v2 backward: D once, L for m and l", kFile,    true,
                       true,          ONEPASS_RUN_RUNG(backward_v2),        elements, "7Nd + N + Tc (4Nd + 2N)"};
const Rung kBackwardV2Parallel{"backward_v2_parallel",
                               "v2 backward, columns in parallel, dQ in a fixed order",
                               kFile,
                               true,
                               true,
                               ONEPASS_RUN_RUNG(backward_v2_parallel),
                               elements,
                               "7Nd + N + Tc (4Nd + 2N)"};

}  // namespace onepass::ladder
