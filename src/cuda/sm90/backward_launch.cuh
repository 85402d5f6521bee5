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

  /// Bytes: heads_q tiles (4 block_q bucket + 8 block_q + 136) + 48 heads_kv key_tiles + 64, see BackwardParams.
  static std::size_t workspace(const Problem& problem) { return static_cast<std::size_t>(layout(problem).bytes); }

  static Status run(const Problem& problem, const BackwardOperands& x, const Launch& launch) {
    const BackwardParams p = params(problem, x, launch);
    const std::int64_t key_tiles = p.key_tiles * p.heads_kv;
    const std::int64_t row_blocks = p.heads_q * p.tiles;
    if (key_tiles > kMostTiles || row_blocks > kMostTiles) {
      return unsupported("%lld tiles of keys, %lld of queries: more than 2^30; split the batch",
                         static_cast<long long>(key_tiles), static_cast<long long>(row_blocks));
    }
    if (p.ordered && p.item_k_tiles > VisitCount::kMost) {
      return unsupported("deterministic: %lld keys of a sequence are more than %lld; split it, or use a sm80 kernel",
                         static_cast<long long>(problem.seq_k), static_cast<long long>(VisitCount::kMost * C::kBlockK));
    }
    const bool any = problem.total_q > 0 && problem.total_k > 0 && key_tiles > 0 && row_blocks > 0;
    if (any) {
      ONEPASS_RETURN_IF_ERROR(cuda::launch(backward_prepare<C>, row_blocks + ceil_div(key_tiles, kPrepareThreads<C>),
                                           kPrepareThreads<C>, 0, launch, p));
      ONEPASS_RETURN_IF_ERROR(run_main(problem, x, p, launch));
    }
    if (any && p.passes) {
      ONEPASS_RETURN_IF_ERROR(
          cuda::launch(backward_finish<C>, row_blocks, 32 * 4 * C::kPieces, kFinishBytes<C>, launch, p));
    }
    if (any && !leaves_rows(problem)) return {};
    const std::int64_t rows = problem.mask.varlen ? p.total_k + p.total_q : p.batch * (p.seq_k + p.seq_q);
    return cuda::launch(backward_clear<C>, ceil_div(rows, kClearThreads / 32), kClearThreads, 0, launch, p);
  }

 private:
  static constexpr std::int64_t kMostTiles = std::int64_t{1} << 30;
  // Key tiles of a sequence up to which their blocks write dQ too: more would meet at it, and wait for each other.
  static constexpr std::int64_t kMostVisits = C::kD <= 64 ? 8 : 16;
  static constexpr std::int64_t kMegabytes = 40;  // of the L2 cache for a section

  struct Layout {
    std::int64_t tiles, key_tiles, stats, plan, visits, counter, bytes;  // offsets in bytes
  };
  static Layout layout(const Problem& p) {
    Layout x = {};
    const bool packed = p.mask.varlen;
    x.tiles = packed ? p.total_q / C::kBlockQ + p.batch : p.batch * ceil_div(p.seq_q, C::kBlockQ);
    x.key_tiles = packed ? p.total_k / C::kBlockK + p.batch : p.batch * ceil_div(p.seq_k, C::kBlockK);
    x.stats = p.heads_q * x.tiles * C::kDqFloats * 4;
    x.plan = x.stats + p.heads_q * x.tiles * C::kStatFloats * 4;
    x.visits = x.plan + x.key_tiles * p.heads_kv * static_cast<std::int64_t>(sizeof(KeyTile));
    x.counter = x.visits + p.heads_q * x.tiles * static_cast<std::int64_t>(sizeof(VisitCount));
    x.bytes = x.counter + 64;
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
    // Of few key tiles those in order meet least, and are the fastest too.
    p.ordered = problem.deterministic == 1 || (p.item_k_tiles <= 4 && (C::kD <= 64 || (C::kD <= 128 && !slope)));
    // Where all see all, blocks begin at the same rows, and meet unless each has a head of its own.
    const bool apart = slope || section(problem, kMegabytes) >= multiprocessors(launch.device);
    p.passes = p.ordered ? C::kD > 64 && problem.seq_k > 1024 : !apart || p.item_k_tiles > kMostVisits;
    p.section = p.ordered            ? section(problem, ordered_megabytes(problem, slope))
                : slope || !p.passes ? section(problem, kMegabytes)
                                     : 0;
    p.in_turn = slope || p.ordered || problem.mask.varlen || has_lengths(problem.mask);
    char* const base = static_cast<char*>(launch.workspace);
    p.dq = reinterpret_cast<float*>(base);
    p.stats = reinterpret_cast<float*>(base + at.stats);
    p.plan = reinterpret_cast<KeyTile*>(base + at.plan);
    p.next_tile = reinterpret_cast<unsigned*>(base + at.counter);
    if (p.ordered || !p.passes) p.visits = reinterpret_cast<VisitCount*>(base + at.visits);
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
    const Extent x = seen(problem.sequence(0));
    return x.keys.size() < problem.seq_k || x.rows.size() < problem.seq_q;
  }

  /// KV heads whose Q, dO and sums of dQ fit the L2 cache beside each other, fewer where that makes the last section
  /// nearly as large as the others: its blocks are few heads', which meet and wait.
  static int section(const Problem& p, std::int64_t megabytes) {
    const std::int64_t heads = std::max<std::int64_t>(1, p.batch * p.heads_kv);
    const std::int64_t of_head =
        std::max<std::int64_t>(1, p.group() * p.seq_q * (2 * p.head_dim + 2 * p.head_dim_v + 4 * p.head_dim));
    const std::int64_t most = std::clamp<std::int64_t>((megabytes << 20) / of_head, 1, heads);
    for (std::int64_t size = most; size > most / 2; --size) {
      if (heads % size == 0 || 4 * (heads % size) >= 3 * size) return static_cast<int>(size);
    }
    return static_cast<int>(most);
  }
  /// Of its cache where blocks take turns. Of short rows, few key tiles of a head are under way at once, and its sums
  /// come back late; along long ones without a mask the blocks of a head follow each other closely, so that more heads,
  /// and fewer blocks of each, wait less.
  static std::int64_t ordered_megabytes(const Problem& p, bool slope) {
    return p.seq_q <= 1024 ? 20 : p.seq_q > 8192 && !slope ? 80 : kMegabytes;
  }
};

}  // namespace onepass::cuda::sm90
