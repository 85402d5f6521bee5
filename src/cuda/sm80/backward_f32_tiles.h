// The tile table of the float32 backward.
#pragma once

#include "core/tiles.h"

namespace onepass::cuda::sm80 {

/// How one thread block of the backward pass works: block_k keys stay in shared memory, block_q query rows at a time
/// pass by. Pairs of warps share 16 key_tiles keys: one computes P and dV, the other dS and dK; or pairs of two warps,
/// which share the columns of Q, K, V and dO.
struct BackwardF32Tile {
  int block_q;
  int key_tiles;
  int pairs;
  int column_warps;            // 1 or 2
  int steps;                   // of 16 columns of scores at once, 1 or 2
  int groups;                  // of 16 columns of dV or dK at once
  int dq_warps_q, dq_warps_d;  // the warps' grid over a dQ tile
  int dq_groups;               // of 16 columns of dQ at once
  int blocks_per_sm;

  static constexpr int kScopeBytes = 256;

  constexpr int warps() const { return 2 * pairs * column_warps; }
  constexpr int threads() const { return 32 * warps(); }
  constexpr int block_k() const { return 16 * key_tiles * pairs; }
  /// Columns of the tile of scores: dS, and behind it P where two warps of a kind read it.
  constexpr int score_columns() const { return column_warps * block_k(); }
  constexpr bool valid(int head_dim) const {
    return score_columns() % 32 == 0 && dq_warps_q * dq_warps_d == warps() && block_q % (16 * dq_warps_q) == 0 &&
           head_dim % (16 * dq_groups * dq_warps_d) == 0 && head_dim % (32 * column_warps) == 0;
  }
  /// K, V; Q, dO, six bytes an element; the rows' statistics; scores; what the block works on.
  constexpr std::int64_t shared_bytes(int head_dim) const {
    return 12LL * (block_k() + block_q) * head_dim + 8LL * block_q + 4LL * block_q * score_columns() + kScopeBytes;
  }
};

/// limit: shared memory that a thread block may have. What stops the next larger tile: in 163 KB the registers of two
/// or three blocks an SM, from head_dim 192 on shared memory; in 99 KB that.
constexpr BackwardF32Tile backward_f32_tile(int head_dim, std::int64_t limit) {
  const bool small = limit < 128 * 1024;
  switch (head_dim) {
    case 32: return {32, 1, 2, 1, 2, 1, 2, 2, 1, 3};
    case 64: return {32, 1, 2, 1, 1, 2, 2, 2, 2, 3};
    case 96: return {32, 1, 2, 1, 2, 2, 2, 2, 1, 2};
    case 128:
      return small ? BackwardF32Tile{16, 1, 2, 1, 2, 2, 1, 4, 2, 3} : BackwardF32Tile{32, 1, 2, 1, 2, 2, 2, 2, 2, 2};
    case 192:
      return small ? BackwardF32Tile{16, 1, 1, 2, 2, 2, 1, 4, 1, 2} : BackwardF32Tile{16, 1, 2, 1, 2, 2, 1, 4, 1, 2};
    default:
      return small ? BackwardF32Tile{16, 1, 1, 2, 2, 2, 1, 4, 2, 2} : BackwardF32Tile{16, 1, 2, 2, 2, 2, 1, 8, 2, 1};
  }
}

}  // namespace onepass::cuda::sm80
