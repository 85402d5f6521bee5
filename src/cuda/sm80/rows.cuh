// Rows of 16-bit elements between global memory and swizzled tiles in shared memory.
#pragma once

#include "core/problem.h"
#include "cuda/device/swizzle.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/shared.cuh"

namespace onepass::cuda::sm80 {

/// Elements [first, first + 8) of a row of `dim` elements, zeros beyond it; any alignment.
__device__ __forceinline__ uint4 load_eight(const std::uint16_t* g_row, int first, int dim) {
  std::uint32_t r[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t low = first + 2 * i < dim ? g_row[first + 2 * i] : 0;
    const std::uint32_t high = first + 2 * i + 1 < dim ? g_row[first + 2 * i + 1] : 0;
    r[i] = low | high << 16;
  }
  return {r[0], r[1], r[2], r[3]};
}

/// Writes eight elements where they belong to the row.
__device__ __forceinline__ void store_eight(std::uint16_t* g_row, int first, int dim, bool aligned, uint4 x) {
  if (aligned && first + 8 <= dim) {
    *reinterpret_cast<uint4*>(g_row + first) = x;
    return;
  }
  const std::uint32_t r[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (first + i < dim) g_row[first + i] = static_cast<std::uint16_t>(r[i / 2] >> (i % 2 * 16));
  }
}

/// How kThreads threads share the chunks of a tile: neighbours take neighbouring chunks of a row.
template <int kCols, int kThreads>
struct CopyShape {
  static constexpr int kLanes = SwizzledTile<kCols>::kGroup;  // threads of a row
  static constexpr int kRowsAtOnce = kThreads / kLanes;
  static constexpr int kChunksEach = SwizzledTile<kCols>::kChunks / kLanes;
};

/// Starts copies of kRows rows of `dim` elements to a tile; rows outside [begin, end) and columns beyond dim become 0.
/// g_tile (kRows, dim) is row 0, at `stride` elements a row; nothing is read outside [begin, end).
template <int kCols, int kRows, int kThreads>
__device__ __forceinline__ void load_rows(std::uint32_t s_tile, const void* g_tile, std::int64_t stride, int begin,
                                          int end, int dim, bool aligned, int thread) {
  using Shape = CopyShape<kCols, kThreads>;
  using Tile = SwizzledTile<kCols>;
  const int lane = thread % Shape::kLanes, first = thread / Shape::kLanes;
  const auto* g_row = static_cast<const std::uint16_t*>(g_tile) + first * stride;
  constexpr int kSteps = (kRows + Shape::kRowsAtOnce - 1) / Shape::kRowsAtOnce;
  static_assert(Shape::kRowsAtOnce % 8 == 0 || kSteps == 1);
  const std::uint32_t s_row = s_tile + Tile::offset(first, lane);
  if (aligned) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int row = first + step * Shape::kRowsAtOnce;
      if (kRows % Shape::kRowsAtOnce != 0 && row >= kRows) break;
      const bool inside = begin <= row && row < end;
#pragma unroll
      for (int c = 0; c < Shape::kChunksEach; ++c) {
        const int element = 8 * (lane + c * Shape::kLanes);
        const int bytes = inside ? clamp_to(2 * (dim - element), 0, 16) : 0;
        const std::uint32_t s_chunk = s_row + step * Shape::kRowsAtOnce * Tile::kRowBytes + c * Tile::kGroupBytes;
        ptx::cp_async_16(s_chunk, bytes > 0 ? g_row + step * Shape::kRowsAtOnce * stride + element : g_tile, bytes);
      }
    }
    return;
  }
#pragma unroll 1
  for (int step = 0; step < kSteps * Shape::kChunksEach; ++step) {
    const int row = first + step / Shape::kChunksEach * Shape::kRowsAtOnce;
    const int chunk = lane + step % Shape::kChunksEach * Shape::kLanes;
    if (row >= kRows) break;
    const auto* g_own = static_cast<const std::uint16_t*>(g_tile) + row * stride;
    const uint4 x = begin <= row && row < end ? load_eight(g_own, 8 * chunk, dim) : uint4{0, 0, 0, 0};
    ptx::store_shared(s_tile + Tile::offset(row, chunk), x.x, x.y, x.z, x.w);
  }
}

/// load_rows for the tiles that make up nearly all the work: aligned, all rows and columns inside. g_tile in bytes.
template <int kCols, int kRows, int kThreads>
__device__ __forceinline__ void load_whole_rows(std::uint32_t s_tile, const char* g_tile, std::uint32_t stride_bytes,
                                                int thread) {
  using Shape = CopyShape<kCols, kThreads>;
  using Tile = SwizzledTile<kCols>;
  const int lane = thread % Shape::kLanes, first = thread / Shape::kLanes;
  const char* g_row = g_tile + std::uint64_t{static_cast<std::uint32_t>(first)} * stride_bytes + 16 * lane;
  const std::uint32_t s_row = s_tile + Tile::offset(first, lane);
#pragma unroll
  for (int step = 0; step < (kRows + Shape::kRowsAtOnce - 1) / Shape::kRowsAtOnce; ++step) {
    if (kRows % Shape::kRowsAtOnce != 0 && first + step * Shape::kRowsAtOnce >= kRows) break;
    const char* g = g_row + std::uint64_t{static_cast<std::uint32_t>(step * Shape::kRowsAtOnce)} * stride_bytes;
#pragma unroll
    for (int c = 0; c < Shape::kChunksEach; ++c) {
      ptx::cp_async_16(s_row + step * Shape::kRowsAtOnce * Tile::kRowBytes + c * Tile::kGroupBytes,
                       g + c * Tile::kGroupBytes);
    }
  }
}

/// One warp writes kRows rows of a tile to memory: rows from `rows` on are left out, those outside [begin, end) become
/// 0.
template <int kCols, int kRows>
__device__ __forceinline__ void store_rows(void* g_tile, std::int64_t stride, std::uint32_t s_tile, int rows, int begin,
                                           int end, int dim, bool aligned, int lane) {
  using Tile = SwizzledTile<kCols>;
#pragma unroll 4
  for (int i = lane; i < kRows * Tile::kChunks; i += 32) {
    const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
    uint4 x = {0, 0, 0, 0};
    if (begin <= row && row < end) ptx::load_shared(s_tile + Tile::offset(row, chunk), x.x, x.y, x.z, x.w);
    if (row < rows) store_eight(static_cast<std::uint16_t*>(g_tile) + row * stride, 8 * chunk, dim, aligned, x);
  }
}

/// store_rows where all rows and columns are inside and aligned.
template <int kCols, int kRows>
__device__ __forceinline__ void store_whole_rows(char* g_tile, std::int64_t stride_bytes, std::uint32_t s_tile,
                                                 int lane) {
  using Tile = SwizzledTile<kCols>;
  constexpr int kLanes = Tile::kGroup, kRowsAtOnce = 32 / kLanes;  // neighbours take neighbouring chunks
  const int first = lane / kLanes, chunk = lane % kLanes;
  char* g_row = g_tile + first * stride_bytes + 16 * chunk;
#pragma unroll
  for (int row = 0; row < kRows; row += kRowsAtOnce) {
    const std::uint32_t s_row = s_tile + Tile::offset(first + row, chunk);
#pragma unroll
    for (int c = 0; c < Tile::kChunks / kLanes; ++c) {
      uint4 x;
      ptx::load_shared(s_row + c * Tile::kGroupBytes, x.x, x.y, x.z, x.w);
      *reinterpret_cast<uint4*>(g_row + c * Tile::kGroupBytes) = x;
    }
    g_row += kRowsAtOnce * stride_bytes;
  }
}

}  // namespace onepass::cuda::sm80
