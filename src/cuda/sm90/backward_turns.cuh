// Deterministic calls: the key tiles that see a query tile add to its dQ one after another, those of later keys first.
//
// A counter for each query tile of a head says how many have added. Whoever waits for the answer of the L2 cache loses
// a microsecond, so the warpgroup of dQ never asks: a thread of the loading warpgroup goes ahead of it, waits for the
// turns and passes them on, and reports sums that are in memory. Blocks take tiles in the order of the additions, so
// the one that was taken first of all those not done waits for none, and every other for some that were taken before
// it. Rows upwards from the first one that sees the keys then give tiles that begin together different query tiles
// under a causal mask, the later keys ahead; without one a tile begins as the one before it leaves the first rows.
#pragma once

#include "cuda/ptx/reduce.cuh"
#include "cuda/sm90/backward_loader.cuh"
#include "cuda/sm90/backward_plan.cuh"

namespace onepass::cuda::sm90 {

/// One thread.
template <class C>
class TurnKeeper {
 public:
  __device__ __forceinline__ TurnKeeper(BackwardShared<C>& shared, const BackwardParams& params)
      : s_(shared), p_(params) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (unsigned done = 0;; ++done) {
      while (!ptx::mbarrier_test(ptx::shared_address(&s_.tile_full[done % 2]), done / 2 & 1)) report();
      const KeyTile& tile = s_.tiles[done % 2];
      if (tile.steps == 0) break;
#pragma unroll 1
      for (int head = tile.kv_head * p_.group; head < (tile.kv_head + 1) * p_.group; ++head) {
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) {
          const int row = tile.first_row + step * C::kBlockQ;
          give(head * p_.tiles + tile.q_tile + row / C::kBlockQ, turn_of<C>(tile, row));
        }
      }
      ptx::mbarrier_arrive(ptx::shared_address(&s_.tile_empty[done % 2]));
    }
    while (reported_ != given_) report();
  }

 private:
  /// Waits until `before` key tiles have added to a query tile, then lets dQ do so.
  __device__ __forceinline__ void give(std::int64_t index, int before) {
    do {
      report();
    } while (given_ - reported_ == kTurnSlots || ptx::load_acquire(p_.turns + index) != static_cast<unsigned>(before));
    s_.turns[given_ % kTurnSlots] = static_cast<unsigned>(index);
    ptx::mbarrier_arrive(ptx::shared_address(&s_.turn_full[given_ % kTurnSlots]));
    ++given_;
  }

  /// Counts the oldest addition that is not counted, if it is in memory.
  __device__ __forceinline__ void report() {
    const unsigned slot = reported_ % kTurnSlots;
    if (reported_ == given_ ||
        !ptx::mbarrier_test(ptx::shared_address(&s_.sums_full[slot]), reported_ / kTurnSlots & 1)) {
      return;
    }
    ptx::reduce_add_release(p_.turns + s_.turns[slot], 1);
    ++reported_;
  }

  BackwardShared<C>& s_;
  const BackwardParams& p_;
  unsigned given_ = 0, reported_ = 0;  // steps
};

}  // namespace onepass::cuda::sm90
