// Tiles of the sm_80 backward kernels.
#pragma once

namespace onepass::cuda::sm80 {

/// How one thread block works. block_k keys stay in shared memory while block_q query rows at a time pass by, in two
/// buffers.
struct BackwardTile {
  int block_q, block_k;
  int warps;
  /// 1: each warp computes P, dS, dV and dK of its own keys. 2: pairs of warps share the keys, one computes P and dV,
  /// the other dS and dK; so twice as many keys a warp fit in its registers, and keys and queries are read half as
  /// often.
  int roles;
  /// The grid of warps over a dQ tile: of all, or of those that compute dS.
  int dq_warps_q, dq_warps_d;
  int blocks_per_sm;  // which the registers must allow
  /// The warps that compute P copy the next tile before their products, not behind them.
  bool copies_first = false;
  int hands = 1;  // parts in which P is handed over
  /// roles 1: tiles of which no pair is hidden have code of their own, without a branch in it.
  bool whole_apart = false;

  static constexpr int kScopeBytes = 256;
  bool operator==(const BackwardTile&) const = default;

  constexpr int threads() const { return 32 * warps; }
  /// Keys of a warp.
  constexpr int warp_k() const { return block_k * roles / warps; }
  constexpr bool valid(int head_dim) const {
    return block_q % 16 == 0 && warp_k() % 16 == 0 && dq_warps_q * dq_warps_d == warps / roles &&
           block_q % (16 * dq_warps_q) == 0 && head_dim % (16 * dq_warps_d) == 0 && block_q % (16 * hands) == 0;
  }
  /// K, V; two stages of Q, dO and of the rows' statistics; two of dS; what the block works on.
  constexpr long shared_bytes(int head_dim, int head_dim_v) const {
    return kScopeBytes + 2L * block_k * (head_dim + head_dim_v) +
           2 * (2L * block_q * (head_dim + head_dim_v) + 8L * block_q) + 2 * 2L * block_k * block_q;
  }
};

/// limit: shared memory that a thread block may have. What stops the next larger tile, on H200: registers (255 a
/// thread) where a row has 163 KB; shared memory in 99 KB.
constexpr BackwardTile backward_tile(int head_dim, long limit) {
  const bool small = limit < 128 * 1024;
  switch (head_dim) {
    case 32: return {64, 128, 4, 1, 2, 2, 3};
    case 64: return {64, 128, 4, 1, 2, 2, 2, false, 1, true};
    case 96: return small ? BackwardTile{32, 64, 4, 2, 1, 2, 1} : BackwardTile{64, 128, 8, 2, 2, 2, 1};
    case 128: return small ? BackwardTile{32, 64, 8, 2, 1, 4, 1} : BackwardTile{64, 128, 8, 2, 2, 2, 1, true, 2};
    case 192: return small ? BackwardTile{32, 32, 4, 2, 1, 2, 1} : BackwardTile{64, 64, 8, 2, 2, 2, 1};
    default: return small ? BackwardTile{16, 32, 4, 2, 1, 2, 1} : BackwardTile{32, 64, 8, 2, 1, 4, 1};
  }
}

/// The same for rows of 163 KB on multiprocessors that have 228 KB (9.0, 10.0).
constexpr BackwardTile roomy_backward_tile(int head_dim, long limit) {
  if (head_dim == 256 && limit >= 128 * 1024) return {64, 64, 8, 2, 2, 2, 1};  // 16 rows of keys a warp: 256 registers
  return backward_tile(head_dim, limit);
}

}  // namespace onepass::cuda::sm80
