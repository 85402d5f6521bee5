// Tiles of 16-bit elements in shared memory, laid out so that ldmatrix, 16-byte copies and fragment stores meet no bank
// conflict: the 16-byte chunks of a row are permuted by an exclusive or with the row's number.
#pragma once

#include <cstdint>

namespace onepass::cuda {

/// A row-major tile of kCols elements a row, a multiple of 16; its base is aligned to 128 bytes.
template <int kCols>
struct SwizzledTile {
  static_assert(kCols % 16 == 0);
  static constexpr int kRowBytes = 2 * kCols;
  static constexpr int kChunks = kCols / 8;
  /// Chunks permuted among each other: eight neighbours where rows are whole multiples of 128 bytes; else four (two),
  /// since two (four) rows together fill the banks.
  static constexpr int kGroup = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
  static constexpr int kGroupBytes = 16 * kGroup;

  static __host__ __device__ constexpr int swizzle(int row) { return row / (8 / kGroup) % kGroup; }
  /// Bytes from the tile's base to chunk `chunk` of row `row`.
  static __host__ __device__ constexpr int offset(int row, int chunk) {
    return row * kRowBytes + chunk / kGroup * kGroupBytes + ((chunk % kGroup) ^ swizzle(row)) * 16;
  }
};

/// A lane's view of such a tile: the address of its own row and chunk within a small block. Moving the block by
/// constants costs one exclusive or, which several blocks share.
template <int kCols>
struct LaneRows {
  using Tile = SwizzledTile<kCols>;
  std::uint32_t lane;

  __device__ __forceinline__ LaneRows(std::uint32_t tile, int row, int chunk) : lane(tile + Tile::offset(row, chunk)) {}
  /// From the address itself.
  __device__ __forceinline__ explicit LaneRows(std::uint32_t address) : lane(address) {}

  /// The lane's address when the block begins at `row`, a multiple of 8, and `chunk`, of which the block's own chunks
  /// share no set bit.
  __device__ __forceinline__ std::uint32_t at(int row, int chunk) const {
    return (lane ^ static_cast<std::uint32_t>(chunk % Tile::kGroup * 16)) +
           static_cast<std::uint32_t>(row * Tile::kRowBytes + chunk / Tile::kGroup * Tile::kGroupBytes);
  }
};

/// What lane `lane` gives ldmatrix_x4 for a 16x16 block. `kRowsFirst`: its second matrix is the next 8 rows and its
/// third the next 8 columns, the order of an A operand stored by rows and of a B operand stored by columns of the
/// product (transposed load); else the other way round.
template <int kCols, bool kRowsFirst>
__device__ __forceinline__ LaneRows<kCols> block_rows(std::uint32_t tile, int lane) {
  const int first = (lane >> 3) & 1, second = lane >> 4;
  return {tile, (lane & 7) + 8 * (kRowsFirst ? first : second), kRowsFirst ? second : first};
}

}  // namespace onepass::cuda
