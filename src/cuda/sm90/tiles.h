// Tile shapes of the Hopper kernels, with what stops the next size beside each.
#pragma once

namespace onepass::cuda::sm90 {

/// A forward kernel: `warpgroups` consumers of 64 query rows each, one producer warpgroup, one block on each SM.
struct ForwardTile {
  int warpgroups;
  int block_k;
  int stages;      // slots of K, and of V
  int q_stages;    // slots of Q: with 2 the next tile's first product needs no wait
  int out_panels;  // 64-column panels of O that a warpgroup stages at once
  bool ping_pong;  // warpgroups take turns at the tensor cores
  bool skip;       // each warpgroup leaves out the blocks that its own 64 rows do not see
  int consumer_registers, producer_registers;

  constexpr int block_q() const { return 64 * warpgroups; }
  constexpr int threads() const { return 128 * (warpgroups + 1); }
};

inline constexpr int kRegisterFile = 65536;

/// Registers a thread has at launch, which setmaxnreg redistributes.
constexpr int launch_registers(const ForwardTile& t) {
  return kRegisterFile / t.threads() / 8 * 8;
}

constexpr bool registers_fit(const ForwardTile& t) {
  return t.consumer_registers * t.warpgroups + t.producer_registers <= launch_registers(t) * (t.warpgroups + 1);
}

/// Tile of a bucket; `many_keys`: for rows that see thousands of keys, else for few.
constexpr ForwardTile forward_tile(int head_dim, int head_dim_v, bool many_keys) {
  // 64: three warpgroups in turn keep the tensor cores busy once a tile is long (block 160 needs more registers);
  // smaller blocks waste less at short and causal lengths (block 80: registers).
  if (head_dim <= 64) {
    return many_keys ? ForwardTile{3, 128, 4, 2, 1, true, false, 160, 32}
                     : ForwardTile{4, 64, 4, 2, 1, false, true, 112, 32};
  }
  // 96, 128: 224 KB; block 160 would leave Q one slot.
  if (head_dim <= 128 && head_dim_v <= 128) return {2, 128, 2, 2, 2, false, false, 232, 40};
  // 192/128: 216 KB.
  if (head_dim <= 192 && head_dim_v <= 128) return {2, 128, 2, 1, 1, false, false, 232, 40};
  // 192: 208 KB. Blocks not much larger than a warpgroup's rows: worth leaving out.
  if (head_dim <= 192) return {2, 96, 2, 1, 1, false, true, 232, 40};
  // 256: 224 KB; block 80 would fit without room to stage O, and is no faster.
  return {2, 64, 2, 1, 2, false, true, 232, 40};
}

}  // namespace onepass::cuda::sm90
