// The tile table of the float32 forward. Every bucket fits the smaller of the two limits of shared memory.
#pragma once

#include "core/tiles.h"

namespace onepass::cuda::sm80 {

struct ForwardF32Tiles {
  int row_tiles;  // 16-row tiles a warp holds
  int warps;
  int block_k;
  int stages;         // tiles of K or V in shared memory, in turn
  int groups;         // of 16 columns of O at once
  int blocks_per_sm;  // that the registers must allow

  static constexpr int kScopeBytes = 256;

  constexpr int threads() const { return warps * 32; }
  constexpr int warp_rows() const { return row_tiles * 16; }
  constexpr int block_q() const { return warps * warp_rows(); }
  constexpr std::int64_t shared_bytes(int head_dim) const {
    return std::int64_t{block_q() + stages * block_k} * head_dim * 4 + kScopeBytes;
  }
};

template <int kHeadDim>
constexpr ForwardF32Tiles forward_f32_tiles() {
  if (kHeadDim == 32) return {2, 4, 32, 2, 1, 2};
  if (kHeadDim == 64) return {2, 4, 32, 2, 1, 2};
  if (kHeadDim == 96) return {1, 4, 32, 2, 1, 3};
  if (kHeadDim == 128) return {1, 4, 32, 2, 2, 2};
  if (kHeadDim == 192) return {1, 4, 32, 2, 2, 2};
  return {1, 4, 16, 2, 2, 2};
}

}  // namespace onepass::cuda::sm80
