// Host side of the Hopper backward: workspace, tensor maps, launches.
#pragma once

#include <algorithm>
#include <limits>

#include "core/tiles.h"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/sm90/backward.cuh"

namespace onepass::cuda::sm90 {

template <class T, int kHeadDim, int kHeadDimV>
struct Backward {
  using C = BackwardConfig<T, kHeadDim, kHeadDimV>;
  static constexpr std::int64_t kSharedBytes = sizeof(BlockShared<C>);
  static_assert(kSharedBytes <= kSharedBytes90);

  static Tiles tiles() { return {C::kBlockQ, C::kBlockK, C::kStages, C::kThreads, kSharedBytes}; }

  /// Bytes: heads_q tiles (4 block_q bucket + 8 block_q + 128) + 48 heads_kv key_tiles + 64, and for a deterministic
  /// call 4 heads_q tiles, see BackwardParams.
  static std::size_t workspace(const Problem& problem) { return static_cast<std::size_t>(layout(problem).bytes); }

  static Status run(const Problem& problem, const BackwardOperands& x, const Launch& launch) {
    const BackwardParams p = params(problem, x, launch);
    const std::int64_t key_tiles = p.key_tiles * p.heads_kv;
    if (key_tiles > kMostTiles || p.tiles > kMostTiles) {
      return unsupported("%lld tiles of keys are more than 2^30: split the batch", static_cast<long long>(key_tiles));
    }
    const std::int64_t row_blocks = p.heads_q * p.tiles;
    const bool any = problem.total_q > 0 && problem.total_k > 0 && key_tiles > 0 && row_blocks > 0;
    if (any) {
      const std::int64_t planned = p.turns != nullptr ? std::max(key_tiles, row_blocks) : key_tiles;
      ONEPASS_RETURN_IF_ERROR(cuda::launch(backward_prepare<C>, row_blocks + ceil_div(planned, kPrepareThreads<C>),
                                           kPrepareThreads<C>, 0, launch, p));
      ONEPASS_RETURN_IF_ERROR(run_main(problem, x, p, launch));
    }
    ONEPASS_RETURN_IF_ERROR(
        cuda::launch(backward_finish<C>, row_blocks, 32 * 4 * C::kPieces, kFinishBytes<C>, launch, p));
    if (!leaves_rows(problem)) return {};
    const std::int64_t rows = problem.mask.varlen ? p.total_k + p.total_q : p.batch * p.seq_k;
    return cuda::launch(backward_clear<C>, ceil_div(rows, kPassThreads / 32), kPassThreads, 0, launch, p);
  }

 private:
  static constexpr std::int64_t kMostTiles = std::int64_t{1} << 30;

  struct Layout {
    std::int64_t tiles, key_tiles, stats, plan, counter, turns, bytes;  // offsets in bytes
  };
  static Layout layout(const Problem& p) {
    Layout x = {};
    const bool packed = p.mask.varlen;
    x.tiles = packed ? p.total_q / C::kBlockQ + p.batch : p.batch * ceil_div(p.seq_q, C::kBlockQ);
    x.key_tiles = packed ? p.total_k / C::kBlockK + p.batch : p.batch * ceil_div(p.seq_k, C::kBlockK);
    x.stats = p.heads_q * x.tiles * C::kDqFloats * 4;
    x.plan = x.stats + p.heads_q * x.tiles * C::kStatFloats * 4;
    x.counter = x.plan + x.key_tiles * p.heads_kv * static_cast<std::int64_t>(sizeof(KeyTile));
    x.turns = x.counter + 64;
    x.bytes = x.turns + (p.deterministic == 1 ? 4 * p.heads_q * x.tiles : 0);
    return x;
  }

  static BackwardParams params(const Problem& problem, const BackwardOperands& x, const Launch& launch) {
    const Layout at = layout(problem);
    BackwardParams p = {};
    p.mask = problem.mask;
    p.operands = x;
    p.seq_q = problem.seq_q, p.seq_k = problem.seq_k, p.total_q = problem.total_q, p.total_k = problem.total_k;
    p.batch = problem.batch, p.tiles = at.tiles, p.key_tiles = at.key_tiles;
    p.item_q_tiles = ceil_div(problem.seq_q, C::kBlockQ), p.item_k_tiles = ceil_div(problem.seq_k, C::kBlockK);
    p.heads_q = static_cast<int>(problem.heads_q), p.heads_kv = static_cast<int>(problem.heads_kv);
    p.group = static_cast<int>(problem.group());
    p.head_dim = static_cast<int>(problem.head_dim), p.head_dim_v = static_cast<int>(problem.head_dim_v);
    p.scale = static_cast<float>(problem.score.scale);
    p.scale_log2 = static_cast<float>(problem.score.scale * 1.4426950408889634);
    if (p.scale_log2 == 0) p.scale_log2 = std::numeric_limits<float>::min();  // so that a hidden score stays -inf
    p.hidden = p.scale_log2 < 0 ? std::numeric_limits<float>::infinity() : -std::numeric_limits<float>::infinity();
    const bool slope = problem.mask.causal || problem.mask.window_right >= 0;  // first keys are seen by most rows
    const bool ordered = problem.deterministic == 1;
    p.section = ordered ? ordered_section(problem, slope) : slope ? section(problem) : 0;
    p.in_turn = slope || ordered || problem.mask.varlen || has_lengths(problem.mask);
    char* const base = static_cast<char*>(launch.workspace);
    p.dq = reinterpret_cast<float*>(base);
    p.stats = reinterpret_cast<float*>(base + at.stats);
    p.plan = reinterpret_cast<KeyTile*>(base + at.plan);
    p.next_tile = reinterpret_cast<unsigned*>(base + at.counter);
    if (ordered) p.turns = reinterpret_cast<unsigned*>(base + at.turns);
    return p;
  }

  static Status run_main(const Problem& problem, const BackwardOperands& x, const BackwardParams& p,
                         const Launch& launch) {
    const std::int64_t batch = problem.mask.varlen ? 1 : problem.batch;
    const MapExtents q = {problem.head_dim, problem.total_q, problem.heads_q, batch};
    const MapExtents k = {problem.head_dim, problem.total_k, problem.heads_kv, batch};
    MapExtents q_v = q, k_v = k;
    q_v.dim = k_v.dim = problem.head_dim_v;
    CUtensorMap map_q, map_do, map_k, map_v;
    ONEPASS_RETURN_IF_ERROR(encode_map(map_q, x.q, q, C::kBlockQ));
    ONEPASS_RETURN_IF_ERROR(encode_map(map_do, x.grad_out, q_v, C::kBlockQ));
    ONEPASS_RETURN_IF_ERROR(encode_map(map_k, x.k, k, C::kBlockK));
    ONEPASS_RETURN_IF_ERROR(encode_map(map_v, x.v, k_v, 64));
    const std::int64_t blocks = std::min<std::int64_t>(p.key_tiles * p.heads_kv, multiprocessors(launch.device));
    return cuda::launch(backward_kernel<C>, blocks, C::kThreads, kSharedBytes, launch, map_q, map_do, map_k, map_v, p);
  }

  static bool has_lengths(const MaskSpec& mask) {
    return mask.q_length != nullptr || mask.k_start != nullptr || mask.k_length != nullptr ||
           mask.q_position != nullptr;
  }

  /// Whether there may be rows of dK, dV or dQ that no tile writes.
  static bool leaves_rows(const Problem& problem) {
    if (problem.mask.varlen || has_lengths(problem.mask)) return true;
    return seen(problem.sequence(0)).keys.size() < problem.seq_k;
  }

  /// KV heads whose Q, dO and sums of dQ the L2 cache holds beside each other.
  static int section(const Problem& p, std::int64_t cache_bytes = 40 << 20) {
    const std::int64_t heads = std::max<std::int64_t>(1, p.batch * p.heads_kv);
    const std::int64_t of_head =
        std::max<std::int64_t>(1, p.group() * p.seq_q * (2 * p.head_dim + 2 * p.head_dim_v + 4 * p.head_dim));
    return static_cast<int>(std::clamp<std::int64_t>(cache_bytes / of_head, 1, heads));
  }
  /// The same where blocks take turns. Of short rows, few key tiles of a head are under way at once, and its sums come
  /// back late; along long ones without a mask the blocks of a head follow each other closely, so that more heads, and
  /// fewer blocks of each, wait less. A last section much smaller than the others would wait most.
  static int ordered_section(const Problem& p, bool slope) {
    const std::int64_t megabytes = p.seq_q <= 1024 ? 20 : p.seq_q > 8192 && !slope ? 80 : 40;
    const std::int64_t most = section(p, megabytes << 20), heads = p.batch * p.heads_kv;
    for (std::int64_t size = most; size > most / 2; --size) {
      if (heads % size == 0 || 4 * (heads % size) >= 3 * size) return static_cast<int>(size);
    }
    return static_cast<int>(most);
  }
};

}  // namespace onepass::cuda::sm90
