// The ledger: what a rung moves between slow memory (HBM, DRAM) and fast memory (shared memory, cache), and computes.
// Rungs touch slow memory only through Slow, and hold what they load in Tile, so nothing moves uncounted.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/half.h"

namespace onepass::ladder {

/// Oi and Li: partial results of a part of the keys.
enum class Array : int { Q, K, V, O, dO, dQ, dK, dV, S, P, dS, dP, m, l, L, D, Oi, Li, kCount };
inline constexpr int kArrays = static_cast<int>(Array::kCount);
inline constexpr const char* kArrayNames[kArrays] = {"Q", "K",  "V",  "O", "dO", "dQ", "dK", "dV", "S",
                                                     "P", "dS", "dP", "m", "l",  "L",  "D",  "Oi", "Li"};
/// Statistics and partial results are float32 whatever the type of the rest.
inline constexpr bool is_float32(Array a) {
  return a >= Array::m;
}

/// Elements moved: of the storage type, and float32 ones.
struct Elements {
  std::int64_t stored = 0, float32 = 0;
  std::int64_t bytes(DType dtype) const { return stored * dtype_size(dtype) + 4 * float32; }
  bool operator==(const Elements&) const = default;
};

/// One transfer of rows [row, row + rows), for pictures of the order of the loops.
struct Touch {
  Array array;
  bool write;
  std::int64_t row, rows;
};

/// Counts are in elements.
struct Ledger {
  std::array<std::int64_t, kArrays> read{}, written{};
  std::vector<Touch>* touches = nullptr;   // null: not kept
  std::int64_t tiles = 0, tiles_peak = 0;  // tiles of Q, K, V, O and their gradients: what the papers fit into M
  std::int64_t held = 0, held_peak = 0;    // those, and S, P, m, l as well: what must really fit
  std::int64_t matmul_flops = 0, other_flops = 0, exps = 0;

  Elements moved() const {
    Elements sum;
    for (int a = 0; a < kArrays; ++a) {
      (is_float32(static_cast<Array>(a)) ? sum.float32 : sum.stored) += read[a] + written[a];
    }
    return sum;
  }
  void touch(Array array, bool write, std::int64_t row, std::int64_t rows, std::int64_t cols) {
    (write ? written : read)[static_cast<std::size_t>(array)] += rows * cols;
    if (touches != nullptr && rows > 0) touches->push_back({array, write, row, rows});
  }
};

/// Counting policies: a rung compiled with Silent has no trace of counting.
struct Counting {
  Ledger* ledger;
  void touch(Array a, bool write, std::int64_t row, std::int64_t rows, std::int64_t cols) const {
    ledger->touch(a, write, row, rows, cols);
  }
  void matmul(std::int64_t flops) const { ledger->matmul_flops += flops; }
  void other(std::int64_t flops) const { ledger->other_flops += flops; }
  void exp(std::int64_t n) const { ledger->exps += n; }
  void hold(std::int64_t n, bool operand) const {
    Ledger& g = *ledger;
    g.held_peak = max_of(g.held_peak, g.held += n);
    if (operand) g.tiles_peak = max_of(g.tiles_peak, g.tiles += n);
  }
};
struct Silent {
  void touch(Array, bool, std::int64_t, std::int64_t, std::int64_t) const {}
  void matmul(std::int64_t) const {}
  void other(std::int64_t) const {}
  void exp(std::int64_t) const {}
  void hold(std::int64_t, bool) const {}
};

enum class Kind : std::uint8_t { operand, scratch };

/// A matrix in fast memory, counted while it lives.
template <class C>
class Tile {
 public:
  Tile(C count, std::int64_t height, std::int64_t width, Kind kind)
      : rows(height), cols(width), data_(static_cast<std::size_t>(rows * cols)), count_(count), kind_(kind) {
    count_.hold(rows * cols, kind_ == Kind::operand);
  }
  ~Tile() { count_.hold(-rows * cols, kind_ == Kind::operand); }
  Tile(const Tile&) = delete;
  Tile& operator=(const Tile&) = delete;

  float& operator()(std::int64_t r, std::int64_t c) { return data_[static_cast<std::size_t>(r * cols + c)]; }
  float operator()(std::int64_t r, std::int64_t c) const { return data_[static_cast<std::size_t>(r * cols + c)]; }
  float& operator[](std::int64_t r) { return data_[static_cast<std::size_t>(r)]; }
  float* row(std::int64_t r) { return data_.data() + r * cols; }
  const float* row(std::int64_t r) const { return data_.data() + r * cols; }
  void fill(float value) { data_.assign(data_.size(), value); }

  std::int64_t rows, cols;

 private:
  std::vector<float> data_;
  C count_;
  Kind kind_;
};

/// A matrix in slow memory, of a storage type: what is stored is rounded to it.
template <class C>
class Slow {
 public:
  Slow(C count, Array name, std::vector<float>& data, std::int64_t cols, DType dtype)
      : data_(data.data()), cols_(cols), name_(name), dtype_(dtype), count_(count) {}

  /// tile[0 ... rows) = rows i ... of this.
  void load(Tile<C>& tile, std::int64_t rows, std::int64_t i) const {
    count_.touch(name_, false, i, rows, tile.cols);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < tile.cols; ++c) tile(r, c) = data_[(i + r) * cols_ + c];
    }
  }
  void store(const Tile<C>& tile, std::int64_t rows, std::int64_t i) {
    count_.touch(name_, true, i, rows, tile.cols);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < tile.cols; ++c) data_[(i + r) * cols_ + c] = rounded(tile(r, c));
    }
  }
  float get(std::int64_t i, std::int64_t j = 0) const {
    count_.touch(name_, false, i, 1, 1);
    return data_[i * cols_ + j];
  }
  void put(std::int64_t i, std::int64_t j, float x) {
    count_.touch(name_, true, i, 1, 1);
    data_[i * cols_ + j] = rounded(x);
  }

 private:
  float rounded(float x) const {
    return dtype_ == DType::f16    ? f16_to_float(float_to_f16(x))
           : dtype_ == DType::bf16 ? bf16_to_float(float_to_bf16(x))
                                   : x;
  }

  float* data_;
  std::int64_t cols_;
  Array name_;
  DType dtype_;
  C count_;
};

}  // namespace onepass::ladder
