// Tile shapes of the Hopper backward, with what stops the next size beside each.
#pragma once

namespace onepass::cuda::sm90 {

/// Two warpgroups of 64 keys each for scores, dV and dK ("main"), one for dQ, one that loads; one block on each SM.
struct BackwardTile {
  int block_q;
  int stages;                                             // slots of Q and dO
  int main_registers, query_registers, loader_registers;  // of a thread, together four times the 128 at launch
};

/// Main registers: dK and dV (half a head dimension each), scores (block_q / 2), P packed (block_q / 4), 24 others. At
/// head_dim 128 that is 200, and compiles to 208.
constexpr BackwardTile backward_tile(int head_dim, int) {
  if (head_dim <= 64) return {128, 2, 208, 72, 24};  // 212 KB
  return {64, 2, 208, 72, 24};                       // 226 KB
}

}  // namespace onepass::cuda::sm90
