// The forward pass on mma.sync.
#pragma once

#include "cuda/device/mask.cuh"
#include "cuda/device/outside.cuh"
#include "cuda/ptx/phase_barrier.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/sm80/forward_block.cuh"

namespace onepass::cuda::sm80 {

// What the compiler cannot look through it does not compute anew at each use, from the thread's number or the block's.
/// `x`.
__device__ __forceinline__ std::uint32_t kept(std::uint32_t x) {
  return __shfl_sync(~0u, x, threadIdx.x % 32);
}
/// `x`, the same in all lanes, for a uniform register.
__device__ __forceinline__ std::uint32_t uniform(std::uint32_t x) {
  return __shfl_sync(~0u, x, 0);
}

/// One tile. False, with nothing written, where its weights have grown too large for their references.
template <class T, int kHeadDim, class Plan>
__device__ __forceinline__ bool forward_tile(const ForwardArgs& args) {
  using Block = ForwardBlock<T, kHeadDim, Plan>;
  constexpr ForwardTiles kTiles = Plan::kTiles;
  constexpr ForwardSteps kUse = Plan::kUse;
  constexpr bool kRetries = Block::kRetries;
  using Layout = typename Block::Layout;
  constexpr int kBlockQ = kTiles.block_q(), kBlockK = kTiles.block_k, kStages = kTiles.stages;
  constexpr int kWarpRows = kTiles.warp_rows(), kRowTiles = kTiles.row_tiles, kRows = Block::kRows;
  char* const shared = reinterpret_cast<char*>(ptx::dynamic_shared());

  // Which tile: heads in groups whose K and V fit the L2 cache, the last (for causal masks longest) tiles first.
  const Problem& problem = args.problem;
  const unsigned group = args.blocks_together.quotient(blockIdx.x);
  const unsigned within = blockIdx.x - group * args.blocks_together.divisor;
  const unsigned group_head = group * args.heads_together.divisor;
  const bool full = group_head + args.heads_together.divisor <= args.heads;
  const Divisor& group_heads = full ? args.heads_together : args.rest_together;
  const unsigned tile_from_end = group_heads.quotient(within);
  const unsigned item_head = group_head + (within - tile_from_end * group_heads.divisor);
  const std::int64_t b = args.heads_q.quotient(item_head);
  const std::int64_t head = item_head - static_cast<unsigned>(b) * args.heads_q.divisor;
  const std::int64_t tile_row =
      std::int64_t{kUse.last_tiles_first ? args.q_tiles - 1 - tile_from_end : tile_from_end} * kBlockQ;
  const std::int64_t kv_head = args.group.quotient(static_cast<unsigned>(head));
  const std::int64_t item = problem.mask.varlen ? 0 : b;

  const Sequence seq = args.same ? args.sequence : problem.sequence(b);
  clear_outside_rows(problem, args.x, seq, b, head, tile_row, static_cast<std::int64_t>(args.q_tiles) * kBlockQ,
                     kBlockQ);
  const int tile_rows = static_cast<int>(clamp_to<std::int64_t>(seq.q_length - tile_row, 0, kBlockQ));
  if (tile_rows == 0) return true;

  const std::uint32_t s_q = uniform(ptx::shared_address(shared)), s_k = s_q + kBlockQ * Layout::kRowBytes,
                      s_v = s_k + kStages * Block::kTileBytes;
  const typename Block::QueryLoader q{args.x.q.row(item, seq.q_row + tile_row, head), args.x.q.stride_seq * 2,
                                      static_cast<int>(problem.head_dim)};
  q.load_any(s_q, 0, tile_rows, args.q_alignment);

  // Blocks are counted from the last: block t holds the keys from (last_block - t) kBlockK on.
  const Interval any = seq.visible_to_any(tile_row, tile_row + tile_rows);
  const std::int64_t first_block = any.begin / kBlockK;
  const int blocks = any.size() == 0 ? 0 : static_cast<int>(ceil_div(any.end, kBlockK) - first_block);
  const std::int64_t last_block = first_block + blocks - 1;
  typename Block::KeyLoader k{args.x.k.row(item, seq.k_row + last_block * kBlockK, kv_head), args.x.k.stride_seq * 2,
                              static_cast<int>(problem.head_dim)};
  typename Block::KeyLoader v{args.x.v.row(item, seq.k_row + last_block * kBlockK, kv_head), args.x.v.stride_seq * 2,
                              static_cast<int>(problem.head_dim_v)};
  const bool aligned = args.k_alignment == 16 && args.v_alignment == 16;
  const auto back = [](typename Block::KeyLoader& loader) { loader.g_rows -= kBlockK * loader.row_bytes; };
  // Only keys that some row of the tile sees may matter, whatever lies in the others, NaN included. K's scores are
  // hidden anyway; V's rows must be zeros, in the last block those before `first_key`.
  const int first_key = static_cast<int>(max_of<std::int64_t>(any.begin - first_block * kBlockK, 0));
  if (blocks > 0) {
    const int begin = blocks == 1 ? first_key : 0, end = static_cast<int>(any.end - last_block * kBlockK);
    k.load_any(s_k, begin, end, args.k_alignment);
    v.load_any(s_v, begin, end, args.v_alignment);
    back(k), back(v);
  }
  ptx::cp_async_commit();

  const int warp = static_cast<int>(uniform(threadIdx.x / 32)), lane = threadIdx.x % 32;
  const int warp_row = warp * kWarpRows;
  const int warp_rows = clamp_to(tile_rows - warp_row, 0, kWarpRows);
  int warp_begin = blocks, warp_end = blocks;  // blocks that some of this warp's rows see
  int whole_begin = 0, whole_end = 0;          // blocks that they all see, every key of them
  if (warp_rows > 0) {
    const std::int64_t i0 = tile_row + warp_row;
    const Interval some = seq.visible_to_any(i0, i0 + warp_rows), all = seq.visible_to_all(i0, i0 + warp_rows);
    if (some.size() > 0) {
      warp_begin = static_cast<int>(last_block - (some.end - 1) / kBlockK);
      warp_end = static_cast<int>(last_block - some.begin / kBlockK) + 1;
    }
    if (all.size() > 0) {
      whole_begin = static_cast<int>(last_block + 1 - all.end / kBlockK);
      whole_end = static_cast<int>(last_block + 1 - ceil_div(all.begin, kBlockK));
    }
  }

  Block block{args};
  block.lane = lane;
  block.c = args.scale_log2;
  block.s_q = s_q + warp_row * Layout::kRowBytes, block.s_k = s_k, block.s_v = s_v;
  block.rows_lane = kept(Layout::offset(lane % 16, lane / 16));
  block.columns_lane = kept(Layout::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2));
  const char* g_k = k.thread_rows();
  const char* g_v = v.thread_rows();
  // Of this thread's first chunk: its address in the first stage; above it, which columns of K and V exist.
  constexpr int kAddressBits = 24, kColumnBits = 4;
  static_assert(Block::KeyLoader::kTimes <= kColumnBits);
  const std::uint32_t thread_chunk =
      kept(s_k + Block::KeyLoader::thread_offset() + (k.wanted_columns() << kAddressBits) +
           (v.wanted_columns() << (kAddressBits + kColumnBits)));
#pragma unroll
  for (int r = 0; r < kRows; ++r) block.r_shift[r] = 0, block.r_sum[r] = 0;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < Block::kOutTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) block.r_o[m][n][i] = 0;

  const auto mask_scores = [&](int t) {
    const EdgeMask edge(seq, tile_row + warp_row, (last_block - t) * kBlockK);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = min(r / 2 * 16 + r % 2 * 8 + lane / 4, warp_rows - 1);
#pragma unroll
      for (int n = 0; n < Block::kColumnTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (!edge.sees(row, n * 8 + lane % 4 * 2 + i)) block.r_s[r / 2][n][r % 2 * 2 + i] = -kInfinity;
    }
  };
  const auto load_block = [&](int t, std::uint32_t stage) {
    if (!aligned || t >= blocks) return;
    const std::uint32_t s_chunk = thread_chunk % (1u << kAddressBits) + stage;
    k.load_full(s_chunk, g_k, thread_chunk >> kAddressBits);
    v.load_full(s_chunk + kStages * Block::kTileBytes, g_v, thread_chunk >> (kAddressBits + kColumnBits));
    ptx::cp_async_commit();
    g_k -= kBlockK * k.row_bytes;
    g_v -= kBlockK * v.row_bytes;
  };

  std::uint32_t stage = 0, fill = 0;  // bytes: of block t; of the newest block whose copies have begun
  const auto following = [](std::uint32_t x) {
    return x == (kStages - 1) * Block::kTileBytes ? 0 : x + static_cast<std::uint32_t>(Block::kTileBytes);
  };
  constexpr int kAhead = kTiles.phases() ? 2 : 1;
  const std::uint32_t s_phase = s_v + kStages * Block::kTileBytes;
  if (blocks == 0) {  // all threads: Q's copies have arrived, in the place that O passes through
    ptx::cp_async_wait<0>();
    __syncthreads();
  } else if constexpr (kTiles.phases()) {
    if (threadIdx.x == 0) ptx::phase_barrier_init(s_phase, kTiles.warps);
    fill = following(fill);
    load_block(1, fill);
    if (aligned && blocks > 1) {
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<0>();
    }
    __syncthreads();  // all threads: Q and block 0 have arrived, the barrier is ready
  }
#pragma unroll 1
  for (int t = 0; t < blocks; ++t) {
    if constexpr (kTiles.phases()) {
      // Phase t: each warp arrives when its copies of block t + 1 have, and it has left block t - 1. It is waited for
      // one block later, before block t + 1 is read and block t + 3 copied to the stage of block t - 1.
      if (t > 0) ptx::phase_barrier_wait(s_phase, (t - 1) % 2);
      ptx::cp_async_wait<0>();
      __syncwarp();
      if (lane == 0) ptx::phase_barrier_arrive(s_phase);
    } else {
      // Every thread's copies of block t have arrived, and every warp has left block t - 1, whose stage is filled next.
      ptx::cp_async_wait<0>();
      __syncthreads();
    }
    if (t == 0) {
      if (args.q_factor != 1) block.scale_queries(shared + warp_row * Layout::kRowBytes);
      if (kTiles.q_in_registers) block.fetch_queries();
    }
    const std::uint32_t now = stage;
    stage = following(stage), fill = following(fill);
    if (__builtin_expect(!aligned && t > 0, 0)) {
      const int begin = t == blocks - 1 ? first_key : 0;
      k.load_unaligned(s_k + now, begin, kBlockK, args.k_alignment);
      v.load_unaligned(s_v + now, begin, kBlockK, args.v_alignment);
      back(k), back(v);
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();
    }
    if constexpr (!kUse.load_ahead) {
      if (t > 0) load_block(t, now);
      ptx::cp_async_wait<0>();
      __syncthreads();
    }
    if (__builtin_expect(t > 0 && t == blocks - 1 && first_key > 0, 0)) {
      v.clear_rows(s_v + now, first_key);
      __syncthreads();  // all threads: those rows are zeros
    }
    const bool seen = t >= warp_begin && t < warp_end;
    if (kUse.load_ahead && !(kUse.load_behind_scores && seen)) load_block(t + kAhead, fill);
    if (!seen) continue;
    const bool whole = t >= whole_begin && t < whole_end;
    bool maxima = kUse.maximum == Maximum::exact || !whole || block.some_without;
    block.scores(now);
    if (kUse.load_ahead && kUse.load_behind_scores) load_block(t + kAhead, fill);
    if (kUse.maximum == Maximum::lazy && !maxima) maxima = block.references_too_low();
    if (__builtin_expect(maxima, 0)) {
      if (!whole) mask_scores(t);
      block.new_references(t != warp_begin);
    }
    if constexpr (kRetries) {
      block.weights(block.r_sum);
    } else {
      float sums[kRows] = {};
      block.weights(sums);
      if (kUse.maximum == Maximum::checked && __builtin_expect(!maxima && block.beyond_limit(sums), 0)) {
        block.scores(now);  // once more, against the block's own maxima
        block.new_references(true);
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums[r] = 0;
        block.weights(sums);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) block.r_sum[r] += sums[r];
    }
    block.values(now);
  }
  if (kRetries && __syncthreads_or(block.overflown())) return false;  // all threads: whether some warp must try again

  block.finish(warp_rows, tile_rows >= warp_row + kWarpRows, item, head, seq.q_row + tile_row + warp_row);
  return true;
}

/// How a tile is tried again: with the maximum of every block, and with few registers rather than fast.
template <class Block>
struct SecondTry {
  static constexpr ForwardSteps kUse = {.load_ahead = false, .fragments_ahead = false, .maximum = Maximum::exact};
  static constexpr ForwardTiles kTiles = [] {
    ForwardTiles tiles = Block::kTiles;
    tiles.block_k = max_of(16, Block::KeyLoader::kDown), tiles.stages = 2, tiles.q_in_registers = false,
    tiles.k_ahead = false;
    return tiles;
  }();
};

template <class T, int kHeadDim, class Plan>
__global__ void __launch_bounds__(Plan::kTiles.threads(), Plan::kTiles.blocks_per_sm)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  const bool done = forward_tile<T, kHeadDim, Plan>(args);
  // Nothing of the first try is kept in registers for the second.
  if constexpr (Plan::kTiles.retries)
    if (!done) {
      const std::int64_t again = ptx::recomputed(reinterpret_cast<std::int64_t>(&args));
      forward_tile<T, kHeadDim, SecondTry<ForwardBlock<T, kHeadDim, Plan>>>(
          *reinterpret_cast<const ForwardArgs*>(again));
    }
}

}  // namespace onepass::cuda::sm80
