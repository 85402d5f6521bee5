// Host side of the Hopper forward: picks the tile, describes the operands to
// TMA, launches.
#pragma once

#include <algorithm>
#include <limits>

#include "core/tiles.h"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/sm90/forward.cuh"

namespace onepass::cuda::sm90 {

template <class T, int kHeadDim, int kHeadDimV>
struct Forward {
  using Long = ForwardConfig<T, kHeadDim, kHeadDimV, forward_tile(kHeadDim, kHeadDimV, true)>;
  using Short = ForwardConfig<T, kHeadDim, kHeadDimV, forward_tile(kHeadDim, kHeadDimV, false)>;

  static Tiles tiles() {
    return {Long::kBlockQ, Long::kBlockK, Long::kStages, Long::kThreads, sizeof(ForwardShared<Long>)};
  }

  /// The next tile's number.
  static std::size_t workspace(const Problem&) { return 64; }

  static Status run(const Problem& problem, const ForwardOperands& x, const Launch& launch) {
    return many_keys(problem) ? run_as<Long>(problem, x, launch) : run_as<Short>(problem, x, launch);
  }

 private:
  /// Keys that a row sees at most, against the length from which the long tile
  /// was measured faster.
  static bool many_keys(const Problem& p) {
    std::int64_t keys = p.seq_k;
    if (p.mask.window_left >= 0 && (p.mask.causal || p.mask.window_right >= 0)) {
      keys = std::min(keys, p.mask.window_left + 1 + (p.mask.causal ? 0 : p.mask.window_right));
    }
    return keys > 2048;
  }

  template <class C>
  static std::int64_t tile_count(const Problem& p) {
    const std::int64_t of_sequences =
        p.mask.varlen ? p.total_q / C::kBlockQ + p.batch : ceil_div(p.seq_q, C::kBlockQ) * p.batch;
    return of_sequences * p.heads_q;
  }

  // Tiles are taken in turn where their lengths differ too much, or are not
  // known here, for a fixed share.
  static bool dynamic(const Problem& p) {
    return p.mask.varlen || p.mask.q_length != nullptr || p.mask.k_length != nullptr || p.mask.q_position != nullptr;
  }

  template <class C>
  static Status run_as(const Problem& problem, const ForwardOperands& x, const Launch& launch) {
    static_assert(sizeof(ForwardShared<C>) <= kSharedBytes90);
    const std::int64_t tiles = tile_count<C>(problem);
    if (problem.total_q == 0 || problem.heads_q == 0 || (!problem.mask.varlen && problem.batch == 0)) return {};
    if (tiles > 0x3fffffff)
      return unsupported("%lld tiles of queries are more than 2^30: split the batch", static_cast<long long>(tiles));

    ForwardParams p;
    p.mask = problem.mask;
    p.seq_q = static_cast<int>(problem.seq_q);
    p.seq_k = static_cast<int>(problem.seq_k);
    p.total_q = static_cast<int>(problem.total_q);
    p.total_k = static_cast<int>(problem.total_k);
    p.batch = static_cast<int>(problem.batch);
    p.heads_q = static_cast<int>(problem.heads_q);
    p.group = static_cast<int>(problem.group());
    p.head_dim = static_cast<int>(problem.head_dim);
    p.head_dim_v = static_cast<int>(problem.head_dim_v);
    p.blocks_q = static_cast<int>(ceil_div(problem.seq_q, C::kBlockQ));
    p.tiles = static_cast<int>(tiles);
    p.scale_log2 = static_cast<float>(problem.score.scale * 1.4426950408889634);
    p.q = x.q;
    p.k = x.k;
    p.v = x.v;
    p.out = x.out;
    p.lse = x.lse;
    p.next_tile = dynamic(problem) ? static_cast<unsigned*>(launch.workspace) : nullptr;
    const std::int64_t blocks =
        std::min<std::int64_t>(std::max<std::int64_t>(tiles, 1), multiprocessors(launch.device));
    p.section = section(problem, p.blocks_q, blocks);
    p.sections = static_cast<int>(ceil_div(problem.batch * problem.heads_q, p.section));

    const std::int64_t batch = problem.mask.varlen ? 1 : problem.batch;
    CUtensorMap map_q, map_k, map_v, map_out;
    ONEPASS_RETURN_IF_ERROR(
        encode_map(map_q, x.q, {problem.head_dim, problem.total_q, problem.heads_q, batch}, C::kBlockQ));
    ONEPASS_RETURN_IF_ERROR(
        encode_map(map_out, x.out, {problem.head_dim_v, problem.total_q, problem.heads_q, batch}, 64));
    // Without keys nothing is loaded, but a map must point somewhere.
    const bool keys = problem.total_k > 0;
    ONEPASS_RETURN_IF_ERROR(encode_map(
        map_k, keys ? x.k : x.q,
        {problem.head_dim, std::max<std::int64_t>(problem.total_k, 1), problem.heads_kv, batch}, C::kBlockK));
    ONEPASS_RETURN_IF_ERROR(encode_map(
        map_v, keys ? x.v : x.q,
        {problem.head_dim_v, std::max<std::int64_t>(problem.total_k, 1), problem.heads_kv, batch}, C::kBlockK));
    if (p.next_tile != nullptr) {
      ONEPASS_RETURN_IF_ERROR(status_of(
          cudaMemsetAsync(p.next_tile, 0, sizeof(unsigned), static_cast<cudaStream_t>(launch.stream)), "memset"));
    }
    return ::onepass::cuda::launch<true>(forward_kernel<C>, blocks, C::kThreads, sizeof(ForwardShared<C>), launch,
                                         map_q, map_k, map_v, map_out, p);
  }

  /// Heads taken together, a section: without a slope from long tiles to short ones a group, one at a time. Else as
  /// many as have keys and values of about 16 MB, which the L2 cache holds twice. Of two sections in opposite orders a
  /// block, which takes every `blocks`-th tile, gets a long tile for each short one if they are even in number and each
  /// has about a multiple of `blocks` tiles: so a few numbers of sections are compared.
  static int section(const Problem& p, std::int64_t blocks_q, std::int64_t blocks) {
    if (!p.mask.causal && p.mask.window_right < 0) return static_cast<int>(p.group());
    constexpr std::int64_t kCacheBytes = 16 << 20;
    const std::int64_t heads = p.batch * p.heads_q;
    const std::int64_t of_group = std::max<std::int64_t>(1, p.seq_k * (p.head_dim + p.head_dim_v) * 2);
    const std::int64_t fit = std::max<std::int64_t>(1, kCacheBytes / of_group) * p.group();
    const std::int64_t even = ceil_div(ceil_div(heads, fit), 2) * 2;
    std::int64_t best = ceil_div(heads, even), least = std::numeric_limits<std::int64_t>::max();
    for (const int more : {0, 2, -2, 4}) {
      if (even + more < 2) continue;
      const std::int64_t section = ceil_div(heads, even + more), sections = ceil_div(heads, section);
      if (section > 2 * fit || sections % 2 != 0) continue;
      const std::int64_t tiles = section * blocks_q, missing = (section * sections - heads) * blocks_q;
      const std::int64_t multiple = std::max<std::int64_t>(1, (tiles + blocks / 2) / blocks) * blocks;
      const std::int64_t off = std::max(tiles, multiple) - std::min(tiles, multiple) + missing / 2;
      if (off < least) least = off, best = section;
      if (off <= blocks / 8) break;
    }
    return static_cast<int>(best);
  }
};

}  // namespace onepass::cuda::sm90
