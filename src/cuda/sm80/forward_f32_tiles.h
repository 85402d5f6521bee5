// The tile table of the float32 forward. Every bucket fits the smaller of the two limits of shared memory.
#pragma once

#include "core/tiles.h"

namespace onepass::cuda::sm80 {

struct ForwardF32Tiles {
  int row_tiles;  // 16-row tiles a warp holds
  int warps;
  int block_k;
  int stages;         // tiles of K or V in shared memory, in turn
  int chain;          // steps of 8 columns that the scores add on the tensor core
  int width;          // operands of 8 columns of V at once
  int blocks_per_sm;  // that the registers must allow

  constexpr int threads() const { return warps * 32; }
  constexpr int warp_rows() const { return row_tiles * 16; }
  constexpr int block_q() const { return warps * warp_rows(); }
  constexpr std::int64_t shared_bytes(int head_dim) const {
    return std::int64_t{block_q() + stages * block_k} * head_dim * 4;
  }
};

template <int kHeadDim>
constexpr ForwardF32Tiles forward_f32_tiles() {
  if (kHeadDim == 32) return {2, 4, 32, 2, 4, 2, 2};
  if (kHeadDim == 64) return {1, 4, 32, 2, 4, 4, 3};
  if (kHeadDim == 96) return {1, 4, 32, 2, 4, 4, 2};
  if (kHeadDim == 128) return {1, 4, 32, 2, 4, 4, 2};
  if (kHeadDim == 192) return {1, 4, 32, 2, 4, 4, 2};
  return {1, 4, 16, 2, 4, 4, 2};
}

}  // namespace onepass::cuda::sm80
