// Tile shapes of the Hopper backward, with what stops the next size beside each.
#pragma once

namespace onepass::cuda::sm90 {

/// Four warpgroups: two for scores, dV and dK ("main"), one for dQ, one that loads; one block on each SM. With 128 keys
/// a tile each main warpgroup has 64 of them; 64 keys are shared by both, one has P and dV, the other dS and dK.
struct BackwardTile {
  int block_q, block_k;
  int stages;              // slots of Q and dO
  int k_slots, ds_slots;   // of K and of dS
  int dq_columns;          // of dQ that one product computes
  int dq_piece, dq_slots;  // columns that go to memory together, and how many such pieces are on their way
  int main_registers[2], query_registers, loader_registers;  // of a thread, together four times the 128 at launch
};

/// Registers of a thread: the float32 sums (64 keys of dK and dV take half a register a column each), 24 others; main
/// ones scores or dP (block_q / 2), and P packed (block_q / 4) where one warpgroup has both.
/// Shared memory in KB: K, V, Q, dO, P, dS, dQ, and up to 3 for statistics and barriers.
constexpr BackwardTile backward_tile(int head_dim, int head_dim_v) {
  // 200 registers, which compile to 208. 64 + 16 + 32 + 32 + 32 + 32.
  if (head_dim <= 64) return {128, 128, 2, 2, 2, 64, 64, 2, {208, 208}, 72, 24};
  // 168 registers. 64 + 32 + 32 + 32 + 32 + 24; the second panel of 64 columns is half empty.
  if (head_dim <= 96) return {64, 128, 2, 2, 2, 96, 32, 3, {184, 184}, 112, 32};
  // 200 registers, which compile to 208. 64 + 32 + 32 + 32 + 32 + 32.
  if (head_dim <= 128) return {64, 128, 2, 2, 2, 64, 64, 2, {208, 208}, 72, 24};
  // 128 keys of dK and dV would be 160 registers of sums in each main warpgroup, which leave dQ too few.
  // 48 + 16 + 48 + 32 + 8 + 16 + 48.
  if (head_dim <= 192 && head_dim_v <= 128) return {64, 64, 2, 2, 2, 192, 64, 3, {168, 168}, 144, 32};
  // Likewise 192. 48 + 24 + 48 + 48 + 8 + 16 + 24.
  if (head_dim <= 192) return {64, 64, 2, 2, 2, 192, 32, 3, {168, 168}, 144, 32};
  // Likewise 256. 32 + 32 + 64 + 64 + 8 + 8 + 16: no room for a second slot of K or of dS.
  return {64, 64, 2, 1, 1, 128, 32, 2, {192, 200}, 96, 24};
}

}  // namespace onepass::cuda::sm90
