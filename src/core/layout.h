// Which bytes a strided tensor touches: extent, self-overlap, overlap of two tensors.
#pragma once

#include <array>

#include "core/problem.h"

namespace onepass {

/// A tensor as a box of contiguous rows: `run` bytes at base + sum of index[k] * stride[k], index[k] < size[k].
/// Dimensions of size 1 are dropped, the others sorted by falling stride, adjacent contiguous ones merged.
struct Layout {
  static constexpr int kMaxRank = 4;
  std::uintptr_t base = 0;
  std::int64_t run = 0;  // 0: no element
  int rank = 0;
  std::array<std::int64_t, kMaxRank> size{}, stride{};  // bytes

  std::uintptr_t begin() const { return base; }
  std::uintptr_t end() const;  // one past the last byte
  std::int64_t rows() const;
};

/// `sizes` and `strides` (in elements) of the outer dimensions, over rows of `row_elements` contiguous elements.
Layout make_layout(const void* data, DType dtype, std::int64_t row_elements, std::initializer_list<std::int64_t> sizes,
                   std::initializer_list<std::int64_t> strides);

/// True if two different indices may name the same byte: a stride of 0, or rows that reach into one another.
bool overlaps_itself(const Layout& layout);

/// True if the two share a byte. Interleaved layouts (packed QKV in any order) are told apart; where neither the
/// strides' common divisor nor a bounded search decides, the answer is true.
bool overlap(const Layout& a, const Layout& b);

/// True if every row of the operand begins at a multiple of 16 bytes.
bool rows_aligned(const Tensor& operand);

}  // namespace onepass
