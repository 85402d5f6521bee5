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
  bool k_ahead = true;   // K's fragments are loaded a step ahead in the source; ptxas moves them besides
  bool retries = false;  // weights too large for their references are found at the end of a tile, not of each block

  bool operator==(const ForwardTiles&) const = default;
  /// Warps may be a block of keys apart: they meet at a barrier in shared memory instead of the block's own.
  constexpr bool phases() const { return stages > 2; }
  constexpr int threads() const { return warps * 32; }
  constexpr int warp_rows() const { return row_tiles * 16; }
  constexpr int block_q() const { return warps * warp_rows(); }
  constexpr std::int64_t shared_bytes(int head_dim) const {
    return std::int64_t{block_q() + 2 * stages * block_k} * head_dim * 2 + (phases() ? 16 : 0);
  }
};

/// What stops the next size, with 65,536 registers and, of shared memory, 227 KB (9.0), 163 KB (8.0), 99 KB (8.6):
template <int kHeadDim>
constexpr ForwardTiles forward_tiles() {
  if (kHeadDim == 32) return {2, 4, 64, 2, 3, true};  // a fourth block an SM: 128 registers a thread, which spill
  if (kHeadDim == 64) return {2, 4, 64, 2, 2, true, true, true};   // 96 keys are slower; three blocks of 32 keys, too
  if (kHeadDim == 96) return {2, 4, 64, 2, 2, false, true, true};  // a third block an SM: 168 registers, 96 of them O
  if (kHeadDim == 128) return {2, 4, 48, 2, 2, false};             // 64 keys: two blocks an SM need 192 KB
  if (kHeadDim == 192) return {1, 4, 32, 2, 2, true, true, true};  // 32 rows a warp: 192 registers of O alone
  return {1, 4, 32, 2, 2, true, true, true};                       // the same; 98,304 bytes are all that 8.6 has
}

/// The same for multiprocessors that have the shared memory for it, 228 KB (9.0, 10.0).
template <int kHeadDim>
constexpr ForwardTiles roomy_forward_tiles() {
  if (kHeadDim == 128) return {2, 4, 64, 2, 2, false, false};      // 255 registers are full
  if (kHeadDim >= 192) return {1, 8, 32, 4, 1, true, true, true};  // half as many reads of K and V from L2
  return forward_tiles<kHeadDim>();
}

}  // namespace onepass::cuda::sm80
