// The tile table of the float32 backward. Every bucket fits the smaller of the two limits of shared memory.
#pragma once

#include "core/tiles.h"

namespace onepass::cuda::sm80 {

/// How one thread block of the backward pass works: block_k keys stay in shared memory, block_q query rows at a time
/// pass by. Pairs of warps share 16 key_tiles keys: one computes P and dV, the other dS and dK.
struct BackwardF32Tile {
  int block_q;
  int key_tiles;
  int pairs;
  int groups;                  // as in ForwardF32Tiles
  int dq_warps_q, dq_warps_d;  // the warps' grid over a dQ tile
  int dq_groups;               // of 16 columns of dQ at once
  int blocks_per_sm;

  static constexpr int kScopeBytes = 256;

  constexpr int warps() const { return 2 * pairs; }
  constexpr int threads() const { return 32 * warps(); }
  constexpr int block_k() const { return 16 * key_tiles * pairs; }
  constexpr bool valid(int head_dim) const {
    return block_k() % 32 == 0 && dq_warps_q * dq_warps_d == warps() && block_q % (16 * dq_warps_q) == 0 &&
           head_dim % (16 * dq_groups * dq_warps_d) == 0;
  }
  /// K, V; Q, dO and the rows' statistics; dS; what the block works on.
  constexpr std::int64_t shared_bytes(int head_dim) const {
    return 8LL * (block_k() + block_q) * head_dim + 8LL * block_q + 4LL * block_q * block_k() + kScopeBytes;
  }
};

template <int kHeadDim>
constexpr BackwardF32Tile backward_f32_tile() {
  if (kHeadDim == 32) return {32, 2, 2, 1, 2, 2, 1, 2};
  if (kHeadDim == 64) return {16, 2, 2, 1, 1, 4, 1, 2};
  if (kHeadDim == 96) return {32, 1, 2, 2, 2, 2, 1, 2};
  if (kHeadDim == 128) return {16, 2, 2, 1, 1, 4, 1, 2};
  if (kHeadDim == 192) return {16, 1, 2, 2, 1, 4, 1, 2};
  return {16, 1, 2, 2, 1, 4, 2, 2};
}

}  // namespace onepass::cuda::sm80
