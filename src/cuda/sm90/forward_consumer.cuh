// A consumer warpgroup: 64 rows of the tile. One step multiplies the next
// scores while the last probabilities meet V:
//     S(i) = Q K(i)   |   O += P(i - 1) V(i - 1)   |   P(i) = softmax(S(i))
// and runs on over tiles: the first step of a tile finishes the one before,
// whose O is written out in the step after. With one slot of Q a tile is
// finished first, while the next one's Q comes. Blocks are taken from the right.
// Shah et al., "FlashAttention-3" (2024), for the overlap inside a warpgroup.
#pragma once

#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward_mask.cuh"
#include "cuda/sm90/forward_repair.cuh"
#include "cuda/sm90/forward_softmax.cuh"
#include "cuda/sm90/forward_write.cuh"

namespace onepass::cuda::sm90 {

template <class C>
class ForwardConsumer {
 public:
  __device__ __forceinline__ ForwardConsumer(ForwardShared<C>& shared, const ForwardParams& params,
                                             const CUtensorMap& map_out, int warpgroup)
      : shared_(shared), p_(params), map_out_(map_out), warpgroup_(warpgroup), leader_(threadIdx.x % 128 == 0) {}

  __device__ __forceinline__ void run() {
    forget_repairs();
    if (C::kTile.ping_pong && warpgroup_ == C::kWarpgroups - 1) pass_turn();
    find_next();
    take_next();
    while (blocks_.first <= blocks_.last) {
      wait_q();
      skip(shared_.k_full, shared_.k_empty, k_at_, blocks_.right);
      wait(shared_.k_full, k_at_, C::kStages);
      ptx::keep(r_s_);
      ptx::wgmma_fence();
      multiply_scores();
      ptx::wgmma_commit();
      find_next();
      const Seen seen = seen_in(blocks_.last);
      ptx::wgmma_wait<0>();
      ptx::keep(r_s_);
      release(shared_.k_empty, k_at_++, C::kStages);
      if (kOneQ && blocks_.first == blocks_.last) release_q();
      skip(shared_.v_full, shared_.v_empty, v_at_, blocks_.right);
      float factor[2] = {1, 1};
      softmax<kFirst>(blocks_.last, seen, factor);
      pack_probabilities();
      int accumulate, skipped;
      for (;;) {
        accumulate = 0;
        int block = blocks_.last - 1;
        while (block >= blocks_.first) {
          step<kGeneral>(block--, accumulate);
          accumulate = 1;
#pragma unroll 1
          for (; block >= blocks_.inner_first && block <= blocks_.inner_last && !outgrown_; --block)
            step<kInner>(block, 1);
        }
        skipped = blocks_.left;
        skip(shared_.k_full, shared_.k_empty, k_at_, skipped);
        if (!kOneQ) release_q();
        take_next();
        if (kOneQ || drain_ || blocks_.first > blocks_.last) break;
        wait_q();
        skip(shared_.k_full, shared_.k_empty, k_at_, blocks_.right);
        step<kFirst>(blocks_.last, accumulate);
        skip(shared_.v_full, shared_.v_empty, v_at_, skipped + blocks_.right);
      }
      finish(accumulate);
      skip(shared_.v_full, shared_.v_empty, v_at_, skipped);
      if (kOneQ && !drain_ && blocks_.first <= blocks_.last) continue;
      if (leader_) ptx::bulk_wait();
      repair();
    }
  }

 private:
  enum Step { kFirst, kGeneral, kInner };
  using T = typename C::T;
  static constexpr int kBlockQ = C::kBlockQ, kBlockK = C::kBlockK, kScores = kBlockK / 2;
  static constexpr bool kOneQ = C::kQStages == 1;

  // ---- Barriers: slots are taken in turn, `at` counts them.
  __device__ __forceinline__ void wait(std::uint64_t* full, unsigned at, unsigned slots) {
    ptx::mbarrier_wait(ptx::shared_address(full + at % slots), at / slots & 1);
  }
  __device__ __forceinline__ void release(std::uint64_t* empty, unsigned at, unsigned slots) {
    if (leader_) ptx::mbarrier_arrive(ptx::shared_address(empty + at % slots));
  }
  /// Gives `count` slots back unused. Only the warp that does so waits: others
  /// could find the slot filled again. Its lanes wait together, and others take
  /// no round: a loop of one lane would end the compiler's knowledge that the
  /// warp is together, and with it descriptors in uniform registers.
  __device__ __forceinline__ void skip(std::uint64_t* full, std::uint64_t* empty, unsigned& at, int count) {
    if constexpr (C::kTile.skip) {
      if (count == 0) return;
      const int mine = uniform(threadIdx.x % 128 < 32 ? count : 0);
#pragma unroll 1
      for (int i = 0; i < mine; ++i) {
        wait(full, at + i, C::kStages);
        __syncwarp();  // else a lane that is late could find the slot filled again, and wait for its turn for ever
        release(empty, at + i, C::kStages);
      }
      at += count;
    }
  }
  __device__ __forceinline__ void wait_q() {
    wait(shared_.q_full, tile_at_ - 1, C::kQStages);
  }
  __device__ __forceinline__ void release_q() {
    release(shared_.q_empty, tile_at_ - 1, C::kQStages);
  }
  // Barriers 1 to 3, two warpgroups each: the one before arrives after its
  // products, the one whose turn it is waits.
  __device__ __forceinline__ void await_turn() {
    if constexpr (C::kTile.ping_pong) ptx::named_barrier_sync(1 + warpgroup_, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (C::kTile.ping_pong) ptx::named_barrier_arrive(1 + (warpgroup_ + 1) % C::kWarpgroups, 256);
  }
  /// Barriers 8 to 11: the threads of a warpgroup, around their staging of O.
  __device__ __forceinline__ void sync_warpgroup() {
    ptx::named_barrier_sync(8 + warpgroup_, 128);
  }

  // ---- Tiles.
  __device__ __forceinline__ const RowTile& tile() const {
    return shared_.tiles[(tile_at_ - 1) % C::kTileSlots];
  }
  __device__ __forceinline__ static int uniform(int x) {
    return __shfl_sync(~0u, x, 0);
  }
  /// Looks up this warpgroup's blocks of the tile after the one in hand; none
  /// at the end.
  __device__ __forceinline__ void find_next() {
    wait(shared_.tile_full, tile_at_, C::kTileSlots);
    const Blocks& mine = shared_.blocks[tile_at_ % C::kTileSlots][warpgroup_];
    next_ = {uniform(mine.first), uniform(mine.last), uniform(mine.inner_first), uniform(mine.inner_last), 0, 0};
    if constexpr (C::kTile.skip) next_.right = uniform(mine.right), next_.left = uniform(mine.left);
  }
  __device__ __forceinline__ void take_next() {
    blocks_ = next_;
    ++tile_at_;
  }
  // Read again where rarely needed, so that no register holds them, or what
  // follows from them.
  /// The thread in its warpgroup; unsigned, so that / and % take one instruction.
  __device__ __forceinline__ static unsigned this_thread() {
    return ptx::recomputed(static_cast<int>(threadIdx.x % 128));
  }
  __device__ __forceinline__ static int lane() {
    return ptx::recomputed(static_cast<int>(threadIdx.x % 32));
  }
  /// Row r (0 or 1) of this thread, in the tile.
  __device__ __forceinline__ int row_of(int r, unsigned thread) const {
    return 64 * warpgroup_ + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
  }

  // ---- Softmax of the scores in hand, those of `block`.
  /// The warp's first row, counted as the block's columns are.
  __device__ __forceinline__ int first_row(int block) const {
    return row_of(0, this_thread() & ~31u) - block * kBlockK;
  }
  __device__ __forceinline__ Seen seen_in(int block) const {
    const int row = first_row(block), hi = tile().hi + row, length = tile().k_length - block * kBlockK;
    return {uniform(tile().lo + row + 15), uniform(min(hi, length)), uniform(min(hi + 15, length))};
  }

  /// True if O needs `factor`.
  template <Step kStep>
  __device__ __forceinline__ bool softmax(int block, const Seen& seen, float (&factor)[2]) {
    bool scale = false;
    if constexpr (kStep == kInner) {
      exponentiate<false, kScores>(r_s_, rows_, p_.scale_log2);
      return C::kNarrow && fit_narrow(r_s_, rows_, factor);
    }
    if (seen.end < kBlockK || seen.begin > 0) {
      const int row = first_row(block);
      hide_unseen<kBlockK>(r_s_, seen, tile().lo + row, tile().hi + row, tile().k_length - block * kBlockK, lane());
    }
    if constexpr (kStep == kFirst) {
      if (seen.begin <= 0 && seen.end > 0) {
        start_rows_at_first_column(r_s_, rows_, p_.scale_log2);
      } else {
        start_rows(r_s_, rows_, p_.scale_log2);
      }
    } else if (block > blocks_.inner_last) {  // further left every row has seen a key
      scale = follow_maximum(r_s_, rows_, p_.scale_log2, factor);
    }
    if (seen.any_end <= kBlockK / 2) {
      exponentiate<true, kScores / 2>(r_s_, rows_, p_.scale_log2);
    } else {
      exponentiate<true, kScores>(r_s_, rows_, p_.scale_log2);
    }
    return (C::kNarrow && fit_narrow(r_s_, rows_, factor)) || scale;
  }

  // ---- Products.
  /// S (64 x block_k) = Q K^T.
  __device__ __forceinline__ void multiply_scores() {
    const std::uint32_t q =
        ptx::descriptor_low(ptx::shared_address(shared_.q[(tile_at_ - 1) % C::kQStages]) + warpgroup_ * 64 * 128);
    const std::uint32_t k = ptx::descriptor_low(ptx::shared_address(shared_.k[k_at_ % C::kStages]));
#pragma unroll
    for (int step = 0; step < C::kHeadDim / 16; ++step) {  // 4 steps of 32 bytes a panel
      const int in_panel = step % 4 * 2, panel = step / 4;
      ptx::Wgmma<T, kBlockK>::template ss<0, 0>(r_s_, ptx::descriptor(q + panel * (kBlockQ * 8) + in_panel),
                                                ptx::descriptor(k + panel * (kBlockK * 8) + in_panel), step != 0);
    }
  }
  /// O (64 x head_dim_v) += P V; accumulate = 0: O = P V.
  __device__ __forceinline__ void multiply_values(int accumulate) {
    const std::uint32_t v = ptx::descriptor_low(ptx::shared_address(shared_.v[v_at_ % C::kStages]), kBlockK * 128);
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {  // 16 rows of 128 bytes a step
      ptx::Wgmma<T, C::kHeadDimV>::template rs<1>(r_o_, r_p_ + 4 * step, ptx::descriptor(v + step * 128),
                                                  step == 0 ? accumulate : 1);
    }
  }
  __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
    for (int i = 0; i < kBlockK / 4; ++i) r_p_[i] = ptx::pack<T>(r_s_[2 * i], r_s_[2 * i + 1]);
  }

  template <Step kStep>
  __device__ __forceinline__ void step(int block, int accumulate) {
    wait(shared_.k_full, k_at_, C::kStages);
    await_turn();
    ptx::keep(r_s_);
    ptx::keep(r_p_);
    ptx::wgmma_fence();
    multiply_scores();
    ptx::wgmma_commit();

    // In the shadow of that product; O of the tile before leaves first, since the next lines may scale this one's.
    Seen seen;
    if constexpr (kStep != kInner) {
      seen = seen_in(block);
      if (pending_) end_tile(tile_at_ - (kStep == kFirst ? 3 : 2));
      pending_ = kStep == kFirst;
    }
    if constexpr (!C::kNarrow && kStep == kInner) outgrown_ = __any_sync(~0u, outgrown(rows_, kScaleSum));
    if constexpr (!C::kNarrow && kStep == kGeneral) keep_range();
    if constexpr (kStep == kFirst) {
      find_next();
      finished_ = rows_;
      if constexpr (!C::kEndsAtOnce) finish_rows(shared_.tiles[(tile_at_ - 2) % C::kTileSlots]);
    }

    wait(shared_.v_full, v_at_, C::kStages);
    ptx::keep(r_o_);
    ptx::wgmma_fence();
    multiply_values(accumulate);
    ptx::wgmma_commit();
    pass_turn();

    ptx::wgmma_wait<1>();
    ptx::keep(r_s_);
    release(shared_.k_empty, k_at_++, C::kStages);
    if (kOneQ && block == blocks_.first) release_q();
    float factor[2] = {1, 1};
    const bool scale = softmax<kStep>(block, seen, factor);

    ptx::wgmma_wait<0>();
    ptx::keep(r_o_);
    release(shared_.v_empty, v_at_++, C::kStages);
    pack_probabilities();
    if (kStep != kFirst && scale) {
#pragma unroll
      for (int i = 0; i < C::kHeadDimV / 2; ++i) r_o_[i] *= factor[i / 2 % 2];
    }
  }

  /// The last tile's last product, and what is still to be written.
  __device__ __forceinline__ void finish(int accumulate) {
    if (pending_) end_tile(tile_at_ - 3);
    pending_ = false;
    finished_ = rows_;
    await_turn();
    wait(shared_.v_full, v_at_, C::kStages);
    ptx::keep(r_o_);
    ptx::keep(r_p_);
    ptx::wgmma_fence();
    multiply_values(accumulate);
    ptx::wgmma_commit();
    pass_turn();
    const RowTile tile = shared_.tiles[(tile_at_ - 2) % C::kTileSlots];
    finish_rows(tile);
    ptx::wgmma_wait<0>();
    ptx::keep(r_o_);
    release(shared_.v_empty, v_at_++, C::kStages);
    write_out(tile, tile_at_ - 2);
  }

  /// What is left of the finished tile `at`. Its description is copied: fields
  /// read one by one would come one after the other, from memory that products
  /// keep busy.
  __device__ __forceinline__ void end_tile(unsigned at) {
    const RowTile tile = shared_.tiles[at % C::kTileSlots];
    if constexpr (C::kEndsAtOnce) finish_rows(tile);
    write_out(tile, at);
  }

  /// The rows of the finished tile: their LSE, and the factor that O still
  /// needs.
  __device__ __forceinline__ void finish_rows(const RowTile& tile) {
    const unsigned thread = this_thread();
    const int now = to_repair().now;
    bool beyond = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(r, thread);
      const float sum = quad_sum(finished_.sum[r]);
      const bool empty = sum == 0 || row >= tile.real_rows;
      beyond |= !(sum < kRepairSum) && !empty;
      inverse_[r] = empty ? 0.f : __fdividef(1.f, sum);
      if (p_.lse && thread % 4 == 0 && row < tile.rows) {
        *p_.lse.row(tile.batch, tile.head, tile.q_row + row) =
            empty ? -INFINITY : (finished_.reference[r] + ptx::log2_approx(sum)) * 0.69314718f;
      }
    }
    if (__any_sync(~0u, beyond) || now) remember(tile);
  }

  /// O of the finished tile, in slot `at`.
  __device__ __forceinline__ void write_out(const RowTile& tile, unsigned at) {
    const unsigned thread = this_thread();
    if (__any_sync(~0u,
                   inverse_[0] == 0 || inverse_[1] == 0)) {  // a row that saw no key: 0 whatever V held
#pragma unroll
      for (int i = 0; i < C::kHeadDimV / 2; ++i) r_o_[i] = inverse_[i / 2 % 2] == 0 ? 0.f : r_o_[i];
    }
    if (leader_) ptx::bulk_wait_read();  // the last store from the staging buffer
    sync_warpgroup();
    // Read between two barriers, so that all warps read the same.
    drain_ = uniform(shared_.drain[warpgroup_]) != 0;
    constexpr int kAtOnce = C::kTile.out_panels;
    const unsigned in_warpgroup = thread / 32 * 16 + thread % 16;  // the row whose chunks this lane addresses
    const std::uint32_t staged = ptx::shared_address(shared_.out[warpgroup_]);
    const int rows = clamp_to(tile.rows - 64 * warpgroup_, 0, 64);
#pragma unroll
    for (int first = 0; first < C::kPanelsV; first += kAtOnce) {
      if (first > 0) {
        if (leader_) ptx::bulk_wait_read();
        sync_warpgroup();
      }
#pragma unroll
      for (int k = first * 4; k < min((first + kAtOnce) * 4, C::kHeadDimV / 16); ++k) {  // 16 columns
        const float* const o = r_o_ + 8 * k;
        const unsigned chunk = (k % 4 * 2 + thread % 32 / 16) ^ (in_warpgroup & 7);
        ptx::stmatrix_x4(
            staged + (k / 4 - first) * 64 * 128 + in_warpgroup * 128 + chunk * 16,
            ptx::pack<T>(o[0] * inverse_[0], o[1] * inverse_[0]), ptx::pack<T>(o[2] * inverse_[1], o[3] * inverse_[1]),
            ptx::pack<T>(o[4] * inverse_[0], o[5] * inverse_[0]), ptx::pack<T>(o[6] * inverse_[1], o[7] * inverse_[1]));
      }
      ptx::fence_async_shared();
      sync_warpgroup();
      if (leader_ && rows > 0) {
#pragma unroll
        for (int panel = first; panel < first + kAtOnce; ++panel) {
          ptx::tma_store(&map_out_, staged + (panel - first) * 64 * 128,
                         box_at(64, panel, tile.q_row + 64 * warpgroup_, rows, tile.head, tile.batch));
        }
        ptx::bulk_commit();
      }
    }
    release(shared_.tile_empty, at, C::kTileSlots);
  }

  // ---- References that were outgrown. What is rarely used lives in shared
  // memory.
  /// Scales sums beyond 2^24 down, with what O and P hold; marks the rows for
  /// repair where one block brought more than float32 can hold.
  __device__ __forceinline__ void keep_range() {
    outgrown_ = false;
    if (!__any_sync(~0u, outgrown(rows_, kScaleSum))) return;
    if (__any_sync(~0u, outgrown(rows_, kRepairSum))) to_repair().now = 1;
    float factor[2];
    scale_down<0>(rows_, factor);
#pragma unroll
    for (int i = 0; i < C::kHeadDimV / 2; ++i) r_o_[i] *= factor[i / 2 % 2];
#pragma unroll
    for (int i = 0; i < kBlockK / 4; ++i)
      r_p_[i] = ptx::multiply_pair(r_p_[i], ptx::pack<T>(factor[i % 2], factor[i % 2]));
  }
  __device__ __forceinline__ RepairList& to_repair() {
    return shared_.repairs[threadIdx.x / 32 - 4];
  }
  __device__ __forceinline__ void forget_repairs() {
    if (lane() == 0) to_repair().now = to_repair().count = 0;
    if (leader_) shared_.drain[warpgroup_] = 0;
    sync_warpgroup();
  }
  /// Puts the tile on the warp's list. Two more tiles end before the pipeline
  /// is drained for a list that fills up.
  __device__ __forceinline__ void remember(const RowTile& tile) {
    __syncwarp();
    if (lane() == 0) {
      RepairList& list = to_repair();
      list.tiles[list.count++] = tile;
      list.now = 0;
      if (list.count > RepairList::kTiles - 3) shared_.drain[warpgroup_] = 1;
    }
    __syncwarp();
  }
  /// Computes the rows on the list again; no product is under way.
  __device__ __forceinline__ void repair() {
    sync_warpgroup();  // the leader has seen the stores of O reach memory
    for (int i = 0; i < to_repair().count; ++i) {
      repair_rows<C>(p_, to_repair().tiles[i], 64 * warpgroup_ + threadIdx.x % 128 / 32 * 16);
    }
    __syncwarp();
    forget_repairs();
    drain_ = false;
  }

  ForwardShared<C>& shared_;
  const ForwardParams& p_;
  const CUtensorMap& map_out_;
  const int warpgroup_;
  const bool leader_;

  float r_s_[kScores];              // (64, block_k) scores, then probabilities
  std::uint32_t r_p_[kBlockK / 4];  // (64, block_k) probabilities of the block
                                    // before, packed
  float r_o_[C::kHeadDimV / 2];     // (64, head_dim_v)
  RowState rows_;
  RowState finished_;      // of the finished tile
  float inverse_[2];       // of its sums; 0: the row saw no key
  bool pending_ = false;   // its O is still in registers
  bool outgrown_ = false;  // sums are large: the next step is a general one, which scales them down
  bool drain_ = false;     // a list of rows to repair is full

  unsigned tile_at_ = 0, k_at_ = 0,
           v_at_ = 0;  // tiles and slots taken so far; a tile has one slot of Q
  Blocks blocks_, next_;
};

}  // namespace onepass::cuda::sm90
