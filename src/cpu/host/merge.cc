// Merge of partial results: a row at a time, 64 columns at a time through float32.
#include "cpu/merge.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/half.h"
#include "cpu/parallel.h"

namespace onepass::cpu {
namespace {

constexpr std::int64_t kColumns = 64;
constexpr float kNoKey = -std::numeric_limits<float>::infinity();

void load_columns(float* to, const char* row, DType dtype, std::int64_t first, std::int64_t n) {
  if (dtype == DType::f32) {
    std::memcpy(to, row + 4 * first, static_cast<std::size_t>(4 * n));
  } else if (dtype == DType::f16) {
    const auto* from = reinterpret_cast<const std::uint16_t*>(row) + first;
    for (std::int64_t c = 0; c < n; ++c) to[c] = f16_to_float(from[c]);
  } else {
    const auto* from = reinterpret_cast<const std::uint16_t*>(row) + first;
    for (std::int64_t c = 0; c < n; ++c) to[c] = bf16_to_float(from[c]);
  }
}

void store_columns(char* row, DType dtype, std::int64_t first, std::int64_t n, const float* from) {
  if (dtype == DType::f32) {
    std::memcpy(row + 4 * first, from, static_cast<std::size_t>(4 * n));
  } else if (dtype == DType::f16) {
    auto* to = reinterpret_cast<std::uint16_t*>(row) + first;
    for (std::int64_t c = 0; c < n; ++c) to[c] = float_to_f16(from[c]);
  } else {
    auto* to = reinterpret_cast<std::uint16_t*>(row) + first;
    for (std::int64_t c = 0; c < n; ++c) to[c] = float_to_bf16(from[c]);
  }
}

struct Part {
  const char* row;
  DType dtype;
  float factor;
};

/// out = the sum of factor * row over one or two parts; a single part has factor 1. `out` may be a part's row.
void combine(char* out, DType dtype, std::int64_t columns, const Part* parts, int count) {
  if (count == 1 && parts[0].dtype == dtype) {
    std::memmove(out, parts[0].row, static_cast<std::size_t>(columns * dtype_size(dtype)));
    return;
  }
  float x[kColumns], y[kColumns];
  for (std::int64_t first = 0; first < columns; first += kColumns) {
    const std::int64_t n = std::min(kColumns, columns - first);
    load_columns(x, parts[0].row, parts[0].dtype, first, n);
    if (count == 2) {
      load_columns(y, parts[1].row, parts[1].dtype, first, n);
      for (std::int64_t c = 0; c < n; ++c) x[c] = parts[0].factor * x[c] + parts[1].factor * y[c];
    }
    store_columns(out, dtype, first, n, x);
  }
}

}  // namespace

Status merge_partial(const Problem& problem, const Tensor& out_a, const RowTensor& lse_a, const Tensor& out_b,
                     const RowTensor& lse_b, const Tensor& out, const RowTensor& lse, int threads) {
  const std::int64_t rows = problem.total_q, heads = problem.heads_q, columns = problem.head_dim_v;
  const std::int64_t batch = problem.mask.varlen ? 1 : problem.batch;
  const auto merge_row = [&](std::int64_t b, std::int64_t i, std::int64_t h) {
    const float a = *lse_a.row(b, h, i), z = *lse_b.row(b, h, i);
    const Part part_a{out_a.row(b, i, h), out_a.dtype, 1}, part_b{out_b.row(b, i, h), out_b.dtype, 1};
    char* target = out.row(b, i, h);
    float merged = kNoKey;
    if (a == kNoKey && z == kNoKey) {
      std::memset(target, 0, static_cast<std::size_t>(columns * dtype_size(out.dtype)));
    } else if (a == kNoKey || z == kNoKey) {
      merged = a == kNoKey ? z : a;
      combine(target, out.dtype, columns, a == kNoKey ? &part_b : &part_a, 1);
    } else {
      // One of the two exponentials is 1: neither their sum nor the logarithm leaves the range.
      const double largest = a < z ? z : a, weight_a = std::exp(a - largest), weight_b = std::exp(z - largest);
      const double sum = weight_a + weight_b;
      merged = static_cast<float>(largest + std::log(sum));
      const Part both[2] = {{part_a.row, part_a.dtype, static_cast<float>(weight_a / sum)},
                            {part_b.row, part_b.dtype, static_cast<float>(weight_b / sum)}};
      combine(target, out.dtype, columns, both, 2);
    }
    *lse.row(b, h, i) = merged;
  };

  // Rows in tasks of about 64 KB, which a thread does in a few microseconds.
  const std::int64_t count = batch * rows * heads;
  const std::int64_t step = std::max<std::int64_t>(1, 16384 / std::max<std::int64_t>(columns, 1));
  if (count == 0) return {};
  std::atomic<std::int64_t> next{0};
  const std::int64_t workers = std::min<std::int64_t>(threads, (count + 4 * step - 1) / (4 * step));
  parallel(static_cast<int>(workers), [&](int) {
    for (std::int64_t first; (first = next.fetch_add(step)) < count;) {
      for (std::int64_t n = first; n < std::min(first + step, count); ++n) {
        merge_row(n / (rows * heads), n / heads % rows, n % heads);
      }
    }
  });
  return {};
}

}  // namespace onepass::cpu
