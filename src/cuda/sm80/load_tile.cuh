// From global to shared memory: tiles of rows, zeros beyond the last row and the last column.
#pragma once

#include "core/problem.h"
#include "cuda/device/swizzle.cuh"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/shared.cuh"

namespace onepass::cuda::sm80 {

/// Bytes, 16, 4 or 2, that every row of a 16-bit operand begins at a multiple of and is a multiple of long.
inline int row_alignment(const Tensor& t, std::int64_t columns) {
  const auto bits = reinterpret_cast<std::uintptr_t>(t.data) |
                    static_cast<std::uintptr_t>((t.stride_batch | t.stride_seq | t.stride_head | columns) * 2);
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 2;
}

/// How a thread moves 16 bytes: by way of its registers, or by cp.async with a count of bytes (ten instructions), or
/// with a predicate (one).
enum class Copies { registers, counted, predicated };

/// Rows of kCols elements one after the other, as SwizzledTile and LaneRows without the permutation.
template <int kCols>
struct PlainTile {
  static constexpr int kRowBytes = 2 * kCols, kChunks = kCols / 8, kGroup = SwizzledTile<kCols>::kGroup;
  static __device__ constexpr int offset(int row, int chunk) { return row * kRowBytes + chunk * 16; }
};

/// Copies kRows rows of up to kColumns elements with a thread block: each thread the same chunks of every kDown-th row.
template <class TileLayout, int kRows, int kColumns, int kThreads, Copies kCopies>
struct TileLoader {
  using Layout = TileLayout;
  static constexpr int kAcross = Layout::kChunks % 16 == 0 ? 16 : Layout::kGroup;  // threads along a row
  static constexpr int kDown = kThreads / kAcross;                                 // rows at a time
  static constexpr int kTimes = Layout::kChunks / kAcross;                         // chunks a row and thread
  static constexpr int kPieces = kRows / kDown * kTimes;
  static_assert(kThreads % kAcross == 0 && kDown % 8 == 0 && Layout::kChunks % kAcross == 0 && kRows % kDown == 0);

  const char* g_rows;      // row 0 of the next tile
  std::int64_t row_bytes;  // from row to row
  int columns;             // elements a row

  __device__ static int row() { return threadIdx.x / kAcross; }
  __device__ static int chunk() { return threadIdx.x % kAcross; }
  __device__ static std::uint32_t thread_offset() { return Layout::offset(row(), chunk()); }
  __device__ bool has_columns(int time) const { return (chunk() + time * kAcross) * 8 < columns; }

  /// This thread's first chunk.
  __device__ const char* thread_rows() const { return g_rows + row() * row_bytes + chunk() * 16; }
  __device__ __forceinline__ static void copy(std::uint32_t s_chunk, const char* g_chunk, bool wanted) {
    if constexpr (kCopies == Copies::predicated) {
      ptx::cp_async_16_or_zeros(s_chunk, g_chunk, wanted);
    } else if constexpr (kCopies == Copies::counted) {
      ptx::cp_async_16(s_chunk, g_chunk, wanted ? 16 : 0);
    } else {
      const uint4 x = wanted ? *reinterpret_cast<const uint4*>(g_chunk) : uint4{};
      ptx::store_shared(s_chunk, x.x, x.y, x.z, x.w);
    }
  }
  /// Bit `time`: has_columns(time).
  __device__ std::uint32_t wanted_columns() const {
    std::uint32_t bits = 0;
    for (int time = 0; time < kTimes; ++time) bits |= has_columns(time) ? 1u << time : 0;
    return bits;
  }
  /// A tile of aligned rows, given this thread's first chunk and wanted_columns().
  __device__ __forceinline__ void load_full(std::uint32_t s_thread, const char* g_thread, std::uint32_t wanted) const {
#pragma unroll
    for (int pass = 0; pass < kRows / kDown; ++pass) {
#pragma unroll
      for (int time = 0; time < kTimes; ++time)
        copy(s_thread + pass * kDown * Layout::kRowBytes + time * kAcross * 16, g_thread + time * kAcross * 16,
             (wanted >> time & 1) != 0);
      g_thread += kDown * row_bytes;
    }
  }
  /// Zeros into the rows before `first`.
  __device__ __forceinline__ static void clear_rows(std::uint32_t s_tile, int first) {
#pragma unroll 1
    for (int i = threadIdx.x; i < first * Layout::kChunks; i += kThreads)
      ptx::store_shared(s_tile + Layout::offset(i / Layout::kChunks, i % Layout::kChunks), 0u, 0u, 0u, 0u);
  }
  /// A whole tile of aligned rows of which [first, end) are wanted: zeros elsewhere.
  __device__ __forceinline__ void load(std::uint32_t s_tile, int first, int end) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int pass = i / kTimes, time = i % kTimes;
      ptx::cp_async_16_or_zeros(s_tile + thread_offset() + pass * kDown * Layout::kRowBytes + time * kAcross * 16,
                                g_rows + (row() + pass * kDown) * row_bytes + (chunk() + time * kAcross) * 16,
                                row() + pass * kDown >= first && row() + pass * kDown < end && has_columns(time));
    }
  }
  /// The same for rows of any alignment, in pieces of 4 or 2 bytes.
  __device__ __forceinline__ void load_unaligned(std::uint32_t s_tile, int first, int end, int alignment) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * Layout::kChunks; i += kThreads) {
      const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
      const int size = row >= first && row < end ? clamp_to(columns * 2 - chunk * 16, 0, 16) : 0;
      const std::uint32_t s_chunk = s_tile + Layout::offset(row, chunk);
      const char* g_chunk = g_rows + row * row_bytes + chunk * 16;
#pragma unroll 1
      for (int at = 0; at < 16; at += alignment >= 4 ? 4 : 2) {
        if (alignment >= 4) {
          ptx::cp_async_small<4>(s_chunk + at, g_chunk + at, clamp_to(size - at, 0, 4));
        } else {
          const std::uint16_t x = at < size ? *reinterpret_cast<const std::uint16_t*>(g_chunk + at) : std::uint16_t{0};
          *static_cast<std::uint16_t*>(__cvta_shared_to_generic(s_chunk + at)) = x;
        }
      }
    }
  }
  __device__ __forceinline__ void load_any(std::uint32_t s_tile, int first, int end, int alignment) const {
    if (alignment == 16) {
      load(s_tile, first, end);
    } else {
      load_unaligned(s_tile, first, end, alignment);
    }
  }
};

}  // namespace onepass::cuda::sm80
