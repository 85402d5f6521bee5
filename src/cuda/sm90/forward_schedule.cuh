// Which tiles a block takes, and in what order. Executed by one whole warp;
// every lane holds the same values.
#pragma once

#include "cuda/ptx/registers.cuh"
#include "cuda/sm90/forward_config.cuh"

namespace onepass::cuda::sm90 {

inline constexpr int kFarRow = 1 << 30;

template <class C>
class ForwardSchedule {
 public:
  __device__ explicit ForwardSchedule(const ForwardParams& params) : p_(params) {
    if (p_.mask.varlen) load_counts();
  }

  /// The block's next tile, written to shared memory with each warpgroup's
  /// blocks; its number of blocks, 0 where its rows see no key, and -1 at the
  /// end.
  __device__ int next(RowTile& s_tile, Blocks (&s_blocks)[C::kWarpgroups]) {
    int t;
    if (p_.next_tile != nullptr && round_ > 0) {
      unsigned taken = 0;
      if (lane() == 0) taken = atomicAdd(p_.next_tile, 1u);
      t = static_cast<int>(__shfl_sync(~0u, taken, 0) + gridDim.x);
    } else {
      t = round_ * gridDim.x + blockIdx.x;
    }
    ++round_;
    Place place;
    if (p_.mask.varlen ? packed(t, place) : padded(t, place)) return describe(place, s_tile, s_blocks);
    if (lane() < C::kWarpgroups) s_blocks[lane()] = {0, -1, 0, 0, 0, 0};
    if (lane() == 0) s_tile.first = 0, s_tile.last = -1;
    return -1;
  }

 private:
  __device__ static int lane() { return ptx::recomputed(static_cast<int>(threadIdx.x % 32)); }
  /// Blocks that hold the first `keys` keys.
  __device__ static int blocks_to(int keys) { return (keys + C::kBlockK - 1) / C::kBlockK; }

  struct Place {
    int b, head, block;
  };

  __device__ Sequence sequence(int b) const {
    MaskSpec mask = p_.mask;  // what depends on it alone would be kept over the
                              // loop over tiles, in registers
    mask.window_left = ptx::recomputed(mask.window_left);
    mask.window_right = ptx::recomputed(mask.window_right);
    return sequence_at(mask, b, ptx::recomputed(p_.seq_q), ptx::recomputed(p_.seq_k), ptx::recomputed(p_.total_q),
                       ptx::recomputed(p_.total_k));
  }

  __device__ bool padded(int t, Place& place) const {
    if (t >= p_.tiles) return false;
    // Sections of heads whose keys stay in the L2 cache. The last one goes from
    // the tiles with most keys to those with fewest, so that the blocks end
    // together, the one before it the other way, and so on: each block gets its
    // share of both ends without a counter.
    const int of_section = p_.section * p_.blocks_q;
    const int section = t / of_section, in_section = t - section * of_section;
    const int first_head = section * p_.section;
    const int heads = min(p_.section, p_.batch * p_.heads_q - first_head);
    const int rank = in_section / heads;
    const int head = first_head + in_section - rank * heads;  // of all batch items
    place.b = head / p_.heads_q;
    place.head = head - place.b * p_.heads_q;
    place.block = (p_.sections - 1 - section) % 2 == 0 ? p_.blocks_q - 1 - rank : rank;
    return true;
  }

  /// Each lane counts the tiles of one of 32 sequences; all their tiles come
  /// before the next 32 sequences'.
  __device__ bool packed(int t, Place& place) {
    while (t - before_ >= __shfl_sync(~0u, up_to_, 31)) {
      before_ += __shfl_sync(~0u, up_to_, 31);
      batch_ += 32;
      if (batch_ >= p_.batch) return false;
      load_counts();
    }
    const int mine = __popc(__ballot_sync(~0u, up_to_ <= t - before_));  // the lane whose sequence has the tile
    const int count = __shfl_sync(~0u, count_, mine);
    const int in_sequence = t - before_ - (__shfl_sync(~0u, up_to_, mine) - count);
    const int rank = in_sequence / p_.heads_q;
    place.b = batch_ + mine;
    place.head = in_sequence - rank * p_.heads_q;
    place.block = count / p_.heads_q - 1 - rank;
    return true;
  }

  __device__ void load_counts() {
    const int b = batch_ + lane();
    count_ = 0;
    if (b < p_.batch) {
      const Sequence s = sequence(b);
      count_ = (static_cast<int>(s.q_length) + C::kBlockQ - 1) / C::kBlockQ * p_.heads_q;
    }
    up_to_ = count_;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, up_to_, step);
      if (lane() >= step) up_to_ += other;
    }
  }

  __device__ int describe(const Place& place, RowTile& s_tile, Blocks (&s_blocks)[C::kWarpgroups]) const {
    const Sequence wide = sequence(place.b);
    // In 32 bits: a producer has few registers. A shift of 2^30 hides or shows
    // everything, as a larger one does.
    const int length = static_cast<int>(wide.q_length), row = place.block * C::kBlockQ;
    int keys = static_cast<int>(wide.k_length);
    int lo = static_cast<int>(clamp_to<std::int64_t>(wide.lo_shift, -kFarRow, kFarRow));
    int hi = static_cast<int>(clamp_to<std::int64_t>(wide.hi_shift, -kFarRow, kFarRow));
    const int real_rows = max(0, min(C::kBlockQ, length - row));
    if (lane() == 0) {
      s_tile.q_row = static_cast<int>(wide.q_row) + row;
      // Rows past a padded sequence are written too, as empty ones; those past
      // a packed one belong to the next.
      s_tile.rows = min(C::kBlockQ, (p_.mask.varlen ? length : p_.seq_q) - row);
      s_tile.real_rows = real_rows;
      s_tile.head = place.head;
      s_tile.kv_head = place.head / p_.group;
      s_tile.batch = p_.mask.varlen ? 0 : place.b;
    }
    if (real_rows == 0) return 0;
    // Count keys from the first that some row of the sequence sees, up to the
    // last one: others are never read.
    const int skipped = clamp_to(lo, 0, keys);
    keys = max(0, clamp_to(length - 1 + hi, 0, keys) - skipped);
    lo += row - skipped;  // of the tile's first row
    hi += row - skipped;
    const int begin = clamp_to(lo, 0, keys), end = clamp_to(real_rows - 1 + hi, 0, keys);
    if (begin >= end) return 0;
    const int first = begin / C::kBlockK, last = (end - 1) / C::kBlockK;
    if (lane() == 0) {
      s_tile.k_row = static_cast<int>(wide.k_row) + skipped;
      s_tile.k_length = keys;
      s_tile.lo = lo;
      s_tile.hi = hi;
      s_tile.first = first;
      s_tile.last = last;
    }
    if (lane() < C::kWarpgroups) {
      constexpr int kRows = C::kTile.skip ? 64 : C::kBlockQ;  // that take the same blocks
      if (C::kTile.skip) lo += 64 * lane(), hi += 64 * lane();
      Blocks mine{first, last, 0, 0, 0, 0};
      if constexpr (C::kTile.skip) {
        mine.last = clamp_to(blocks_to(clamp_to(kRows - 1 + hi, 0, keys)) - 1, first, last);
        mine.first = clamp_to(clamp_to(lo, 0, keys) / C::kBlockK, first, mine.last);
        mine.right = last - mine.last;
        mine.left = mine.first - first;
      }
      // Blocks that all rows see, and before which all have seen a key.
      mine.inner_first = blocks_to(clamp_to(kRows - 1 + lo, 0, keys));
      mine.inner_last = blocks_to(clamp_to(hi, 0, keys)) - 2;
      s_blocks[lane()] = mine;
    }
    return last - first + 1;
  }

  const ForwardParams& p_;
  int round_ = 0;
  int batch_ = 0,
      before_ = 0;  // first of the 32 sequences in hand, tiles before it
  int count_ = 0,
      up_to_ = 0;  // tiles of the lane's sequence; of this and the lanes before
};

}  // namespace onepass::cuda::sm90
