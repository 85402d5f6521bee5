// The bfloat16 backward for every kind of matrix products (`Products`: products_dot.h, products_amx.h). One pass over
// the tiles, FlashAttention-2's algorithm 2: a task is a block of keys with private dK and dV, its inner loop the query
// blocks of the group's heads; dQ grows in memory in the order of the key blocks.
#pragma once

#include "cpu/backward_rows_bf16.h"
#include "cpu/backward_tasks.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// kWidth query rows of a block and the keys [begin, end) of the key block that at least one of them sees; all of them
/// see those in `full`.
struct HalfBlock {
  std::int64_t begin = 0, end = 0;
  Interval full;
  bool meets(std::int64_t key) const { return key < end && key + kPairPiece > begin; }
};

template <class Products>
struct KeyBlockTask {
  static constexpr std::int64_t kBlock = Products::kBlockQ, kHalves = kBlock / kWidth;
  static constexpr PairLayout kLayout = Products::right_layout(kBlock);

  const PairCall<Products>& call;
  const PairScratch& t;
  const Sequence& sequence;
  std::int64_t b, kv_head, j0, keys, padded_keys;
  QueryRows<Products> rows;
  HalfBlock half[kHalves];

  void load_keys() const {
    const Problem& problem = call.problem;
    const PairPlan& plan = call.plan;
    // Keys that no row sees may hold anything: zeros in their place.
    const Interval seen = sequence.visible_to_any(0, sequence.q_length);
    const std::int64_t first = clamp_to<std::int64_t>(seen.begin - j0, 0, keys);
    const std::int64_t last = clamp_to<std::int64_t>(seen.end - j0, first, keys);
    const auto copy = [&](const Tensor& x, std::int64_t dim, Bf16* to, std::int64_t pitch) {
      const Bf16* from = row_as<StoreBf16>(x, b, sequence.k_row + j0 + first, kv_head);
      __builtin_memset(to, 0, static_cast<std::size_t>(2 * first * pitch));
      copy_rows_padded(from, x.stride_seq, last - first, padded_keys - first, dim, to + first * pitch, pitch);
    };
    copy(call.x.k, problem.head_dim, t.k, plan.dim);
    copy(call.x.v, problem.head_dim_v, t.v, plan.dim_v);
    Products::pack_keys(t.k, padded_keys, plan.dim, t.k_right);
    __builtin_memset(t.dk, 0, static_cast<std::size_t>(4 * padded_keys * plan.dim));
    __builtin_memset(t.dv, 0, static_cast<std::size_t>(4 * padded_keys * plan.dim_v));
  }

  /// What each half of the query block sees of the key block.
  void find_keys() {
    for (std::int64_t n = 0; n < kHalves; ++n) {
      const std::int64_t i0 = rows.i0 + n * kWidth;
      const std::int64_t first = max_of(i0, rows.live.begin), last = min_of(i0 + kWidth, rows.live.end);
      half[n] = {};
      if (first >= last) continue;
      const Interval any = sequence.visible_to_any(first, last);
      half[n].begin = clamp_to<std::int64_t>(any.begin - j0, 0, keys);
      half[n].end = clamp_to<std::int64_t>(any.end - j0, 0, keys);
      if (half[n].begin >= half[n].end) half[n] = {};
      if (last - first < kWidth || rows.dead) continue;
      const Interval all = sequence.visible_to_all(first, last);
      half[n].full = {all.begin - j0, min_of(all.end - j0, keys)};
    }
  }

  /// P and dS of half n and the keys of the piece at `key`.
  void weigh(const HeadScore& h, std::int64_t n, std::int64_t key) const {
    const PairPlan& plan = call.plan;
    const std::int64_t lane = n * kWidth, lanes = lane / kLanes * kLayout.lane_group;
    const std::int64_t count = min_of(kPairPiece, keys - key);
    Products::scores({t.s, t.dp, t.k + key * plan.dim, t.v + key * plan.dim_v, t.q_t + lanes, t.dout_t + lanes,
                      plan.dim, plan.dim_v, plan.depth, plan.depth_v},
                     kBlock, count);

    constexpr std::int64_t kFarthest = std::int64_t{1} << 30;
    const auto shift = [&](std::int64_t bound) {
      return static_cast<std::int32_t>(clamp_to(bound + rows.i0 - j0 - key, -kFarthest, kFarthest));
    };
    const bool dropout = call.problem.score.dropout.threshold != 0, softcap = call.problem.score.softcap != 0;
    const WeighedPiece piece{t.s,
                             t.dp,
                             rows.lse + lane,
                             rows.lse_log2 + lane,
                             rows.d + lane,
                             rows.row + lane,
                             shift(sequence.hi_shift),
                             shift(sequence.lo_shift),
                             static_cast<std::int32_t>(count),
                             static_cast<float>(call.problem.score.scale) * kLog2e,
                             softcap ? t.cap_slope : nullptr,
                             dropout ? t.keep : nullptr,
                             t.p + lane,
                             t.ds + lane,
                             kBlock,
                             t.ds_pairs + key / 32 * kLayout.pair_group + lanes,
                             kLayout};
    const auto padded = static_cast<std::int32_t>(round_up(count, Products::kDepth));
    const bool masked = padded > count || key < half[n].full.begin || key + count > half[n].full.end;
    if (plan.modified) {
      modify_piece(h, piece, t.cap_slope, t.keep, rows.i0 + lane, min_of<std::int64_t>(kWidth, rows.count - lane),
                   j0 + key);
      masked ? weigh_piece<true, true>(piece, padded) : weigh_piece<false, true>(piece, padded);
    } else {
      masked ? weigh_piece<true, false>(piece, padded) : weigh_piece<false, false>(piece, padded);
    }
  }

  /// Adds the query block to dV and dK; leaves dS of all its keys in t.ds_pairs.
  void add_key_gradients(const HeadScore& h) const {
    const PairPlan& plan = call.plan;
    for (std::int64_t key = 0; key < keys; key += kPairPiece) {
      std::int64_t first = kBlock, last = 0;
      for (std::int64_t n = 0; n < kHalves; ++n) {
        if (!half[n].meets(key)) continue;
        weigh(h, n, key);
        first = min_of(first, n * kWidth);
        last = (n + 1) * kWidth;
      }
      if (first >= last) continue;
      last = min_of(last, round_up(rows.count, Products::kDepth));
      const std::int64_t count = min_of(kPairPiece, keys - key);
      Products::add_key_gradients(
          {t.dv + key * plan.dim_v, t.dk + key * plan.dim, t.p, t.ds, t.dout, t.q, plan.dim_v, plan.dim}, kBlock, count,
          first, last);
    }
  }

  /// The keys of half n, padded, for dQ.
  Interval padded_range(std::int64_t n) const {
    return {half[n].begin / kPairPiece * kPairPiece,
            min_of(round_up(half[n].end, kPairPiece), round_up(keys, Products::kDepth))};
  }

  /// Adds dS K to the block's dQ when its turn has come.
  void add_query_gradient(std::int64_t head) const {
    const PairPlan& plan = call.plan;
    const Interval seen = rows.keys;
    const std::int64_t turn = j0 / plan.block_k, seq = sequence.q_row + rows.i0;
    const bool first = turn == seen.begin / plan.block_k;
    std::int32_t* ticket = call.ticket(sequence, b, head, rows.i0 / kBlock);
    float* dq = call.dq(b, head, seq);
    wait_for(ticket, static_cast<std::int32_t>(turn));
    const std::int64_t width = round_up(rows.count, kLanes);
    for (std::int64_t n = 0; n < kHalves && n * kWidth < rows.count; ++n) {
      const std::int64_t lane = n * kWidth, count = min_of<std::int64_t>(kWidth, rows.count - lane);
      float* to = dq + Products::query_at(lane, plan.dim);
      if (half[n].end > 0) {
        const Interval range = padded_range(n);
        Products::add_query_gradient(to, width, plan.dim, t.k_right, padded_keys, t.ds_pairs, kBlock, lane, count,
                                     range.begin, range.end, !first);
      } else if (first) {
        Products::clear_query_gradient(to, width, plan.dim, count);
      }
    }
    if (seen.end <= j0 + keys) {
      Products::store_query_gradient(call.x.grad_q, b, seq, head, rows.count, call.problem.head_dim, dq, width,
                                     plan.dim, static_cast<float>(call.problem.score.scale));
    }
    __atomic_store_n(ticket, static_cast<std::int32_t>(turn + 1), __ATOMIC_RELEASE);
  }

  void run() {
    const Problem& problem = call.problem;
    const PairPlan& plan = call.plan;
    const std::int64_t row = sequence.k_row + j0;
    const Interval seeing = sequence.rows_seeing(j0, j0 + keys);
    if (seeing.size() == 0) {
      clear_rows(call.x.grad_k, b, row, kv_head, keys, problem.head_dim);
      clear_rows(call.x.grad_v, b, row, kv_head, keys, problem.head_dim_v);
      return;
    }
    load_keys();
    for (std::int64_t head = kv_head * problem.group(); head < (kv_head + 1) * problem.group(); ++head) {
      const HeadScore h = head_score(problem, sequence, b, head);
      for (std::int64_t i0 = seeing.begin / kBlock * kBlock; i0 < seeing.end; i0 += kBlock) {
        rows.load(call, t, sequence, b, head, i0);
        find_keys();
        add_key_gradients(h);
        add_query_gradient(head);
      }
    }
    const float scale = static_cast<float>(problem.score.scale);
    store_rows(call.x.grad_k, b, row, kv_head, keys, problem.head_dim, t.dk, plan.dim, scale);
    store_rows(call.x.grad_v, b, row, kv_head, keys, problem.head_dim_v, t.dv, plan.dim_v, 1);
  }
};

/// The tiles: key blocks in ascending order, heads before blocks so that workers seldom meet at one dQ.
template <class Products>
void run_pair_tiles(const PairCall<Products>& call, Queue& queue, int worker) {
  [[maybe_unused]] const typename Products::Scope scope;
  const Problem& problem = call.problem;
  const PairPlan& plan = call.plan;
  const PairScratch t = call.scratch(worker);
  SequenceCursor cursor;
  for (;;) {
    const std::int64_t task = cursor.seek(
        problem, queue.pop(), [&](const Sequence& s) { return ceil_div(s.k_length, plan.block_k) * problem.heads_kv; });
    if (task < 0) return;
    const std::int64_t j0 = task / problem.heads_kv * plan.block_k;
    const std::int64_t keys = min_of(plan.block_k, cursor.sequence.k_length - j0);
    KeyBlockTask<Products>{
        call, t, cursor.sequence, cursor.b, task % problem.heads_kv, j0, keys, round_up(keys, kPairPiece), {}, {}}
        .run();
  }
}

template <class Products>
std::size_t backward_workspace_bf16(const Problem& problem, int threads) {
  const PairPlan plan = plan_pairs<Products>(problem, threads);
  const std::size_t own = static_cast<std::size_t>(plan.scratch + plan.workers * plan.scratch_each);
  return max_of(own,
                max_of(row_gradients_workspace(problem, plan, threads), avx512::backward_workspace(problem, threads)));
}

template <class Products>
void backward_bf16(const Problem& problem, const BackwardOperands& operands, const Launch& launch) {
  const PairCall<Products> call{problem, operands, plan_pairs<Products>(problem, launch.threads),
                                static_cast<char*>(launch.workspace)};
  Queue* queues = static_cast<Queue*>(launch.workspace);
  for (int n = 0; n < 4; ++n) queues[n].next = 0;
  auto* magnitudes = reinterpret_cast<Magnitudes*>(queues + 4);
  *magnitudes = {};
  parallel(call.plan.workers, [&](int worker) { run_pair_rows(call, queues[0], *magnitudes, worker); });
  if (__builtin_expect(!magnitudes->usual(), 0)) {
    avx512::backward(problem, operands, launch);
    return;
  }
  parallel(call.plan.workers, [&](int worker) { run_pair_tiles(call, queues[1], worker); });
  add_row_gradients(call, queues + 2, launch.threads);
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
