// The ledger: what a rung moves between slow memory (HBM, DRAM) and fast memory (shared memory, cache), and computes.
// Rungs touch slow memory only through Slow, and hold what they load in Tile, so nothing moves uncounted.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/half.h"

namespace onepass::ladder {

enum class Array : int { Q, K, V, O, S, P, m, l, L, D, dO, dQ, dK, dV, dS, dP, kCount };
inline constexpr int kArrays = static_cast<int>(Array::kCount);
inline constexpr const char* kArrayNames[kArrays] = {"Q", "K", "V",  "O",  "S",  "P",  "m",  "l",
                                                     "L", "D", "dO", "dQ", "dK", "dV", "dS", "dP"};

/// Counts are in elements.
struct Ledger {
  std::array<std::int64_t, kArrays> read{}, written{};
  std::int64_t tiles = 0, tiles_peak = 0;  // tiles of Q, K, V, O and their gradients: what the papers fit into M
  std::int64_t held = 0, held_peak = 0;    // those, and S, P, m, l as well: what must really fit
  std::int64_t matmul_flops = 0, other_flops = 0, exps = 0;

  std::int64_t moved() const {
    std::int64_t sum = 0;
    for (int a = 0; a < kArrays; ++a) sum += read[a] + written[a];
    return sum;
  }
};

/// Counting policies: a rung compiled with Silent has no trace of counting.
struct Counting {
  Ledger* ledger;
  void read(Array a, std::int64_t n) const { ledger->read[static_cast<int>(a)] += n; }
  void write(Array a, std::int64_t n) const { ledger->written[static_cast<int>(a)] += n; }
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
  void read(Array, std::int64_t) const {}
  void write(Array, std::int64_t) const {}
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

  /// tile[0 ... rows)[...] = rows i ... of this, columns j ... j + tile.cols.
  void load(Tile<C>& tile, std::int64_t rows, std::int64_t i, std::int64_t j = 0) const {
    count_.read(name_, rows * tile.cols);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < tile.cols; ++c) tile(r, c) = data_[(i + r) * cols_ + j + c];
    }
  }
  void store(const Tile<C>& tile, std::int64_t rows, std::int64_t i, std::int64_t j = 0) {
    count_.write(name_, rows * tile.cols);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < tile.cols; ++c) data_[(i + r) * cols_ + j + c] = rounded(tile(r, c));
    }
  }
  float get(std::int64_t i, std::int64_t j = 0) const {
    count_.read(name_, 1);
    return data_[i * cols_ + j];
  }
  void put(std::int64_t i, std::int64_t j, float x) {
    count_.write(name_, 1);
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
