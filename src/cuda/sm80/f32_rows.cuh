// Rows of float32 between global memory and swizzled tiles in shared memory.
#pragma once

#include "core/problem.h"
#include "cuda/ptx/async_copy.cuh"

namespace onepass::cuda::sm80 {

/// A tile of kCols float32 a row, a multiple of 32: row after row, the 16-byte chunks of each 128-byte line permuted by
/// the row. Eight rows of one chunk (ldmatrix) and four even, or odd, rows of two neighbouring chunks (the operands
/// that are read across rows) lie in different banks. The tile is 128-byte aligned.
template <int kCols>
struct F32Tile {
  static_assert(kCols % 32 == 0);
  static constexpr int kPitch = 4 * kCols;  // bytes a row

  __host__ __device__ static constexpr std::uint32_t offset(int row, int chunk) {
    return static_cast<std::uint32_t>(row * kPitch + chunk / 8 * 128 + ((chunk ^ row) % 8) * 16);
  }
  /// Moves a lane's address, made by offset(row, chunk), on by `rows`, a multiple of 8, and `chunks`, which share no
  /// set bit with `chunk`: one exclusive or that several blocks have in common, and a constant.
  __device__ static std::uint32_t advance(std::uint32_t address, int rows, int chunks) {
    return (address ^ static_cast<std::uint32_t>(chunks % 8 * 16)) +
           static_cast<std::uint32_t>(rows * kPitch + chunks / 8 * 128);
  }
};

/// Starts copies of kRows rows of `dim` elements to a tile; rows outside [begin, end) and columns from dim on become 0.
/// g_tile (kRows, dim) is row 0, at `stride` elements a row; nothing outside [begin, end) is read. `aligned`: rows
/// begin at multiples of 16 bytes and are multiples of them long.
template <int kCols, int kRows, int kThreads>
__device__ __forceinline__ void load_f32_rows(std::uint32_t s_tile, const float* g_tile, std::int64_t stride, int begin,
                                              int end, int dim, bool aligned) {
  using Tile = F32Tile<kCols>;
  constexpr int kRowsAtOnce = kThreads / 8;
  static_assert(kRowsAtOnce % 8 == 0);
  const int thread = static_cast<int>(threadIdx.x);
  if (aligned) {
    const int first = thread / 8, column = thread % 8 * 4;
    const std::uint32_t s_thread = s_tile + Tile::offset(first, thread % 8);
    const float* g_thread = g_tile + first * stride + column;
#pragma unroll
    for (int pass = 0; pass < (kRows + kRowsAtOnce - 1) / kRowsAtOnce; ++pass) {
      const int row = first + pass * kRowsAtOnce;
      if (kRows % kRowsAtOnce != 0 && row >= kRows) break;
      const bool inside = begin <= row && row < end;
#pragma unroll
      for (int line = 0; line < kCols / 32; ++line) {
        ptx::cp_async_16_or_zeros(s_thread + pass * kRowsAtOnce * Tile::kPitch + line * 128, g_thread + 32 * line,
                                  inside && column + 32 * line < dim);
      }
      g_thread += kRowsAtOnce * stride;
    }
    return;
  }
#pragma unroll 1
  for (int i = thread; i < kRows * kCols; i += kThreads) {
    const int row = i / kCols, column = i % kCols;
    const bool inside = begin <= row && row < end && column < dim;
    ptx::cp_async_small<4>(s_tile + Tile::offset(row, column / 4) + column % 4 * 4, g_tile + row * stride + column,
                           inside ? 4u : 0u);
  }
}

/// Elements [column, column + 4) of a row of `dim` elements, zeros beyond it.
__device__ __forceinline__ float4 load_four(const float* g_row, int column, int dim, bool aligned) {
  if (aligned && column + 4 <= dim) return *reinterpret_cast<const float4*>(g_row + column);
  return {column < dim ? g_row[column] : 0, column + 1 < dim ? g_row[column + 1] : 0,
          column + 2 < dim ? g_row[column + 2] : 0, column + 3 < dim ? g_row[column + 3] : 0};
}

/// Writes four elements of a row of `dim` elements, from `column` on, as far as they belong to it.
__device__ __forceinline__ void store_four(float* g_row, int column, int dim, bool aligned, float4 x) {
  if (aligned && column + 4 <= dim) {
    *reinterpret_cast<float4*>(g_row + column) = x;
    return;
  }
  if (column < dim) g_row[column] = x.x;
  if (column + 1 < dim) g_row[column + 1] = x.y;
  if (column + 2 < dim) g_row[column + 2] = x.z;
  if (column + 3 < dim) g_row[column + 3] = x.w;
}

}  // namespace onepass::cuda::sm80
