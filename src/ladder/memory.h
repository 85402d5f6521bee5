// The two memories as rungs see them: tiles in fast memory, and views of slow memory that count what passes.
#pragma once

#include <vector>

#include "core/half.h"
#include "ladder/ledger.h"

namespace onepass::ladder {

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
  [[no_unique_address]] C count_;
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
  [[no_unique_address]] C count_;
};

}  // namespace onepass::ladder
