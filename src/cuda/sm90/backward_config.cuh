// What every part of the Hopper backward shares: tile shapes, parameters, layout of the workspace and of shared memory.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "core/problem.h"
#include "cuda/sm90/backward_tiles.h"

namespace onepass::cuda::sm90 {

/// block_k keys of one KV head, and the query rows that see them. Rows count from the first one of the sequence that
/// sees any key, keys from the tile's first.
struct alignas(16) KeyTile {
  int k_row;      // row of key 0 in K's seq dimension
  int keys;       // keys that some row sees, at most block_k
  int kv_head;    //
  int batch;      // coordinate in the tensors: 0 when packed
  int q_row;      // row 0 in Q's seq dimension
  int q_rows;     // rows of the sequence that see any key
  int first_row;  // of the first step, a multiple of block_q
  int steps;      // query tiles that see the keys; 0: nothing to do
  int lo, hi;     // row r sees the keys max(0, lo + r) <= j < min(keys, hi + r)
  int q_tile;     // row 0's query tile in the workspace, of each head
  int keys_left;  // from the tile's first to the last of the sequence that some row sees
};

/// How a key tile's part of dQ is added to a query tile's sums.
enum class Visit : int {
  first,    // it is stored
  between,  // it is added
  last,     // the sums are added to it, and dQ is written
  only,     // dQ is written
};

/// The visits of key tiles to a query tile of one head, in a word of 64 bits: those begun (unless they are ordered),
/// those that there will be, and those reported, whose part of the sums is in memory.
struct VisitCount {
  static constexpr int kBits = 20, kReports = 2 * kBits;
  static constexpr std::int64_t kMost = (std::int64_t{1} << kBits) - 1;
  static constexpr unsigned long long kBegin = 1, kReport = 1ull << kReports;

  unsigned long long word;

  static __device__ __forceinline__ VisitCount of(std::int64_t all) {
    return {static_cast<unsigned long long>(all) << kBits};
  }
  __device__ __forceinline__ unsigned begun() const { return static_cast<unsigned>(word & kMost); }
  __device__ __forceinline__ unsigned all() const { return static_cast<unsigned>(word >> kBits & kMost); }
  __device__ __forceinline__ unsigned reports() const { return static_cast<unsigned>(word >> kReports); }
};

/// The scalar parameters of all kernels of a call.
/// Workspace, in query tiles of block_q rows, each of one sequence: tiles = batch ceil(seq_q / block_q), packed
/// total_q / block_q + batch; likewise key tiles of block_k:
///   dq     (heads_q, tiles, block_q bucket) float32, in pieces of 64 rows, dq_piece columns, each in the order of the
///          product's registers
///   stats  (heads_q, tiles, 8, block_q / 4 + 4) float32: log2(e) LSE, then D, each by lane of a quad
///   plan   (key tiles heads_kv) KeyTile
///   visits (heads_q, tiles) VisitCount
///   next_tile  uint32, and 60 bytes
struct BackwardParams {
  MaskSpec mask;
  BackwardOperands operands;
  std::int64_t seq_q, seq_k, total_q, total_k;
  std::int64_t batch, tiles, key_tiles;
  std::int64_t item_q_tiles, item_k_tiles;  // of a padded item
  int heads_q, heads_kv, group;
  int head_dim, head_dim_v;
  int section;  // KV heads (of all items) whose key tiles are taken together, those that most rows see first; 0: in
                // turn
  float scale, scale_log2;  // scale, scale log2(e)
  float hidden;             // score of a hidden pair: scale_log2 hidden = -inf
  float* dq;
  float* stats;
  KeyTile* plan;
  VisitCount* visits;  // null: nobody keeps them, and key tiles add to dQ as they come
  unsigned* next_tile;
  bool passes;   // dQ is set to 0 before, added to, and written by a pass of its own
  bool ordered;  // visits come one after another, which is deterministic, and blocks take tiles in that order
  bool in_turn;  // blocks take the next tile when they are done with one; else each has a fixed share

  ONEPASS_INLINE Sequence sequence(std::int64_t b) const {
    return sequence_at(mask, b, seq_q, seq_k, total_q, total_k);
  }
};

/// Visits of a block that may be under way, from their beginning to their report.
inline constexpr unsigned kVisitSlots = 4;

template <class T_, int kHeadDim, int kHeadDimV>
struct BackwardConfig {
  using T = T_;
  static constexpr BackwardTile kTile = backward_tile(kHeadDim, kHeadDimV);
  static constexpr int kD = kHeadDim, kDV = kHeadDimV;
  static constexpr int kBlockQ = kTile.block_q, kBlockK = kTile.block_k, kStages = kTile.stages;
  static constexpr int kMains = 2;               // warpgroups
  static constexpr int kHalves = kBlockK / 64;   // of 64 keys
  static constexpr bool kPaired = kHalves == 1;  // both main warpgroups share the keys
  static constexpr int kThreads = 128 * (kMains + 2);
  static constexpr int kPanels = (kD + 63) / 64, kPanelsV = (kDV + 63) / 64;  // of 64 columns
  static constexpr int kStatWidth = kBlockQ / 4 + 4;  // floats of a lane of a quad; the last 4 keep banks apart
  static constexpr int kStatFloats = 8 * kStatWidth;
  static constexpr int kDqFloats = kBlockQ * kD;  // of a query tile
  static constexpr int kPiece = kTile.dq_piece, kPieceFloats = 64 * kPiece;
  static constexpr int kPieces = kDqFloats / kPieceFloats;
  static constexpr int kQBytes = kBlockQ * kPanels * 128, kDoBytes = kBlockQ * kPanelsV * 128;
  static_assert(kTile.main_registers[0] + kTile.main_registers[1] + kTile.query_registers + kTile.loader_registers <=
                4 * 128);
  static_assert(kD % 32 == 0 && kDV % 32 == 0 && kBlockQ % 64 == 0 && (kHalves == 1 || kHalves == 2));
  static_assert(kPieces % kTile.dq_slots == 0, "each piece of a step has its slot");
  static_assert(kD % kTile.dq_columns == 0 && kTile.dq_columns % kPiece == 0);
  static_assert(kD == kTile.dq_columns || kTile.dq_columns % 64 == 0, "products begin with a panel");
};

/// Barriers: full ones are completed by TMA unless told otherwise. "Main" are the two warpgroups of scores, dV and dK.
template <class C>
struct BackwardShared {
  // (panels, block_k, 64), 128-byte swizzle
  alignas(1024) unsigned char k[C::kTile.k_slots][C::kBlockK * C::kPanels * 128];
  alignas(1024) unsigned char v[C::kBlockK * C::kPanelsV * 128];                    // (panels_v, block_k, 64)
  alignas(1024) unsigned char q[C::kStages][C::kQBytes];                            // (panels, block_q, 64)
  alignas(1024) unsigned char grad_out[C::kStages][C::kDoBytes];                    // (panels_v, block_q, 64)
  alignas(1024) unsigned char ds[C::kTile.ds_slots][C::kHalves][C::kBlockQ * 128];  // (block_q, 64 keys) of each half
  alignas(1024) float dq[C::kTile.dq_slots][C::kPieceFloats];  // each warp of the dQ warpgroup owns a quarter
  float stats[C::kStages][C::kStatFloats];
  std::uint64_t k_full[C::kTile.k_slots];     // K has come; main and dQ wait
  std::uint64_t k_empty[C::kTile.k_slots];    // each dQ warp after its last product of the tile; a loader waits
  std::uint64_t v_full[C::kHalves];           // its 64 rows of V have come; a main warpgroup waits
  std::uint64_t v_empty[C::kHalves];          // each warp of that one after its last product; a loader waits
  std::uint64_t q_full[C::kStages];           // Q, LSE and D have come; main waits
  std::uint64_t grad_out_full[C::kStages];    // dO has come; main waits
  std::uint64_t stage_empty[C::kStages];      // each main warp after its last product of the step; the loaders wait
  std::uint64_t ds_full[C::kTile.ds_slots];   // each warp that writes dS has; dQ waits
  std::uint64_t ds_empty[C::kTile.ds_slots];  // each dQ warp after its product; the writers wait
  std::uint64_t tile_full[2];                 // the scheduler has written the slot; all others wait
  std::uint64_t tile_wanted;                  // Q's loader has come to the last step of a tile; the scheduler waits
  std::uint64_t tile_empty[2];                // each main and dQ warp, loader, keeper; the scheduler waits
  std::uint64_t visit_full[kVisitSlots];      // the keeper lets the step's visit go on; dQ waits
  std::uint64_t sums_full[kVisitSlots];       // each dQ warp's part of the step's sums is in memory; the keeper asks
  Visit visits[kVisitSlots];                  // of these steps
  int visited[kVisitSlots];                   // the keeper's own: their query tiles, -1 where nobody waits for a report
  // Each warp's quarter of the sums has come into the slot; that warp waits.
  std::uint64_t parts_full[C::kTile.dq_slots][4];
  KeyTile tiles[2];
};

/// Where both main warpgroups share the keys, P passes from one to the other.
template <class C>
struct PairShared : BackwardShared<C> {
  alignas(1024) unsigned char p[C::kBlockQ * 128];  // 16 bytes a thread, for each 16 rows
  std::uint64_t p_full;                             // each warp that has P has written it; the warpgroup of dS waits
  std::uint64_t p_empty;                            // each of its warps has dP, and P in registers; that of P waits
};

template <class C>
using BlockShared = std::conditional_t<C::kPaired, PairShared<C>, BackwardShared<C>>;

}  // namespace onepass::cuda::sm90
