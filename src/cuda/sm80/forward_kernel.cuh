// The forward pass on mma.sync.
#pragma once

#include "cuda/device/mask.cuh"
#include "cuda/device/outside.cuh"
#include "cuda/sm80/forward_block.cuh"

namespace onepass::cuda::sm80 {

template <class T, int kHeadDim, class Plan>
__global__ void __launch_bounds__(Plan::kTiles.threads(), Plan::kTiles.blocks_per_sm)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  using Block = ForwardBlock<T, kHeadDim, Plan>;
  constexpr ForwardTiles kTiles = Plan::kTiles;
  constexpr ForwardSteps kUse = Plan::kUse;
  using Layout = typename Block::Layout;
  constexpr int kBlockQ = kTiles.block_q(), kBlockK = kTiles.block_k, kStages = kTiles.stages;
  constexpr int kWarpRows = kTiles.warp_rows(), kRowTiles = kTiles.row_tiles, kRows = Block::kRows;
  char* const shared = reinterpret_cast<char*>(ptx::dynamic_shared());

  // Which tile: heads in groups whose K and V fit the L2 cache, the last (for causal masks longest) tiles first.
  const Problem& problem = args.problem;
  const unsigned heads = static_cast<unsigned>(problem.batch * problem.heads_q);
  const unsigned group_blocks = args.heads_together * args.q_tiles;
  const unsigned group = blockIdx.x / group_blocks, within = blockIdx.x - group * group_blocks;
  const unsigned group_heads = min(args.heads_together, heads - group * args.heads_together);
  const unsigned tile_from_end = within / group_heads;
  const unsigned item_head = group * args.heads_together + (within - tile_from_end * group_heads);
  const std::int64_t b = item_head / static_cast<unsigned>(problem.heads_q);
  const std::int64_t head = item_head - b * problem.heads_q;
  const std::int64_t tile_row =
      std::int64_t{kUse.last_tiles_first ? args.q_tiles - 1 - tile_from_end : tile_from_end} * kBlockQ;
  const std::int64_t kv_head = problem.kv_head(head);
  const std::int64_t item = problem.mask.varlen ? 0 : b;

  const Sequence seq = problem.sequence(b);
  clear_outside_rows(problem, args.x, seq, b, head, tile_row, static_cast<std::int64_t>(args.q_tiles) * kBlockQ,
                     kBlockQ);
  const int tile_rows = static_cast<int>(clamp_to<std::int64_t>(seq.q_length - tile_row, 0, kBlockQ));
  if (tile_rows == 0) return;

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int warp_row = warp * kWarpRows;
  // Blocks are counted from the last: block t holds the keys from j_last - t kBlockK on.
  const Interval any = seq.visible_to_any(tile_row, tile_row + tile_rows);
  const std::int64_t first_block = any.begin / kBlockK;
  const int blocks = any.size() == 0 ? 0 : static_cast<int>(ceil_div(any.end, kBlockK) - first_block);
  const std::int64_t last_block = first_block + blocks - 1;

  const int warp_rows = clamp_to(tile_rows - warp_row, 0, kWarpRows);
  int warp_begin = blocks, warp_end = blocks;  // blocks that this warp's rows see
  std::int64_t full_begin = 0, full_end = 0;
  if (warp_rows > 0) {
    const std::int64_t i0 = tile_row + warp_row;
    const Interval some = seq.visible_to_any(i0, i0 + warp_rows), all = seq.visible_to_all(i0, i0 + warp_rows);
    if (some.size() > 0) {
      warp_begin = static_cast<int>(last_block - (some.end - 1) / kBlockK);
      warp_end = static_cast<int>(last_block - some.begin / kBlockK) + 1;
    }
    full_begin = all.begin, full_end = all.end;
  }

  Block block{args};
  block.s_q = ptx::shared_address(shared);
  block.s_k = block.s_q + kBlockQ * Layout::kRowBytes;
  block.s_v = block.s_k + kStages * Block::kTileBytes;
  block.lane = lane;
  block.c = args.scale_log2;
  block.q_lane = Layout::offset(warp_row + lane % 16, lane / 16);
  block.k_lane = Layout::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  block.v_lane = Layout::offset(lane % 16, lane / 16);

  typename Block::KeyLoader k{args.x.k.row(item, seq.k_row + last_block * kBlockK, kv_head), args.x.k.stride_seq * 2,
                              static_cast<int>(problem.head_dim)};
  typename Block::KeyLoader v{args.x.v.row(item, seq.k_row + last_block * kBlockK, kv_head), args.x.v.stride_seq * 2,
                              static_cast<int>(problem.head_dim_v)};
  const bool aligned = args.k_alignment == 16 && args.v_alignment == 16;
  const auto back = [](typename Block::KeyLoader& loader) { loader.g_rows -= kBlockK * loader.row_bytes; };

  // Only keys that some row of the tile sees are read: what lies in the others must not matter, NaN included.
  const auto first_key = [&](int t) {
    return static_cast<int>(max_of<std::int64_t>(any.begin - (last_block - t) * kBlockK, 0));
  };
  const auto end_key = [&](int t) {
    return static_cast<int>(min_of<std::int64_t>(any.end - (last_block - t) * kBlockK, kBlockK));
  };

  if (blocks > 0) {
    const typename Block::QueryLoader q{args.x.q.row(item, seq.q_row + tile_row, head), args.x.q.stride_seq * 2,
                                        static_cast<int>(problem.head_dim)};
    q.load_any(block.s_q, 0, tile_rows, args.q_alignment);
    k.load_any(block.s_k, first_key(0), end_key(0), args.k_alignment);
    v.load_any(block.s_v, first_key(0), end_key(0), args.v_alignment);
    back(k), back(v);
  }
  const char* g_k = k.thread_rows();
  const char* g_v = v.thread_rows();
  const std::uint32_t s_thread = block.s_k + Block::KeyLoader::thread_offset();
  ptx::cp_async_commit();
#pragma unroll
  for (int r = 0; r < kRows; ++r) block.r_max[r] = -kInfinity, block.r_shift[r] = 0, block.r_sum[r] = 0;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < Block::kOutTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) block.r_o[m][n][i] = 0;

  const auto mask_scores = [&](int t) {
    const std::int64_t j0 = (last_block - t) * kBlockK;
    if (j0 >= full_begin && j0 + kBlockK <= full_end) return;
    const EdgeMask edge(seq, tile_row + warp_row, j0);
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

#pragma unroll 1
  for (int t = 0; t < blocks; ++t) {
    // Every thread's copies of block t have arrived, and every warp has left block t - 1, whose stage is filled next.
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (t == 0) {
      if (args.q_factor != 1) block.scale_queries(shared + warp_row * Layout::kRowBytes);
      if (kTiles.q_in_registers) block.fetch_queries();
    }
    if (!aligned && t > 0) {
      const std::uint32_t s_stage = t % kStages * Block::kTileBytes;
      k.load_unaligned(block.s_k + s_stage, first_key(t), kBlockK, args.k_alignment);
      v.load_unaligned(block.s_v + s_stage, first_key(t), kBlockK, args.v_alignment);
      back(k), back(v);
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();
    }
    const auto load_block = [&](int i) {
      if (!aligned || i >= blocks) return;
      const std::uint32_t s_next = s_thread + i % kStages * Block::kTileBytes;
      k.load_full(s_next, g_k, 0);
      v.load_full(s_next + kStages * Block::kTileBytes, g_v, first_key(i));
      ptx::cp_async_commit();
      g_k -= kBlockK * k.row_bytes;
      g_v -= kBlockK * v.row_bytes;
    };
    if constexpr (!Plan::kUse.load_ahead) {
      if (t > 0) load_block(t);
      ptx::cp_async_wait<0>();
      __syncthreads();
    }
    const bool seen = t >= warp_begin && t < warp_end;
    if (kUse.load_ahead && !(kUse.load_behind_scores && seen)) load_block(t + 1);
    if (!seen) continue;
    const std::uint32_t s_k = block.s_k + t % kStages * Block::kTileBytes;
    const std::uint32_t s_v = block.s_v + t % kStages * Block::kTileBytes;
    block.scores(s_k);
    if (kUse.load_ahead && kUse.load_behind_scores) load_block(t + 1);
    mask_scores(t);
    if (kUse.maximum == Maximum::exact || t == warp_begin) {
      block.exact_softmax();
    } else if constexpr (kUse.maximum == Maximum::lazy) {
      if (block.beyond_limit()) {
        float alpha[kRows];
        block.new_reference(alpha);
        block.rescale(alpha);
        block.set_limits();
#pragma unroll
        for (int r = 0; r < kRows; ++r) block.r_sum[r] *= alpha[r];
      }
#pragma unroll
      for (int step = 0; step < kBlockK / 16; ++step) {
        block.exponentials(step, block.r_sum);
        block.convert(step);
      }
    } else {
      float sums[kRows] = {};
#pragma unroll
      for (int step = 0; step < kBlockK / 16; ++step) {
        block.exponentials(step, sums);
        block.convert(step);
      }
      if (block.add_sums(sums)) {
        block.scores(s_k);
        mask_scores(t);
        block.exact_softmax();
      }
    }
    block.values(s_v);
  }

  block.finish(shared + warp_row * Layout::kRowBytes, warp_rows, item, head, seq.q_row + tile_row + warp_row);
}

}  // namespace onepass::cuda::sm80
