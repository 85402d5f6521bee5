// The tile table of the sm_80 kernels, with what stops the next size.
#pragma once

#include "core/tiles.h"

namespace onepass::cuda::sm80 {

struct ForwardTiles {
  int row_tiles;  // 16-row tiles a warp holds
  int warps;
  int block_k;
  int stages;         // of K and V in shared memory
  int blocks_per_sm;  // that the registers must allow
  bool q_in_registers;

  constexpr int threads() const { return warps * 32; }
  constexpr int warp_rows() const { return row_tiles * 16; }
  constexpr int block_q() const { return warps * warp_rows(); }
  constexpr std::int64_t shared_bytes(int head_dim) const {
    return std::int64_t{block_q() + 2 * stages * block_k} * head_dim * 2;
  }
};

template <int kHeadDim>
constexpr ForwardTiles forward_tiles(std::int64_t limit) {
  if (kHeadDim == 32) return {2, 4, 64, 2, 3, true};
  if (kHeadDim == 64) return {2, 4, 32, 2, 3, true};
  if (kHeadDim == 96) return {2, 4, 32, 2, 2, true};
  if (kHeadDim == 128) return {2, 4, 48, 2, 2, false};
  if (kHeadDim == 192) return {1, 8, 32, 2, 1, true};
  return limit >= kSharedBytes80 ? ForwardTiles{1, 8, 32, 2, 1, false} : ForwardTiles{1, 4, 32, 2, 1, false};
}

}  // namespace onepass::cuda::sm80
