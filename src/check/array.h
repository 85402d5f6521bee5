// A strided array that owns its memory, with a margin of guard bytes around it. Everything that is not an element is
// NaN in an input and a guard pattern in an output; both are checked after a run.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "check/device.h"
#include "check/spec.h"
#include "core/half.h"

namespace onepass::check {

using Index = std::array<std::int64_t, 4>;

class Array {
 public:
  Array() = default;

  /// Compact, row-major.
  Array(DType dtype, const Index& size, bool output = false);
  /// (batch, seq, heads, dim) laid out as told; an output ignores the layout's broadcasts.
  Array(DType dtype, const Index& size, const Layout& layout, bool output);
  /// (batch, heads, seq): rows of float32, `row_gap` elements apart.
  static Array rows(std::int64_t batch, std::int64_t heads, std::int64_t seq, int row_gap, bool output);
  /// A bias: size 1 and stride 0 where it broadcasts.
  static Array bias(DType dtype, const Index& size, const std::array<bool, 4>& broadcast, bool output);

  explicit operator bool() const { return !memory_.empty(); }
  DType dtype() const { return dtype_; }
  const Index& size() const { return size_; }
  const Index& stride() const { return stride_; }
  std::int64_t count() const { return size_[0] * size_[1] * size_[2] * size_[3]; }
  /// Elements from the first to behind the last.
  std::int64_t span() const;
  std::int64_t offset(const Index& at) const {
    return at[0] * stride_[0] + at[1] * stride_[1] + at[2] * stride_[2] + at[3] * stride_[3];
  }
  void* data() const;
  /// Elements and guards.
  Block memory() { return {memory_.data(), 8 * memory_.size()}; }

  double get(std::int64_t offset) const { return load_double(data(), dtype_, offset); }
  void set(std::int64_t offset, double x);

  /// f(index, offset) for every element, row-major.
  template <class F>
  void each(F&& f) const {
    Index at{};
    for (at[0] = 0; at[0] < size_[0]; ++at[0]) {
      for (at[1] = 0; at[1] < size_[1]; ++at[1]) {
        for (at[2] = 0; at[2] < size_[2]; ++at[2]) {
          for (at[3] = 0; at[3] < size_[3]; ++at[3]) f(at, offset(at));
        }
      }
    }
  }

  /// Sets every element whose offset is not marked to NaN. marks: span() flags.
  void poison_unmarked(const std::vector<bool>& marks);

  /// Remembers the content, to be put back by reset() and compared by the two below.
  void seal();
  void reset();
  bool unchanged() const;
  /// True if nothing but elements changed since seal().
  bool unchanged_outside() const;
  /// A hash of the elements' bits.
  std::uint64_t bits() const;

  Tensor tensor(bool packed) const;
  RowTensor row_tensor(bool packed) const;
  BiasTensor bias_tensor() const;
  HeadTensor head_tensor() const;  // (batch or 1, heads, 1, 1)

 private:
  void allocate(bool output);

  DType dtype_ = DType::f32;
  Index size_ = {0, 0, 0, 0};
  Index stride_ = {0, 0, 0, 0};
  std::int64_t start_ = 0;
  std::vector<std::uint64_t> memory_;  // guard, elements, guard
  std::vector<std::uint64_t> sealed_;
};

/// int32 values followed and led by guards that would be far out of range as lengths.
class IntArray {
 public:
  IntArray() = default;
  explicit IntArray(const std::vector<std::int32_t>& values);
  const std::int32_t* data() const { return memory_.empty() ? nullptr : memory_.data() + kGuard; }
  std::int64_t count() const { return static_cast<std::int64_t>(memory_.size()) - 2 * kGuard; }
  Block memory() { return {memory_.data(), 4 * memory_.size()}; }

 private:
  static constexpr std::int64_t kGuard = 8;
  std::vector<std::int32_t> memory_;
};

}  // namespace onepass::check
