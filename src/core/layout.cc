#include "core/layout.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace onepass {

std::uintptr_t Layout::end() const {
  if (run == 0) return base;
  std::uintptr_t last = base;
  for (int k = 0; k < rank; ++k) last += static_cast<std::uintptr_t>((size[k] - 1) * stride[k]);
  return last + static_cast<std::uintptr_t>(run);
}

std::int64_t Layout::rows() const {
  std::int64_t count = run == 0 ? 0 : 1;
  for (int k = 0; k < rank; ++k) count *= size[k];
  return count;
}

Layout make_layout(const void* data, DType dtype, std::int64_t row_elements, std::initializer_list<std::int64_t> sizes,
                   std::initializer_list<std::int64_t> strides) {
  Layout layout;
  layout.base = reinterpret_cast<std::uintptr_t>(data);
  const std::int64_t element = dtype_size(dtype);
  const bool empty = data == nullptr || row_elements == 0 || std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  if (empty) return layout;
  layout.run = row_elements * element;
  std::array<std::int64_t, Layout::kMaxRank> size{}, stride{};  // by rising stride
  int count = 0;
  for (std::size_t k = 0; k < sizes.size(); ++k) {
    if (sizes.begin()[k] <= 1) continue;
    int at = count++;
    for (; at > 0 && stride[at - 1] > strides.begin()[k] * element; --at) {
      stride[at] = stride[at - 1];
      size[at] = size[at - 1];
    }
    stride[at] = strides.begin()[k] * element;
    size[at] = sizes.begin()[k];
  }
  int first = 0;  // innermost dimensions that continue the row
  while (first < count && stride[first] == layout.run) {
    layout.run *= size[first];
    ++first;
  }
  for (int k = count - 1; k >= first; --k) {
    layout.stride[layout.rank] = stride[k];
    layout.size[layout.rank++] = size[k];
  }
  return layout;
}

bool overlaps_itself(const Layout& layout) {
  std::int64_t extent = layout.run;
  for (int k = layout.rank - 1; k >= 0; --k) {
    if (layout.stride[k] < extent) return true;
    extent += (layout.size[k] - 1) * layout.stride[k];
  }
  return false;
}

namespace {

/// Start addresses of all rows, ascending.
std::vector<std::uintptr_t> row_starts(const Layout& layout) {
  std::vector<std::uintptr_t> starts{layout.base};
  for (int k = 0; k < layout.rank; ++k) {
    const std::size_t count = starts.size();
    for (std::int64_t i = 1; i < layout.size[k]; ++i) {
      for (std::size_t s = 0; s < count; ++s) {
        starts.push_back(starts[s] + static_cast<std::uintptr_t>(i * layout.stride[k]));
      }
    }
  }
  std::sort(starts.begin(), starts.end());
  return starts;
}

bool rows_overlap(const Layout& a, const Layout& b) {
  const auto starts_a = row_starts(a), starts_b = row_starts(b);
  std::size_t i = 0, j = 0;
  while (i < starts_a.size() && j < starts_b.size()) {
    if (starts_a[i] + a.run <= starts_b[j]) {
      ++i;
    } else if (starts_b[j] + b.run <= starts_a[i]) {
      ++j;
    } else {
      return true;
    }
  }
  return false;
}

}  // namespace

bool overlap(const Layout& a, const Layout& b) {
  if (a.run == 0 || b.run == 0 || a.end() <= b.begin() || b.end() <= a.begin()) return false;
  // All rows of both start at base + a multiple of the strides' common divisor: compare one period.
  std::int64_t period = 0;
  for (int k = 0; k < a.rank; ++k) period = std::gcd(period, a.stride[k]);
  for (int k = 0; k < b.rank; ++k) period = std::gcd(period, b.stride[k]);
  if (period > 0) {
    const std::int64_t shift = static_cast<std::int64_t>((b.base - a.base) % static_cast<std::uintptr_t>(period));
    const std::int64_t wrapped =
        b.base >= a.base ? shift : (period - static_cast<std::int64_t>((a.base - b.base) % period)) % period;
    if (wrapped >= a.run && wrapped + b.run <= period) return false;
  }
  constexpr std::int64_t kSearchedRows = 1 << 14;
  if (a.rows() <= kSearchedRows && b.rows() <= kSearchedRows) return rows_overlap(a, b);
  return true;
}

bool rows_aligned(const Tensor& operand) {
  const auto multiple = [&](std::int64_t stride) { return stride * dtype_size(operand.dtype) % 16 == 0; };
  return reinterpret_cast<std::uintptr_t>(operand.data) % 16 == 0 && multiple(operand.stride_batch) &&
         multiple(operand.stride_seq) && multiple(operand.stride_head);
}

}  // namespace onepass
