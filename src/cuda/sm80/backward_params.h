// What the three kernels of a backward call share: the problem, the operands, and where things are in the workspace.
#pragma once

#include "core/problem.h"

namespace onepass::cuda::sm80 {

/// Place of a query row's statistic in its tile: of 16 rows, the four together that a lane has in the products'
/// fragments.
ONEPASS_INLINE constexpr int statistic_place(int row) {
  return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

/// Workspace, in query tiles of block_q rows; every tile belongs to one sequence:
///   dq_sum (heads_q, tiles, block_q * bucket) float32, each tile in the order of the products' fragments
///   stats  (heads_q, tiles, 2, block_q) float32: log2(e) LSE, then D
///   parts  (heads_q, tiles, 2, 3, block_q, bucket) bfloat16: float32's Q and dO, see PartsTile
///   turns  (heads_q, tiles, warps) uint32, and one more: only for a deterministic call
///   (16-bit rows keep the statistics of a tile where statistic_place says)
/// where tiles = batch * ceil(seq_q / block_q), packed: total_q / block_q + batch.
struct BackwardParams {
  MaskSpec mask;
  std::int64_t batch, seq_q, seq_k, total_q, total_k, tiles;
  int heads_q, heads_kv, group;
  int head_dim, head_dim_v;
  float scale, scale_log2;  // scale, scale * log2(e)
  bool deterministic;
  bool q_aligned, k_aligned, v_aligned, out_aligned, grad_out_aligned;  // rows begin at multiples of 16 bytes
  bool grad_q_aligned, grad_k_aligned, grad_v_aligned;
  // Bytes between rows, tiles of block_q rows and heads, where all rows are aligned and as long as the bucket and
  // offsets within a head fit; else q_whole and grad_out_whole are false.
  std::uint32_t q_row_bytes, q_head_bytes, grad_out_row_bytes, grad_out_head_bytes;
  bool q_whole, grad_out_whole;
  std::int64_t key_blocks, query_tiles;  // of the longest item
  BackwardOperands operands;
  float* dq_sum;
  float* stats;
  unsigned* turns;
  unsigned char* parts;  // float32

  ONEPASS_INLINE Sequence sequence(std::int64_t b) const {
    return sequence_at(mask, b, seq_q, seq_k, total_q, total_k);
  }
  /// Key rows of item b, whether its sequence uses them or not.
  ONEPASS_INLINE std::int64_t item_keys(std::int64_t b, const Sequence& s) const {
    return item_rows(mask.cu_seqlens_k, b, s.k_row - s.k_start, seq_k, total_k);
  }
  ONEPASS_INLINE std::int64_t item_queries(std::int64_t b, const Sequence& s) const {
    return item_rows(mask.cu_seqlens_q, b, s.q_row, seq_q, total_q);
  }
  /// First query tile of item b, the same for all heads.
  ONEPASS_INLINE std::int64_t first_tile(std::int64_t b, const Sequence& s, int block_q) const {
    return mask.cu_seqlens_q != nullptr ? s.q_row / block_q + b : b * query_tiles;
  }

 private:
  static ONEPASS_INLINE std::int64_t item_rows(const std::int32_t* cu_seqlens, std::int64_t b, std::int64_t first,
                                               std::int64_t seq, std::int64_t total) {
    if (cu_seqlens == nullptr) return seq;
    return clamp_to<std::int64_t>(cu_seqlens[b + 1] - first, 0, min_of(seq, total - first));
  }
};

}  // namespace onepass::cuda::sm80
