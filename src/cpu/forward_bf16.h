// The bfloat16 forward, for every kind of matrix products (`Tiles`: tiles_dot.h, tiles_amx.h). A task is a block of
// query rows of one head: it packs Q^T once, sweeps the keys that its rows see in blocks, packs V once a block, and
// takes each group of 64 rows through the block.
#pragma once

#include "cpu/forward_group_bf16.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "cpu/tasks.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

inline constexpr std::int64_t kMostGroups = 8;

/// Memory of one worker.
struct Scratch {
  GroupScratch group;
  Bf16 *q, *k, *v_clean;  // packed Q; rows of K, if they need padding; of V, without its special elements
  float *out, *reference, *sum;
};

template <class Tiles>
struct ForwardPlan {
  std::int64_t dim, dim_v;  // padded
  std::int64_t rows;        // query rows of a task
  int threads;
  std::size_t bytes;  // of one worker

  ForwardPlan(const Problem& p, int wanted_threads) {
    dim = round_up(p.head_dim, Tiles::kDimStep);
    dim_v = round_up(p.head_dim_v, Tiles::kDimVStep);
    // Many groups share a packed block of V, as far as their Q and O stay in the second-level cache; fewer where the
    // threads would run out of tasks. A row's result does not depend on its task.
    const std::int64_t groups = Tiles::kCachedElements / (kWidth * max_of<std::int64_t>(max_of(dim, dim_v), kWidth));
    rows = kWidth * clamp_to<std::int64_t>(groups, 2, kMostGroups);
    const std::int64_t heads = max_of<std::int64_t>(p.batch * p.heads_q, 1);
    while (rows > Tiles::kFewestRows && heads * ceil_div(p.seq_q, rows) < 4 * wanted_threads) {
      rows = round_up(rows / 2, kWidth);
    }
    rows = min_of(rows, round_up(max_of<std::int64_t>(p.seq_q, 1), kWidth));
    // Below about 20 microseconds of work a second thread costs more than it brings.
    const double work = static_cast<double>(heads) * static_cast<double>(p.seq_q) * static_cast<double>(p.seq_k) *
                        static_cast<double>(p.head_dim + p.head_dim_v);
    threads = work < Tiles::kSmallWork ? 1 : wanted_threads;
    Scratch unused;
    bytes = carve(nullptr, &unused);
  }

  std::size_t carve(char* base, Scratch* s) const {
    std::size_t used = 0;
    const auto take = [&](auto*& p, std::int64_t count) {
      p = base == nullptr ? nullptr : reinterpret_cast<decltype(p + 0)>(base + used);
      used += static_cast<std::size_t>(round_up(count * static_cast<std::int64_t>(sizeof *p), 64));
    };
    take(s->q, rows * round_up(dim, 32));
    take(s->k, Tiles::kBlock * dim);
    take(s->v_clean, Tiles::kBlock * dim_v);
    take(s->group.s, Tiles::kPiece * kWidth);
    take(s->group.p, Tiles::kBlock * kWidth);
    take(s->group.v, (Tiles::kBlock + 32) * dim_v);
    take(s->out, rows * dim_v + kLanes);
    take(s->reference, rows);
    take(s->sum, rows);
    return used;
  }
};

template <class Tiles>
struct ForwardTask {
  const Problem& problem;
  const ForwardOperands& operands;
  const ForwardPlan<Tiles>& plan;
  const Scratch& scratch;
  const Sequence& sequence;
  std::int64_t b, head;
  std::int64_t i0, rows;
  bool modified;  // scores in natural units
  RowGroup groups[kMostGroups];

  std::int64_t count() const { return ceil_div(rows, kWidth); }
  float natural() const { return modified ? 1.0f : kLn2; }

  void begin_group(std::int64_t n) {
    RowGroup& g = groups[n];
    g.i0 = i0 + n * kWidth;
    g.rows = min_of<std::int64_t>(kWidth, rows - n * kWidth);
    g.any = sequence.visible_to_any(g.i0, g.i0 + g.rows);
    g.all = sequence.visible_to_all(g.i0, g.i0 + g.rows);
    Bf16* q = scratch.q + n * kWidth * round_up(plan.dim, 32);
    pack_lanes_of_rows(row_as<StoreBf16>(operands.q, b, sequence.q_row + g.i0, head), operands.q.stride_seq, g.rows,
                       problem.head_dim, q, Tiles::kRight, kWidth);
    g.q = q;
    g.out = scratch.out + n * kWidth * plan.dim_v;
    g.reference = scratch.reference + n * kWidth;
    g.sum = scratch.sum + n * kWidth;
    for (std::int64_t i = 0; i < kWidth; ++i) g.reference[i] = i < g.rows ? -kInf : 0.0f;
    g.unset = true;
    g.large = false;
    clear(g);
  }

  void clear(RowGroup& g) const {
    for (int i = 0; i < kWidth; ++i) g.sum[i] = 0;
    for (std::int64_t x = 0; x < plan.dim_v * kWidth; x += kLanes) store(g.out + x, Vec{});
  }

  /// The keys [begin, end) of the block that starts at key `start`; V packed, K in place if it can be read there.
  KeyBlock make_block(std::int64_t start, std::int64_t begin, std::int64_t end) const {
    const std::int64_t kv_head = problem.kv_head(head), row = sequence.k_row + start, dim = problem.head_dim,
                       dim_v = problem.head_dim_v, skipped = begin - start, keys = end - begin;
    KeyBlock block{start,
                   row_as<StoreBf16>(operands.k, b, row, kv_head),
                   row_as<StoreBf16>(operands.v, b, row, kv_head),
                   operands.k.stride_seq,
                   operands.v.stride_seq,
                   false};
    const Bf16* v = block.v + skipped * block.v_stride;
    SpecialScan scan;
    Tiles::pack_values(v, block.v_stride, skipped, keys, dim_v, scratch.group.v, scan);
    block.special_values = scan.found();
    if (__builtin_expect(block.special_values, 0)) {
      copy_without_special(v, block.v_stride, keys, dim_v, scratch.v_clean, dim_v);
      Tiles::pack_values(scratch.v_clean, dim_v, skipped, keys, dim_v, scratch.group.v, NoObserver{});
    }
    if (dim != plan.dim || round_up(end, Tiles::kKeyRows) > sequence.k_length) {
      copy_rows_padded(block.k + skipped * block.k_stride, block.k_stride, keys, round_up(keys, Tiles::kKeyRows), dim,
                       scratch.k + skipped * plan.dim, plan.dim);
      block.k = scratch.k;
      block.k_stride = plan.dim;
    }
    return block;
  }

  /// Asks for a group's share of the keys [begin, end), the next block's. The hardware's own prefetch does not cross
  /// pages.
  void prefetch(std::int64_t n, std::int64_t begin, std::int64_t end) const {
    const std::int64_t keys = max_of<std::int64_t>(end - begin, 0), kv_head = problem.kv_head(head);
    for (std::int64_t j = begin + keys * n / count(); j < begin + keys * (n + 1) / count(); ++j) {
      const Bf16* k = row_as<StoreBf16>(operands.k, b, sequence.k_row + j, kv_head);
      const Bf16* v = row_as<StoreBf16>(operands.v, b, sequence.k_row + j, kv_head);
      for (std::int64_t c = 0; c < problem.head_dim; c += 32) __builtin_prefetch(k + c, 0, 2);
      for (std::int64_t c = 0; c < problem.head_dim_v; c += 32) __builtin_prefetch(v + c, 0, 2);
    }
  }

  template <int kN>
  void add(RowGroup& g, const HeadScore& h, const KeyBlock& block, std::int64_t begin, std::int64_t end) const {
    if (modified) {
      GroupStep<Tiles, kN, true>{problem, h, scratch.group, plan.dim, g, block}.run(begin, end);
    } else {
      GroupStep<Tiles, kN, false>{problem, h, scratch.group, plan.dim, g, block}.run(begin, end);
    }
  }

  void sweep() {
    const HeadScore h = head_score(problem, sequence, b, head);
    const Interval seen = sequence.visible_to_any(i0, i0 + rows);
    constexpr std::int64_t kPiece = Tiles::kPiece, kBlock = Tiles::kBlock;
    static_assert(kBlock % kPiece == 0);
    // Blocks and pieces lie at multiples of their sizes, whatever the task's rows see.
    for (std::int64_t start = seen.begin / kBlock * kBlock; start < seen.end; start += kBlock) {
      const std::int64_t begin = max_of(start, seen.begin / kPiece * kPiece), end = min_of(start + kBlock, seen.end);
      const KeyBlock block = make_block(start, begin, end);
      for (std::int64_t n = 0; n < count(); ++n) {
        RowGroup& g = groups[n];
        prefetch(n, start + kBlock, min_of(start + 2 * kBlock, seen.end));
        const std::int64_t from = max_of(start, g.any.begin / kPiece * kPiece), to = min_of(end, g.any.end);
        if (from >= to) continue;
        constexpr int kFewest = Tiles::kFewestVectors;
        if (g.rows <= kFewest * kLanes) {
          add<kFewest>(g, h, block, from, to);
        } else if (g.rows <= 2 * kLanes) {
          add<2>(g, h, block, from, to);
        } else if (g.rows <= 3 * kLanes && kFewest == 1) {
          add<kFewest == 1 ? 3 : 4>(g, h, block, from, to);
        } else {
          add<4>(g, h, block, from, to);
        }
      }
    }
  }

  /// Of a row that sees one key, its score, which is all that lse has: pair products flush it to 0 where it is tiny.
  float lone_score(std::int64_t i) const {
    const Interval seen = sequence.visible(i);
    if (seen.size() != 1) return 0;
    const Bf16* q = row_as<StoreBf16>(operands.q, b, sequence.q_row + i, head);
    const Bf16* k = row_as<StoreBf16>(operands.k, b, sequence.k_row + seen.begin, problem.kv_head(head));
    float sum = 0;
    for (std::int64_t c = 0; c < problem.head_dim; ++c) sum += bf16_to_float(q[c]) * bf16_to_float(k[c]);
    return sum * static_cast<float>(problem.score.scale);
  }

  /// O = O^T / sum, LSE = reference + log sum, with the sink as one more logit of the row; the lanes [begin, end).
  void write(const RowGroup& g, std::int64_t begin, std::int64_t end, bool with_lse) const {
    const std::int64_t seq = sequence.q_row + g.i0;
    const float sink = sink_of(problem, head);
    float* lse = operands.lse && with_lse ? operands.lse.row(b, head, seq) : nullptr;
    alignas(64) float factor[kWidth + kLanes] = {};
    for (std::int64_t i = begin; i < end; ++i) {
      if ((g.reference[i] == -kInf && g.sum[i] == 0) ||
          (problem.score.bias && is_empty_row(problem, sequence, b, head, g.i0 + i))) {
        if (lse != nullptr) lse[i] = sink;
        for (std::int64_t c = 0; c < problem.head_dim_v; ++c) g.out[c * kWidth + i] = 0;
        continue;
      }
      float top = g.reference[i] * natural(), part = 1, sink_part = 0;
      if (sink > -kInf) {
        part = __builtin_expf(min_of(top - sink, 0.0f));
        sink_part = __builtin_expf(min_of(sink - top, 0.0f));
        top = max_of(top, sink);
      }
      factor[i] = part / (g.sum[i] * part + sink_part);
      if (lse != nullptr) lse[i] = top + __builtin_logf(g.sum[i] * part + sink_part);
      if (lse != nullptr && lse[i] == 0 && !modified && sink == -kInf) lse[i] = lone_score(g.i0 + i);
    }
    store_transposed(operands.out, b, seq + begin, head, end - begin, problem.head_dim_v, g.out + begin, kWidth,
                     factor + begin);
  }

  /// The rows whose weighted sum passed float's range though O itself may not. Sets references that make weights of sum
  /// 1/2.
  std::uint64_t prepare_again(RowGroup& g) const {
    std::uint64_t lanes = 0;
    for (int x = 0; x < kVectors; ++x) {
      Vec spread{};  // NaN where an element is not finite
      for (std::int64_t c = 0; c < problem.head_dim_v; ++c) {
        const Vec o = load(g.out + c * kWidth + x * kLanes);
        spread += o - o;
      }
      const Vec total = load(g.sum + x * kLanes);
      const IntVec lost = (spread != spread) & (total == total);
      if (__builtin_expect(!any(lost), 1)) continue;
      for (int i = 0; i < kLanes; ++i) {
        if (lost[i] != 0 && x * kLanes + i < g.rows) lanes |= std::uint64_t{1} << (x * kLanes + i);
      }
    }
    if (__builtin_expect(lanes == 0, 1)) return 0;
    for (std::int64_t i = 0; i < g.rows; ++i) {
      if (g.sum[i] > 0) g.reference[i] += (__builtin_logf(g.sum[i]) + kLn2) / natural();
    }
    clear(g);
    return lanes;
  }

  void run() {
    for (std::int64_t n = 0; n < count(); ++n) begin_group(n);
    sweep();
    std::uint64_t lost[kMostGroups], any_lost = 0;
    for (std::int64_t n = 0; n < count(); ++n) {
      write(groups[n], 0, groups[n].rows, true);
      any_lost |= lost[n] = prepare_again(groups[n]);
    }
    if (__builtin_expect(any_lost == 0, 1)) return;
    sweep();
    for (std::int64_t n = 0; n < count(); ++n) {
      for (std::int64_t i = 0; i < groups[n].rows; ++i) {
        if ((lost[n] >> i & 1) != 0) write(groups[n], i, i + 1, false);
      }
    }
  }
};

template <class Tiles>
std::size_t forward_workspace_bf16(const Problem& problem, int threads) {
  return sizeof(Queue) + static_cast<std::size_t>(threads) * ForwardPlan<Tiles>(problem, threads).bytes;
}

template <class Tiles>
void forward_bf16(const Problem& problem, const ForwardOperands& operands, const Launch& launch) {
  const ForwardPlan<Tiles> plan(problem, launch.threads);
  // Plain scores are scaled after they are masked, which only an ordinary, positive scale survives.
  const bool plain = !problem.score.modified() && problem.score.scale > 0x1p-60 && problem.score.scale < 0x1p60;
  auto* queue = static_cast<Queue*>(launch.workspace);
  queue->next = 0;
  write_outside_rows(problem, operands.out, operands.lse);
  const auto blocks = [&](const Sequence& s) { return ceil_div(s.q_length, plan.rows); };
  parallel(plan.threads, [&](int worker) {
    [[maybe_unused]] const typename Tiles::Scope scope;
    Scratch scratch;
    plan.carve(reinterpret_cast<char*>(queue + 1) + static_cast<std::size_t>(worker) * plan.bytes, &scratch);
    SequenceCursor cursor;
    for (;;) {
      const auto count = [&](const Sequence& s) { return blocks(s) * problem.heads_q; };
      const std::int64_t task = cursor.seek(problem, queue->pop(), count);
      if (task < 0) return;
      // Head by head, whose keys stay in the cache; its last rows first, the longest tasks under a causal mask.
      const Sequence& s = cursor.sequence;
      const std::int64_t i0 = (blocks(s) - 1 - task % blocks(s)) * plan.rows, rows = min_of(plan.rows, s.q_length - i0);
      ForwardTask<Tiles>{problem, operands, plan, scratch, s, cursor.b, task / blocks(s), i0, rows, !plain, {}}.run();
    }
  });
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
