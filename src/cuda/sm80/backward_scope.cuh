// What a thread block of the backward pass works on: its keys, the query rows that see them, the mask of a tile.
#pragma once

#include "core/mask.h"
#include "cuda/sm80/backward_params.h"

namespace onepass::cuda::sm80 {

/// What a block of the kernels before and after the products works on: neighbours take the same rows of neighbouring
/// heads, which are near in memory. Grid: batch x query_tiles x heads_q.
struct PassTile {
  int head;
  std::int64_t tile, b;
  __device__ __forceinline__ explicit PassTile(const BackwardParams& p) {
    const auto heads = static_cast<unsigned>(p.heads_q), tiles = static_cast<unsigned>(p.query_tiles);
    const unsigned row_tile = blockIdx.x / heads, item = row_tile / tiles;
    head = static_cast<int>(blockIdx.x - row_tile * heads), tile = row_tile - item * tiles, b = item;
  }
  /// In the workspace.
  __device__ __forceinline__ std::int64_t index(const BackwardParams& p, const Sequence& s, int block_q) const {
    return head * p.tiles + p.first_tile(b, s, block_q) + tile;
  }
};

/// Which of a tile's (key, query row) pairs are visible, counted from the block's first key and the tile's first row.
struct TileMask {
  int lo, hi;              // row i sees the keys i + lo <= j < i + hi
  int key_begin, key_end;  // of these
  int row_begin, row_end;  // and only rows of these do

  /// The keys of row i, empty if end <= begin.
  __device__ __forceinline__ void keys(int i, int& begin, int& end) const {
    begin = max(i + lo, key_begin);
    end = row_begin <= i && i < row_end ? min(i + hi, key_end) : begin;
  }
  /// The rows that see key j, empty if end <= begin.
  __device__ __forceinline__ void rows(int j, int& begin, int& end) const {
    begin = max(j - hi + 1, row_begin);
    end = key_begin <= j && j < key_end ? min(j - lo + 1, row_end) : begin;
  }
};

/// What one thread block works on: keys of a head of a sequence, and the query tiles that see them. In shared memory,
/// one for all threads: little of it is needed at a time.
struct KeyScope {
  Sequence sequence;
  std::int64_t b, kv_head, key_block;
  std::int64_t key_row;          // the block's first key, in the seq dimension of K and V
  std::int64_t first_key;        // the same, counted from the sequence's first key; negative where it begins before it
  const char *g_q, *g_grad_out;  // of the sequence's first row and the group's first head
  float *g_stats, *g_dq;         // of its first tile and that head, and below
  unsigned* g_turns;
  std::int64_t rows_begin, rows_end;  // query rows that see some key
  int rows_left;                      // keys of the block that exist; 0: nothing to do
  int key_begin, key_end;             // keys that some row sees, counted from first_key
  int tile_begin, tile_end;           // query tiles with rows that see some key
  int full_begin, full_end;           // of those, the tiles all of whose rows see all keys
  const unsigned char* g_parts;       // float32: of its first tile and that head

  /// What block `block` of the grid, batch x heads_kv x key_blocks, works on: tiles of kQ rows, kK keys, turns for
  /// kTurns warps, and kPartsBytes of parts.
  template <int kQ, int kK, int kD, int kTurns, int kPartsBytes = 0>
  __device__ __forceinline__ void find(const BackwardParams& p, unsigned block) {
    const auto key_blocks = static_cast<unsigned>(p.key_blocks), heads = static_cast<unsigned>(p.heads_kv);
    key_block = block % key_blocks;
    kv_head = block / key_blocks % heads;
    b = block / key_blocks / heads;
    sequence = p.sequence(b);
    const std::int64_t row = key_block * kK;
    rows_left = static_cast<int>(clamp_to<std::int64_t>(p.item_keys(b, sequence) - row, 0, kK));
    first_key = row - sequence.k_start;
    key_row = sequence.k_row + first_key;
    const std::int64_t head = kv_head * p.group;
    g_q = p.operands.q.row(b, sequence.q_row, head);
    g_grad_out = p.operands.grad_out.row(b, sequence.q_row, head);
    const std::int64_t first_tile = head * p.tiles + p.first_tile(b, sequence, kQ);
    g_stats = p.stats + first_tile * (2 * kQ);
    g_dq = p.dq_sum + first_tile * (kQ * kD);
    g_turns = p.turns + first_tile * kTurns;
    g_parts = p.parts + first_tile * kPartsBytes;
    find_rows(kQ, kK);
  }

  __device__ __forceinline__ bool full(int tile) const { return full_begin <= tile && tile < full_end; }
  /// Rows of a tile that see some key of the block, counted from the tile's first.
  __device__ __forceinline__ int row_begin(int tile, int rows) const {
    return static_cast<int>(clamp_to<std::int64_t>(rows_begin - std::int64_t{tile} * rows, 0, rows));
  }
  __device__ __forceinline__ int row_end(int tile, int rows) const {
    return static_cast<int>(clamp_to<std::int64_t>(rows_end - std::int64_t{tile} * rows, 0, rows));
  }
  __device__ __forceinline__ TileMask mask(int tile, int rows) const {
    const std::int64_t shift = std::int64_t{tile} * rows - first_key;
    constexpr std::int64_t kBeyond = 1 << 20;  // further than any tile reaches
    return {static_cast<int>(clamp_to(sequence.lo_shift + shift, -kBeyond, kBeyond)),
            static_cast<int>(clamp_to(sequence.hi_shift + shift, -kBeyond, kBeyond)),
            key_begin,
            key_end,
            row_begin(tile, rows),
            row_end(tile, rows)};
  }
  /// First block of `keys` keys of which some row of the tile sees one.
  __device__ __forceinline__ std::int64_t first_block(int tile, int rows, int keys) const {
    const std::int64_t row = std::int64_t{tile} * rows;
    const Sequence& s = sequence;
    return (s.visible_to_any(row, min_of(row + rows, s.q_length)).begin + s.k_start) / keys;
  }

 private:
  /// rows, keys: of a tile.
  __device__ __forceinline__ void find_rows(int rows, int keys) {
    const Sequence& s = sequence;
    rows_begin = rows_end = 0;
    key_begin = key_end = tile_begin = tile_end = full_begin = full_end = 0;
    if (s.q_length == 0) return;
    const Interval seen = s.visible_to_any(0, s.q_length);
    const std::int64_t begin = max_of(first_key, seen.begin), end = min_of(first_key + keys, seen.end);
    if (begin >= end) return;
    const Interval rows_seeing = s.rows_seeing(begin, end);
    if (rows_seeing.size() == 0) return;
    rows_begin = rows_seeing.begin, rows_end = rows_seeing.end;
    key_begin = static_cast<int>(begin - first_key), key_end = static_cast<int>(end - first_key);
    tile_begin = static_cast<int>(rows_begin / rows), tile_end = static_cast<int>(ceil_div(rows_end, rows));
    if (key_end - key_begin < keys) return;
    const std::int64_t all_begin = clamp_to<std::int64_t>(first_key + keys - s.hi_shift, 0, s.q_length);
    const std::int64_t all_end = clamp_to<std::int64_t>(first_key - s.lo_shift + 1, 0, s.q_length);
    full_begin = static_cast<int>(ceil_div(all_begin, rows));
    full_end = static_cast<int>(all_end == s.q_length ? ceil_div(all_end, rows) : all_end / rows);
  }
};

}  // namespace onepass::cuda::sm80
