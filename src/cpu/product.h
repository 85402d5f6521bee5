// The float32 matrix product all kernels are made of: C[m][kWidth] (+)= A[m][k] B[k][kWidth], A by broadcast with free
// strides, so that rows of K and V serve in place and transposes cost nothing, B and C with kWidth contiguous columns.
#pragma once

#include "cpu/vec.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// One register tile: kM rows by kN vectors. begin(i, j) gives the start value of accumulator (row i, vector j),
/// end(i, j, value) takes the result.
template <int kM, int kN, class Begin, class End>
ONEPASS_INLINE void product_tile(const float* a, std::int64_t a_row, std::int64_t a_k, const float* b, std::int64_t b_k,
                                 std::int64_t depth, Begin&& begin, End&& end) {
  Vec acc[kM][kN];
#pragma GCC unroll 16
  for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j) acc[i][j] = begin(i, j);
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    Vec row[kN];
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j) row[j] = load(b + k * b_k + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kM; ++i) {
      const Vec x = broadcast(a[i * a_row + k * a_k]);
#pragma GCC unroll 8
      for (int j = 0; j < kN; ++j) acc[i][j] = multiply_add(x, row[j], acc[i][j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j) end(i, j, acc[i][j]);
  }
}

/// Calls tile(row, integral constant kM) over `rows` in steps of kRows, then one smaller step for the rest.
template <int kM>
struct RowCount {
  static constexpr int value = kM;
};
template <class Tile>
ONEPASS_INLINE void for_row_tiles(std::int64_t rows, Tile&& tile) {
  std::int64_t i = 0;
  for (; i + kRows <= rows; i += kRows) tile(i, RowCount<kRows>{});
  switch (rows - i) {
    case 1: tile(i, RowCount<1>{}); break;
    case 2: tile(i, RowCount<2>{}); break;
    case 3: tile(i, RowCount<3>{}); break;
    case 4: tile(i, RowCount<4>{}); break;
    case 5: tile(i, RowCount<5>{}); break;
    default: break;
  }
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
