// The backward pass on mma.sync (sm_80). One thread block owns block_k keys of one KV head and passes over the query
// tiles that see them, for all query heads of the group. Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T,
// so that P^T and dS^T leave the products in just the registers that dV += P^T dO and dK += dS^T Q take them from; only
// dQ += dS K needs dS from shared memory, one step later, so that a step has one barrier of the whole block.
// FlashAttention-2 (Dao, 2023), algorithm 2, with the loop over keys outside.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/reduce.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/sm80/backward_params.h"
#include "cuda/sm80/backward_products.cuh"
#include "cuda/sm80/backward_scores.cuh"
#include "cuda/sm80/backward_tiles.h"
#include "cuda/sm80/rows.cuh"

namespace onepass::cuda::sm80 {

/// What a warp computes: everything of its keys, or P and dV, or dS and dK.
enum class Role { both, values, keys };

/// Shape: the Element type T, buckets kD and kDV of head_dim and head_dim_v, and the tile kTile.
template <class Shape>
class BackwardBlock {
  using T = typename Shape::Element;
  static constexpr BackwardTile kTile = Shape::kTile;
  static constexpr int kD = Shape::kD, kDV = Shape::kDV;
  static_assert(kTile.valid(kD));
  static constexpr int kQ = kTile.block_q, kK = kTile.block_k;
  static constexpr int kThreads = kTile.threads(), kWarps = kTile.warps;
  static constexpr int kM = kTile.warp_k() / 16;  // blocks of 16 keys of a warp
  static constexpr int kN = kQ / 16;              // blocks of 16 query rows of a tile
  /// Blocks of 16 query rows that are scored at once: few enough for the registers of a warp that computes everything;
  /// else all, since each part reads K and V anew.
  static constexpr int kPart = kTile.roles == 1 && kN % 2 == 0 ? 2 : kN;
  static constexpr int kParts = kN / kPart;
  static constexpr int kDqWarps = kWarps / kTile.roles;        // warps that compute dQ
  static constexpr int kCopyThreads = kThreads / kTile.roles;  // threads that copy the query tiles: all, or P's
  static constexpr int kHandN = kPart / kTile.hands;           // blocks of query rows of a part of P
  static constexpr int kDqM = kN / kTile.dq_warps_q, kDqN = kD / 16 / kTile.dq_warps_d;
  static constexpr int kDqAtOnce = kDqM * kDqN > 8 ? kDqN / 2 : kDqN;  // 16 columns each: their sums are in registers
  static_assert(kDqN % kDqAtOnce == 0);

  // Shared memory, in bytes from its start.
  static constexpr int kOffsetK = 0, kOffsetV = kOffsetK + 2 * kK * kD;
  static constexpr int kOffsetStages = kOffsetV + 2 * kK * kDV;
  static constexpr int kStageDO = 2 * kQ * kD, kStageStats = kStageDO + 2 * kQ * kDV,
                       kStageBytes = kStageStats + 8 * kQ;
  static constexpr int kOffsetDS = kOffsetStages + 2 * kStageBytes, kBytesDS = 2 * kK * kQ;
  static constexpr int kOffsetScope = kOffsetDS + 2 * kBytesDS;
  static_assert(kOffsetScope + kTile.kScopeBytes == kTile.shared_bytes(kD, kDV));
  static_assert(sizeof(KeyScope) <= kTile.kScopeBytes);
  static_assert(2 * kStageBytes >= 2 * kK * kD);  // dK leaves by way of the stages

  enum Barrier {
    kStep = 1,  // all threads: the stage of this step has landed, dS of the last is written, the other buffers are free
    kPair = 2,  // and on, one a pair of warps and part of P: it is in shared memory (values arrives, keys waits)
  };

 public:
  __device__ __forceinline__ explicit BackwardBlock(const BackwardParams& params)
      : p(params), lane_(threadIdx.x % 32), warp_(threadIdx.x / 32) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      const unsigned block = p.deterministic ? atomicAdd(p.turns + p.heads_q * p.tiles * kDqWarps, 1u) : blockIdx.x;
      scope().template find<kQ, kK, kD, kDqWarps>(p, block);
    }
    __syncthreads();  // all threads: the scope is written
    if (scope().rows_left <= 0) return;
    load_keys();
    if (scope().tile_begin < scope().tile_end && threadIdx.x < kCopyThreads) load_stage(0, {0, scope().tile_begin});
    if constexpr (kTile.roles == 1) {
      pass<Role::both>();
    } else if (warp_ < kWarps / 2) {
      pass<Role::values>();
    } else {
      pass<Role::keys>();
    }
  }

 private:
  /// Waits for all copies that this thread has begun; only those of a closed group are waited for.
  static __device__ __forceinline__ void wait_for_copies() {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  }
  static __device__ __forceinline__ unsigned char* s_bytes() { return ptx::dynamic_shared(); }
  static __device__ __forceinline__ std::uint32_t s_base() { return ptx::shared_address(s_bytes()); }
  static __device__ __forceinline__ KeyScope& scope() { return *reinterpret_cast<KeyScope*>(s_bytes() + kOffsetScope); }

  /// A query tile of one of the group's heads. The heads follow one another.
  struct Step {
    int g, tile;
  };
  __device__ __forceinline__ Step after(Step at) const {
    return at.tile + 1 < scope().tile_end ? Step{at.g, at.tile + 1} : Step{at.g + 1, scope().tile_begin};
  }
  __device__ __forceinline__ Step before(Step at) const {
    return at.tile > scope().tile_begin ? Step{at.g, at.tile - 1} : Step{at.g - 1, scope().tile_end - 1};
  }

  __device__ __forceinline__ int key_warp() const { return kTile.roles == 1 ? warp_ : warp_ % (kWarps / 2); }
  /// For addresses that warps which compute everything have no registers to keep.
  __device__ __forceinline__ int lane() const { return kTile.roles == 1 ? ptx::recomputed(lane_) : lane_; }
  __device__ __forceinline__ int first_key() const { return key_warp() * 16 * kM; }
  __device__ __forceinline__ std::uint32_t s_stage(int stage) const {
    return s_base() + kOffsetStages + stage * kStageBytes;
  }
  __device__ __forceinline__ std::uint32_t s_ds(int stage) const { return s_base() + kOffsetDS + stage * kBytesDS; }
  /// Of a tile in the workspace, counted from the first of the sequence and the group's first head.
  __device__ __forceinline__ int relative_tile(int g, int tile) const { return g * static_cast<int>(p.tiles) + tile; }

  __device__ __forceinline__ void load_keys() {
    const auto& o = p.operands;
    load_rows<kD, kK, kThreads>(s_base() + kOffsetK, o.k.row(scope().b, scope().key_row, scope().kv_head),
                                o.k.stride_seq, scope().key_begin, scope().key_end, p.head_dim, p.k_aligned,
                                threadIdx.x);
    load_rows<kDV, kK, kThreads>(s_base() + kOffsetV, o.v.row(scope().b, scope().key_row, scope().kv_head),
                                 o.v.stride_seq, scope().key_begin, scope().key_end, p.head_dim_v, p.v_aligned,
                                 threadIdx.x);
  }

  __device__ __forceinline__ void load_stage(int stage, Step at_step) {
    const int g = at_step.g, tile = at_step.tile;
    const std::uint32_t s = s_stage(stage);
    const int begin = scope().row_begin(tile, kQ), end = scope().row_end(tile, kQ);
    const bool whole = end - begin == kQ;
    const auto at = [&](const char* g_first, std::uint32_t row_bytes, std::uint32_t head_bytes) {
      return g_first + std::uint64_t{static_cast<std::uint32_t>(tile)} * (kQ * row_bytes) +
             std::uint64_t{static_cast<std::uint32_t>(g)} * head_bytes;
    };
    if (whole && p.q_whole) {
      load_whole_rows<kD, kQ, kCopyThreads>(s, at(scope().g_q, p.q_row_bytes, p.q_head_bytes), p.q_row_bytes,
                                            threadIdx.x);
    } else {
      load_rows<kD, kQ, kCopyThreads>(s, tile_rows(p.operands.q, g, tile), p.operands.q.stride_seq, begin, end,
                                      p.head_dim, p.q_aligned, threadIdx.x);
    }
    if (whole && p.grad_out_whole) {
      load_whole_rows<kDV, kQ, kCopyThreads>(s + kStageDO,
                                             at(scope().g_grad_out, p.grad_out_row_bytes, p.grad_out_head_bytes),
                                             p.grad_out_row_bytes, threadIdx.x);
    } else {
      load_rows<kDV, kQ, kCopyThreads>(s + kStageDO, tile_rows(p.operands.grad_out, g, tile),
                                       p.operands.grad_out.stride_seq, begin, end, p.head_dim_v, p.grad_out_aligned,
                                       threadIdx.x);
    }
    static_assert(kQ / 2 <= kCopyThreads);
    if (threadIdx.x < kQ / 2) {
      ptx::cp_async_16(s + kStageStats + threadIdx.x * 16,
                       scope().g_stats + std::int64_t{relative_tile(g, tile)} * (2 * kQ) + threadIdx.x * 4);
    }
  }
  __device__ __forceinline__ const char* tile_rows(const Tensor& x, int g, int tile) const {
    return x.row(scope().b, scope().sequence.q_row + std::int64_t{tile} * kQ, scope().kv_head * p.group + g);
  }

  template <Role kRole>
  __device__ __forceinline__ void pass() {
    float r_dv[kRole == Role::keys ? 1 : kM][kDV / 8][4];
    float r_dk[kRole == Role::values ? 1 : kM][kD / 8][4];
    if constexpr (kRole != Role::keys) set_zero(r_dv);
    if constexpr (kRole != Role::values) set_zero(r_dk);
    int stage = 0;
    for (Step at = {0, scope().tile_begin}; at.g < p.group && scope().tile_begin < scope().tile_end;
         stage = 1 - stage) {
      const bool first = at.g == 0 && at.tile == scope().tile_begin;
      wait_for_copies();
      ptx::named_barrier_sync(kStep, kThreads);
      // The warps that compute P have time at the end of a step.
      const auto load_next = [&] {
        const Step next = after({ptx::recomputed(at.g), ptx::recomputed(at.tile)});
        if (next.g < p.group) load_stage(1 - stage, next);
      };
      if constexpr (kRole == Role::both) {
        if (kTile.whole_apart && scope().full(at.tile)) {
          add_all<true>(stage, at.tile, r_dv, r_dk, load_next);
        } else {
          add_all<false>(stage, at.tile, r_dv, r_dk, load_next);
        }
        const Step now = {ptx::recomputed(at.g), ptx::recomputed(at.tile)};  // no registers for what follows from it
        if (now.g > 0 || now.tile > scope().tile_begin) add_dq(1 - stage, before(now));
      }
      if (kRole == Role::values && kTile.copies_first) load_next();
      if constexpr (kRole == Role::values) add_dv(stage, at.tile, r_dv);
      if (kRole == Role::values && !kTile.copies_first) load_next();
      if (kRole == Role::keys && !first) add_dq(1 - stage, before(at));
      if constexpr (kRole == Role::keys) add_dk(stage, at.tile, r_dk);
      at = after(at);
    }
    wait_for_copies();
    ptx::named_barrier_sync(kStep, kThreads);  // from here on nobody reads V and the stages
    const auto& o = p.operands;
    if constexpr (kRole != Role::values)
      write<kD>(s_base() + kOffsetStages, r_dk, p.scale, o.grad_k, p.head_dim, p.grad_k_aligned);
    if constexpr (kRole != Role::keys)
      write<kDV>(s_base() + kOffsetV, r_dv, 1.0f, o.grad_v, p.head_dim_v, p.grad_v_aligned);
    if (kRole != Role::values && scope().tile_begin < scope().tile_end) {
      add_dq(1 - stage, {p.group - 1, scope().tile_end - 1});
    }
  }

  /// This warp's keys as rows of K or V, which begin at `offset`.
  template <int kCols>
  __device__ __forceinline__ LaneRows<kCols> own_rows(int offset) const {
    const int at = lane();
    return {s_base() + offset, first_key() + (at & 15), at >> 4};
  }
  /// S^T and dP^T of a part of the tile.
  template <class Between = Nothing>
  __device__ __forceinline__ void score(int stage, int part, Scores<kM, kPart>& r_s, const Between& between = {}) {
    auto rows_q = block_rows<kD, false>(s_stage(stage), lane_);
    rows_q.lane += part * 16 * kPart * 2 * kD;
    multiply_rows<T, kM, kPart, kD>(r_s, own_rows<kD>(kOffsetK), rows_q, between);
  }
  template <class Between = Nothing>
  __device__ __forceinline__ void score_gradient(int stage, int part, Scores<kM, kPart>& r_dp,
                                                 const Between& between = {}) {
    auto rows_do = block_rows<kDV, false>(s_stage(stage) + kStageDO, lane_);
    rows_do.lane += part * 16 * kPart * 2 * kDV;
    multiply_rows<T, kM, kPart, kDV>(r_dp, own_rows<kDV>(kOffsetV), rows_do, between);
  }
  /// dV += P^T dO and dK += dS^T Q of a part.
  template <class Between = Nothing>
  __device__ __forceinline__ void add_values(int stage, int part, const Weights<kM, kPart>& r_p,
                                             float (&r_dv)[kM][kDV / 8][4], const Between& between = {}) {
    auto rows_do = block_rows<kDV, true>(s_stage(stage) + kStageDO, lane_);
    rows_do.lane += part * 16 * kPart * 2 * kDV;
    multiply_add<T, kM, kDV / 16, kPart>(r_dv, r_p, rows_do, between);
  }
  template <class Between = Nothing>
  __device__ __forceinline__ void add_keys(int stage, int part, const Weights<kM, kPart>& r_ds,
                                           float (&r_dk)[kM][kD / 8][4], const Between& between = {}) {
    auto rows_q = block_rows<kD, true>(s_stage(stage), lane_);
    rows_q.lane += part * 16 * kPart * 2 * kD;
    multiply_add<T, kM, kD / 16, kPart>(r_dk, r_ds, rows_q, between);
  }
  /// Statistics of a part's rows.
  __device__ __forceinline__ std::uint32_t s_lse(int stage, int part) const {
    return s_stage(stage) + kStageStats + 64 * kPart * part;
  }
  __device__ __forceinline__ std::uint32_t s_d(int stage, int part) const { return s_lse(stage, part) + 4 * kQ; }
  __device__ __forceinline__ void hide_part(int tile, int part, Weights<kM, kPart>& r) const {
    if (!scope().full(tile)) hide<kM, kPart>(r, scope().mask(tile, kQ), part * 16 * kPart, first_key(), lane_);
  }

  /// Address of this lane's 16 bytes in block (m, n) of 16 keys x 16 query rows of the pair's dS: P is handed over in
  /// the very place that dS of the same block takes afterwards.
  __device__ __forceinline__ LaneRows<kQ> handed_over(int stage) const {
    return {s_ds(stage), first_key() + (lane_ & 15), lane_ >> 4};
  }
  __device__ __forceinline__ void hand_over(int stage, int m, int n, const Weights<kM, kPart>& r_p) {
    ptx::store_shared(handed_over(stage).at(16 * m, 2 * n), r_p[m][n][0], r_p[m][n][1], r_p[m][n][2], r_p[m][n][3]);
  }
  __device__ __forceinline__ int hand_barrier(int hand) const { return kPair + hand * kDqWarps + key_warp(); }
  /// Part `hand` of P.
  __device__ __forceinline__ void take_over(int stage, int hand, Weights<kM, kPart>& r_p) {
    ptx::named_barrier_sync(hand_barrier(hand), 64);
    const LaneRows<kQ> rows = handed_over(stage);
#pragma unroll
    for (int n = hand * kHandN; n < (hand + 1) * kHandN; ++n) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::load_shared(rows.at(16 * m, 2 * n), r_p[m][n][0], r_p[m][n][1], r_p[m][n][2], r_p[m][n][3]);
      }
    }
    __syncwarp();  // all lanes have read before any writes dS there
  }
  /// dS of a part, or of one piece of it, to shared memory, for dQ.
  __device__ __forceinline__ void store_ds(int stage, int part, const Weights<kM, kPart>& r_ds, int i) {
    const Piece<kM> x(i);
    const LaneRows<kQ> rows(s_ds(stage), first_key() + lane() / 4, 0);
    ptx::store_shared(rows.at(16 * x.m + 8 * x.half, 2 * part * kPart + x.n) + lane_ % 4 * 4,
                      r_ds[x.m][x.n / 2][x.register_of_weights()]);
  }
  __device__ __forceinline__ void store_ds(int stage, int part, const Weights<kM, kPart>& r_ds) {
#pragma unroll
    for (int i = 0; i < kPieces<kM, kPart>; ++i) store_ds(stage, part, r_ds, i);
  }

  /// A step of the warps that compute P and dV: the weights of 16 query rows between the products of the 16 before.
  __device__ __forceinline__ void add_dv(int stage, int tile, float (&r_dv)[kM][kDV / 8][4]) {
    Scores<kM, kPart> r_s;
    Weights<kM, kPart> r_p;
    score(stage, 0, r_s);
    float lse[2 * kPart][2];
    load_statistic<kPart>(lse, 0, s_lse(stage, 0), lane_);
    const auto piece = [&](int i) {
      const int n = i / (4 * kM);
      if (i % (4 * kM) == 0 && n + 1 < kPart) load_statistic<kPart>(lse, n + 1, s_lse(stage, 0), lane_);
      weigh<T, kM, kPart>(i, r_s, lse[Piece<kM>(i).n], p.scale_log2, r_p);
    };
    if (scope().full(tile)) {
      const auto pieces = [&](int begin, int end) {
#pragma unroll
        for (int i = begin; i < end; ++i) {
          piece(i);
          const Piece<kM> x(i);
          if (x.n % 2 == 1 && x.half == 1) hand_over(stage, x.m, x.n / 2, r_p);
          if ((i + 1) % (4 * kM * kHandN) == 0) ptx::named_barrier_arrive(hand_barrier(i / (4 * kM * kHandN)), 64);
        }
      };
      pieces(0, 4 * kM);
      add_values(stage, 0, r_p, r_dv, [&](int at, int) { pieces_ahead<kM, kPart, kDV / 16>(at, pieces); });
    } else {
#pragma unroll
      for (int i = 0; i < kPieces<kM, kPart>; ++i) piece(i);
      hide_part(tile, 0, r_p);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kPart; ++n) hand_over(stage, m, n, r_p);
      }
#pragma unroll
      for (int hand = 0; hand < kTile.hands; ++hand) ptx::named_barrier_arrive(hand_barrier(hand), 64);
      add_values(stage, 0, r_p, r_dv);
    }
  }

  /// A step of the warps that compute dS and dK.
  __device__ __forceinline__ void add_dk(int stage, int tile, float (&r_dk)[kM][kD / 8][4]) {
    Scores<kM, kPart> r_dp;
    Weights<kM, kPart> r_ds;
    score_gradient(stage, 0, r_dp);
    float d[2 * kPart][2];
    load_statistic<kPart>(d, 0, s_d(stage, 0), lane_);
    const auto piece = [&](int i) {
      const int n = i / (4 * kM);
      if (i % (4 * kM * kHandN) == 0) take_over(stage, n / kHandN, r_ds);
      if (i % (4 * kM) == 0 && n + 1 < kPart) load_statistic<kPart>(d, n + 1, s_d(stage, 0), lane_);
      differentiate<T, kM, kPart>(i, r_dp, d[Piece<kM>(i).n], r_ds);
    };
    if (scope().full(tile)) {
      const auto pieces = [&](int begin, int end) {
#pragma unroll
        for (int i = begin; i < end; ++i) {
          piece(i);
          store_ds(stage, 0, r_ds, i);
        }
      };
      pieces(0, 4 * kM);
      add_keys(stage, 0, r_ds, r_dk, [&](int at, int) { pieces_ahead<kM, kPart, kD / 16>(at, pieces); });
    } else {
#pragma unroll
      for (int i = 0; i < kPieces<kM, kPart>; ++i) piece(i);
      hide_part(tile, 0, r_ds);
      store_ds(stage, 0, r_ds);
      add_keys(stage, 0, r_ds, r_dk);
    }
  }

  /// A step of warps that compute everything: exponentials between the products of dP, dS between those of dV. kWhole:
  /// no pair of the tile is hidden, so that the step is straight code; else it is kept short beside that.
  template <bool kWhole, class LoadNext>
  __device__ __forceinline__ void add_all(int stage, int tile, float (&r_dv)[kM][kDV / 8][4],
                                          float (&r_dk)[kM][kD / 8][4], const LoadNext& load_next) {
#pragma unroll(kWhole || !kTile.whole_apart ? kParts : 1)
    for (int part = 0; part < kParts; ++part) {
      Scores<kM, kPart> r_s, r_dp;
      Weights<kM, kPart> r_p, r_ds;
      score(stage, part, r_s);
      if (part == 0) load_next();
      float lse[2 * kPart][2], d[2 * kPart][2];
      load_statistic<kPart>(lse, s_lse(stage, part), lane_);
      load_statistic<kPart>(d, s_d(stage, part), lane_);
      score_gradient(stage, part, r_dp, [&](int at, int count) {
        pieces_behind<kPieces<kM, kPart>>(
            at, count, [&](int i) { weigh<T, kM, kPart>(i, r_s, lse[Piece<kM>(i).n], p.scale_log2, r_p); });
      });
      if constexpr (!kWhole) hide_part(tile, part, r_p);
      copy_weights(r_ds, r_p);
      add_values(stage, part, r_p, r_dv, [&](int at, int count) {
        pieces_behind<kPieces<kM, kPart>>(
            at, count, [&](int i) { differentiate<T, kM, kPart>(i, r_dp, d[Piece<kM>(i).n], r_ds); });
      });
      if constexpr (!kWhole) hide_part(tile, part, r_ds);
      store_ds(stage, part, r_ds);
      add_keys(stage, part, r_ds, r_dk);
    }
  }

  /// dQ += dS K of a tile, this warp's part of it, in the order of the products' fragments.
  __device__ __forceinline__ void add_dq(int stage, Step at) {
    const int warp_q = key_warp() / kTile.dq_warps_d, warp_d = key_warp() % kTile.dq_warps_d;
    const int block_row = (lane_ & 7) + 8 * (lane_ >> 4), block_chunk = (lane_ >> 3) & 1;
    const LaneRows<kQ> rows_ds(s_ds(stage), block_row, 2 * warp_q + block_chunk);
    const LaneRows<kD> rows_k(s_base() + kOffsetK, (lane_ & 15), 2 * warp_d + (lane_ >> 4));
#pragma unroll
    for (int first = 0; first < kDqN; first += kDqAtOnce) {
      float r_dq[kDqM][2 * kDqAtOnce][4];
      multiply_columns<T, kDqM, kTile.dq_warps_q, kDqAtOnce, kTile.dq_warps_d, kK>(r_dq, rows_ds, rows_k, first);
      const std::int64_t index = relative_tile(at.g, at.tile);  // found here, where the product's registers are free
      float* g_dq = scope().g_dq + index * (kQ * kD) + (warp_q * (kD / 8) + 2 * warp_d) * 128 + lane_;
      if (p.deterministic && first == 0) await_turn(index, at.tile);
#pragma unroll
      for (int m = 0; m < kDqM; ++m) {
#pragma unroll
        for (int n = 0; n < 2 * kDqAtOnce; ++n) {
          const int fragment = m * kTile.dq_warps_q * (kD / 8) + (first + n / 2) * kTile.dq_warps_d * 2 + n % 2;
#pragma unroll
          for (int e = 0; e < 4; ++e) ptx::reduce_add(g_dq + fragment * 128 + e * 32, r_dq[m][n][e]);
        }
      }
    }
    if (p.deterministic) {
      __syncwarp();
      if (lane_ == 0) ptx::reduce_add_release(turn_of(relative_tile(at.g, at.tile)), 1);
    }
  }
  /// This warp's counter of a tile, and waiting for it.
  __device__ __forceinline__ unsigned* turn_of(std::int64_t index) const {
    return scope().g_turns + index * kDqWarps + key_warp();
  }
  __device__ __forceinline__ void await_turn(std::int64_t index, int tile) const {
    const unsigned* const g_turn = turn_of(index);
    const auto turn = static_cast<unsigned>(scope().key_block - scope().first_block(tile, kQ, kK));
    while (__shfl_sync(0xffffffffu, ptx::load_acquire(g_turn), 0) != turn) {  // the whole warp or none of it
    }
  }

  /// This warp's rows of dK or dV, by way of its own rows of a place that nobody reads any more.
  template <int kCols>
  __device__ __forceinline__ void write(std::uint32_t s_place, const float (&r)[kM][kCols / 8][4], float factor,
                                        const Tensor& grad, int dim, bool aligned) {
    const int first = first_key(), begin = scope().key_begin - first, end = scope().key_end - first;
    const std::uint32_t s_own = s_place + first * 2 * kCols;
    put_sums<T, kM, kCols>(s_own, r, factor, lane_);
    char* const g = grad.row(scope().b, scope().key_row + first, scope().kv_head);
    if (begin <= 0 && end >= 16 * kM && dim == kCols && aligned) {
      store_whole_rows<kCols, 16 * kM>(g, 2 * grad.stride_seq, s_own, lane_);
    } else {
      store_rows<kCols, 16 * kM>(g, grad.stride_seq, s_own, scope().rows_left - first, begin, end, dim, aligned, lane_);
    }
  }

  const BackwardParams& p;
  int lane_, warp_;
};

/// Grid: batch x heads_kv x key_blocks, the key blocks of a head in a row. A deterministic call hands out the blocks by
/// a counter, so that whoever waits for another's turn started after it.
template <class Shape>
__global__ void __launch_bounds__(Shape::kTile.threads(), Shape::kTile.blocks_per_sm)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  BackwardBlock<Shape>(params).run();
}

}  // namespace onepass::cuda::sm80
