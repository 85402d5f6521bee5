// What every part of the Hopper forward shares: the constants of an instance,
// its parameters, its shared memory.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "core/problem.h"
#include "cuda/sm90/tiles.h"

namespace onepass::cuda::sm90 {

/// block_q query rows of one head, and the keys they see: block j holds the
/// keys [j block_k, (j + 1) block_k) of the sequence, counted from the first
/// key that any of its rows sees.
struct alignas(16) RowTile {
  int q_row;        // row in Q's seq dimension
  int rows;         // rows to write, at most block_q
  int real_rows;    // the first of them, inside the sequence; the others are
                    // written as rows that see nothing
  int head;         // of Q
  int batch;        // coordinate in the tensors: 0 when packed
  int kv_head;      //
  int k_row;        // row of key 0 in K's seq dimension
  int k_length;     // keys of the sequence that any row sees
  int lo, hi;       // row r of the tile sees the keys max(0, lo + r) <= j <
                    // min(k_length, hi + r)
  int first, last;  // blocks that some row sees; last < first: no more tiles
};

/// Blocks that a consumer takes, from the right: all of the tile's, or those
/// that its own rows see.
struct alignas(8) Blocks {
  int first, last;
  int inner_first, inner_last;  // those that every row sees fully, after another one where that is needed
  int right, left;              // how many of the tile's lie beside them
};

/// The kernel's scalar parameters.
struct ForwardParams {
  MaskSpec mask;
  int seq_q, seq_k, total_q, total_k, batch, heads_q, group;
  int head_dim, head_dim_v;
  int blocks_q;           // tiles of a padded sequence
  int tiles;              // padded: in all; packed: at most
  int section, sections;  // heads (of all batch items) whose tiles are taken
                          // together; how many such groups
  float scale_log2;
  Tensor q, k, v, out;
  RowTensor lse;
  unsigned* next_tile;  // 0 at the start: tiles are taken in turn; null: each
                        // block has its own
};

template <class T_, int kHeadDim_, int kHeadDimV_, ForwardTile kTile_>
struct ForwardConfig {
  using T = T_;
  static constexpr ForwardTile kTile = kTile_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kWarpgroups = kTile.warpgroups, kBlockQ = kTile.block_q(), kBlockK = kTile.block_k;
  static constexpr int kStages = kTile.stages, kQStages = kTile.q_stages;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kPanels = (kHeadDim + 63) / 64, kPanelsV = (kHeadDimV + 63) / 64;
  /// float16's probabilities end at 2^16; bfloat16's have float32's range.
  static constexpr bool kNarrow = std::is_same_v<T, __half>;
  static constexpr int kTileSlots = 4;
  /// The last tile's LSE is written together with its O, in the second step of the next one, where there are registers
  /// to keep its sums; else in the first.
  static constexpr bool kEndsAtOnce = kHeadDimV > 64;
  static constexpr int kQBytes = kPanels * kBlockQ * 128, kKBytes = kPanels * kBlockK * 128,
                       kVBytes = kPanelsV * kBlockK * 128, kOutBytes = kTile.out_panels * 64 * 128;

  static_assert((kStages & (kStages - 1)) == 0 && (kQStages & (kQStages - 1)) == 0, "slots are counted by bits");
  static_assert(registers_fit(kTile));
  static_assert(kHeadDim % 16 == 0 && kHeadDimV % 16 == 0 && kBlockK % 16 == 0);
  static_assert(kPanelsV % kTile.out_panels == 0);
  static_assert(!(kTile.ping_pong && kTile.skip), "turns need equal numbers of blocks");
};

/// A consumer warp's rows to compute again.
struct RepairList {
  static constexpr int kTiles = 4;
  int now;    // 1: those of the tile in hand
  int count;  // finished tiles
  RowTile tiles[kTiles];
};

/// Barriers: full ones are completed by TMA (tiles: by the scheduler), empty
/// ones by the readers.
template <class C>
struct ForwardShared {
  alignas(1024) unsigned char q[C::kQStages][C::kQBytes];         // (panels, block_q, 64),
                                                                  // 128-byte swizzle
  alignas(1024) unsigned char k[C::kStages][C::kKBytes];          // (panels, block_k, 64)
  alignas(1024) unsigned char v[C::kStages][C::kVBytes];          // (panels_v, block_k, 64)
  alignas(1024) unsigned char out[C::kWarpgroups][C::kOutBytes];  // (out_panels, 64, 64) of each consumer
  std::uint64_t q_full[C::kQStages];                              // Q has come; the consumers wait
  std::uint64_t q_empty[C::kQStages];                             // each consumer after its last product
                                                                  // with it; K's loader waits
  std::uint64_t k_full[C::kStages];                               // K has come; the consumers wait
  std::uint64_t k_empty[C::kStages];                              // each consumer after its product with it;
                                                                  // K's loader waits
  std::uint64_t v_full[C::kStages];                               // V has come; the consumers wait
  std::uint64_t v_empty[C::kStages];                              // each consumer after its product with it;
                                                                  // V's loader waits
  std::uint64_t tile_full[C::kTileSlots];                         // the scheduler has written the slot;
                                                                  // loaders and consumers wait
  std::uint64_t tile_empty[C::kTileSlots];                        // each loader and consumer is done
                                                                  // with the slot; the scheduler waits
  std::uint64_t tile_begun;                                       // K's loader begins a tile; a scheduler that takes
                                                                  // tiles in turn waits, so that it takes one ahead
  RowTile tiles[C::kTileSlots];
  Blocks blocks[C::kTileSlots][C::kWarpgroups];
  RepairList repairs[C::kWarpgroups * 4];  // of each consumer warp
  int drain[C::kWarpgroups];               // 1: a warp's list is nearly full; all warps of
                                           // the warpgroup empty theirs
};

}  // namespace onepass::cuda::sm90
