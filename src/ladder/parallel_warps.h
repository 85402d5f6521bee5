// A thread block's warps, simulated: private registers (tiles), shared memory behind counting views, a counted barrier.
//
// Between two barriers the warps run one after the other, as good as any order if they do not depend on it: an element
// that one warp writes and another reads or writes, with no barrier between, is a race and counted. The inputs lie in
// shared memory from the start: bringing them there is the same for any split, and rungs 5, 6, 10 and 12 count it.
// A warp keeps its own slices in registers over its inner loop; a tile that all warps need whole does not fit there and
// is read from shared memory for every product.
#pragma once

#include "ladder/parallel.h"
#include "ladder/products.h"

namespace onepass::ladder {

/// A warp's own matrix.
struct Registers : Tile<Counting> {
  Registers(Counting count, std::int64_t height, std::int64_t width) : Tile(count, height, width, Kind::scratch) {}
};

struct Slice {
  std::int64_t begin, size;
  std::int64_t end() const { return begin + size; }
};
/// What warp w has of `rows` rows, `each` for every warp; the last warps have fewer or none where a tile is ragged.
inline Slice slice_of(std::int64_t w, std::int64_t each, std::int64_t rows) {
  const std::int64_t begin = min_of(w * each, rows);
  return {begin, min_of(each, rows - begin)};
}

/// m[r] = the largest of s[r][0 ... keys).
inline void row_max(Registers& m, const Registers& s, std::int64_t rows, std::int64_t keys) {
  for (std::int64_t r = 0; r < rows; ++r) {
    m[r] = -INFINITY;
    for (std::int64_t c = 0; c < keys; ++c) m[r] = max_of(m[r], s(r, c));
  }
}
/// s = exp(s - m), l[r] += its sum over the row.
inline void exponentials(Registers& s, Registers& l, Registers& m, std::int64_t rows, std::int64_t keys) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < keys; ++c) l[r] += s(r, c) = std::exp(s(r, c) - reference(m[r]));
  }
}

/// P = exp(S - L) in place of S, dS = scale P (dP - D) in place of dP.
inline void gradients(const Problem& p, Registers& s, Registers& dp, Registers& L, Registers& D, std::int64_t rows,
                      std::int64_t keys) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < keys; ++c) {
      s(r, c) = std::exp(s(r, c) - reference(L[r]));
      dp(r, c) = p.scale() * (s(r, c) * (dp(r, c) - D[r]));
    }
  }
}
/// Rows to ... of `sum` += rows 0 ... of `part`.
inline void add_rows(Registers& sum, std::int64_t to, const Registers& part, std::int64_t rows) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < part.cols; ++c) sum(to + r, c) += part(r, c);
  }
}
/// Slow memory, straight from registers: its rows `to` += rows of the tile, from `first` on; or = rows 0 ... of it.
inline void add_slow(std::vector<float>& to, Slice rows, const Registers& from, std::int64_t first) {
  for (std::int64_t r = 0; r < rows.size; ++r) {
    for (std::int64_t c = 0; c < from.cols; ++c) to[(rows.begin + r) * from.cols + c] += from(first + r, c);
  }
}
inline void store_slow(std::vector<float>& to, Slice rows, const Registers& from) {
  for (std::int64_t r = 0; r < rows.size; ++r) {
    for (std::int64_t c = 0; c < from.cols; ++c) to[(rows.begin + r) * from.cols + c] = from(r, c);
  }
}

class WarpGroup {
 public:
  WarpGroup(std::int64_t warps, WarpCount& warp_count, std::int64_t left_out)
      : count(warp_count), warps_(warps), left_out_(left_out) {}

  /// Lets every warp do f(warp) without waiting for the others.
  template <class F>
  void each(F f) {
    for (std::int64_t w = 0; w < warps_; ++w) f(w);
  }
  /// f(other) for every warp but this.
  template <class F>
  void others(std::int64_t warp, F f) {
    for (std::int64_t w = 0; w < warps_; ++w) {
      if (w != warp) f(w);
    }
  }
  /// All warps wait for each other.
  void barrier() {
    if (++count.barriers != left_out_) ++phase;
  }
  Counting counting() const { return {&count.ledger}; }

  WarpCount& count;
  std::int64_t phase = 0;

 private:
  std::int64_t warps_, left_out_;
};

/// A matrix in shared memory.
class Shared {
 public:
  Shared(WarpGroup& group, Array name, std::int64_t rows, std::int64_t cols,
         const std::vector<float>* contents = nullptr)
      : group_(group), name_(name), cols_(cols), cells_(static_cast<std::size_t>(rows * cols)) {
    for (std::size_t n = 0; contents != nullptr && n < cells_.size(); ++n) cells_[n].value = (*contents)[n];
  }

  /// tile = these rows, all columns or some.
  void load(std::int64_t warp, Registers& tile, Slice rows) { load(warp, tile, rows, {0, cols_}); }
  void load(std::int64_t warp, Registers& tile, Slice rows, Slice cols) {
    group_.counting().touch(name_, false, rows.begin, rows.size, cols.size);
    for (std::int64_t r = 0; r < rows.size; ++r) {
      for (std::int64_t c = 0; c < cols.size; ++c) {
        Cell& cell = at(rows.begin + r, cols.begin + c);
        tile(r, c) = cell.value;
        if (cell.written == group_.phase && cell.writer != warp) ++group_.count.races;
        if (cell.read != group_.phase) cell.readers = 0;
        cell.read = group_.phase;
        cell.readers |= 1u << warp;
      }
    }
  }
  /// These rows = rows of the tile, from `first` on.
  void store(std::int64_t warp, const Registers& tile, Slice rows, std::int64_t first) {
    store(warp, tile, rows, first, cols_);
  }
  void store(std::int64_t warp, const Registers& tile, Slice rows, std::int64_t first, std::int64_t cols) {
    group_.counting().touch(name_, true, rows.begin, rows.size, cols);
    for (std::int64_t r = 0; r < rows.size; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        Cell& cell = at(rows.begin + r, c);
        cell.value = tile(first + r, c);
        const bool written = cell.written == group_.phase && cell.writer != warp;
        const bool read = cell.read == group_.phase && (cell.readers & ~(1u << warp)) != 0;
        if (written || read) ++group_.count.races;
        cell.written = group_.phase;
        cell.writer = warp;
      }
    }
  }

 private:
  struct Cell {
    float value = 0;
    std::int64_t written = -1, writer = -1, read = -1;  // phases, a warp
    std::uint32_t readers = 0;                          // warps, a bit each, in phase `read`
  };
  Cell& at(std::int64_t r, std::int64_t c) { return cells_[static_cast<std::size_t>(r * cols_ + c)]; }

  WarpGroup& group_;
  Array name_;
  std::int64_t cols_;
  std::vector<Cell> cells_;
};

// The rungs: WarpRung::run, each in a file of its name.
void warps_split_k(const Problem&, const WarpBlock&, Arrays&, WarpCount&, std::int64_t left_out);
void warps_split_q(const Problem&, const WarpBlock&, Arrays&, WarpCount&, std::int64_t left_out);
void warps_backward_split_k(const Problem&, const WarpBlock&, Arrays&, WarpCount&, std::int64_t left_out);
void warps_backward_split_q(const Problem&, const WarpBlock&, Arrays&, WarpCount&, std::int64_t left_out);

}  // namespace onepass::ladder
