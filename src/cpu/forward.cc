// The float32 forward: FlashAttention-2 (Dao 2023, algorithm 1) over tiles that fit the caches. A task is a block of
// query rows of one head; it sweeps the keys that its rows see once, in blocks, for all its row groups.
#include "cpu/forward_tile.h"
#include "cpu/kernel.h"
#include "cpu/pack.h"
#include "cpu/parallel.h"
#include "cpu/tasks.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Memory of one worker.
struct Scratch {
  float *q_t, *out_t;  // [groups][dim][kWidth]
  float* s;            // [kBlockK][kWidth]
  float *m, *l;        // [rows]
  float *k, *v;        // [kBlockK][dim rounded up to kLanes], where storage is not float32
};

struct Plan {
  std::int64_t rows;  // query rows of a task, whole groups
  bool widen;
  std::int64_t k_row, v_row;  // pitch of widened rows
  std::size_t bytes;          // of one worker

  explicit Plan(const Problem& p, int threads) {
    // Q^T and O^T of a task take up to 256 KB of the second-level cache.
    const std::int64_t dim = max_of<std::int64_t>(max_of(p.head_dim, p.head_dim_v), 1);
    rows = clamp_to<std::int64_t>(32768 / dim, kWidth, 256) / kWidth * kWidth;
    // Enough tasks for all threads to end together, as far as row groups go.
    const std::int64_t heads = max_of<std::int64_t>(p.batch * p.heads_q, 1);
    while (rows > kWidth && heads * ceil_div(p.seq_q, rows) < 4 * threads) rows = round_up(rows / 2, kWidth);
    rows = min_of(rows, round_up(max_of<std::int64_t>(p.seq_q, 1), kWidth));
    widen = p.dtype != DType::f32;
    k_row = round_up(p.head_dim, kLanes);
    v_row = round_up(p.head_dim_v, kLanes);
    Scratch unused;
    bytes = carve(p, nullptr, &unused);
  }

  std::size_t carve(const Problem& p, char* base, Scratch* s) const {
    std::size_t used = 0;
    const auto take = [&](std::int64_t count) {
      float* at = base == nullptr ? nullptr : reinterpret_cast<float*>(base + used);
      used += static_cast<std::size_t>(round_up(count * 4, 64));
      return at;
    };
    s->q_t = take(rows * p.head_dim);
    s->out_t = take(rows * p.head_dim_v);
    s->s = take(kBlockK * kWidth);
    s->m = take(rows);
    s->l = take(rows);
    s->k = take(widen ? kBlockK * k_row : 0);
    s->v = take(widen ? kBlockK * v_row : 0);
    return used;
  }
};

struct Call {
  const Problem& problem;
  const ForwardOperands& operands;
  Plan plan;
  bool modified;
  Units units;
};

/// Keys [j0, j0 + keys) of a KV head, in place or widened.
KeyBlock key_block(const Call& call, const Scratch& t, const Sequence& sequence, std::int64_t b, std::int64_t kv_head,
                   std::int64_t j0, std::int64_t keys) {
  const Problem& p = call.problem;
  const Tensor &k = call.operands.k, &v = call.operands.v;
  const std::int64_t row = sequence.k_row + j0;
  if (!call.plan.widen) {
    return {j0,
            keys,
            row_as<StoreF32>(k, b, row, kv_head),
            row_as<StoreF32>(v, b, row, kv_head),
            k.stride_seq,
            v.stride_seq,
            p.head_dim,
            p.head_dim_v};
  }
  widen_rows(t.k, call.plan.k_row, k, b, row, kv_head, keys, p.head_dim);
  widen_rows(t.v, call.plan.v_row, v, b, row, kv_head, keys, p.head_dim_v);
  return {j0, keys, t.k, t.v, call.plan.k_row, call.plan.v_row, p.head_dim, p.head_dim_v};
}

template <bool kModified>
ONEPASS_INLINE void attend(RowGroup& g, const KeyBlock& block, const HeadScore& h, const Units& units, float* s) {
  // Fewer vectors where the group has few rows: decode-like calls, tails.
  const std::int64_t vectors = ceil_div(g.rows, kLanes);
  static_assert(kVectors == 2 || kVectors == 4);
  if (vectors == 1) return attend_block<1, kModified>(g, block, h, units, s);
  if (kVectors == 2 || vectors > 3) return attend_block<kVectors, kModified>(g, block, h, units, s);
  if (vectors == 2) return attend_block<2, kModified>(g, block, h, units, s);
  return attend_block<3, kModified>(g, block, h, units, s);
}

/// Lines 12 to 15: O = O / l, LSE = m + log l, with the sink as one more logit of the row that carries no value.
void finish_group(const Call& call, const Sequence& sequence, const RowGroup& g, std::int64_t b, std::int64_t head) {
  const Problem& p = call.problem;
  const std::int64_t seq = sequence.q_row + g.i0;
  const Vec sink = broadcast(sink_of(p, head));
  alignas(64) float factor[kWidth];
  for (std::int64_t i = 0; i < g.rows; i += kLanes) {
    const Vec l = g.fresh ? Vec{} : load(g.l + i), m = load(g.m + i) * call.units.natural, top = max(sink, m);
    const Vec reference = select(top == -kInf, Vec{}, top);
    const Vec part = exp(m - reference), total = l * part + exp(sink - reference);
    IntVec empty = g.fresh ? IntVec{} == 0 : total == 0.0f;
    for (int lane = 0; p.score.bias && lane < min_of<std::int64_t>(kLanes, g.rows - i); ++lane) {
      if (is_empty_row(p, sequence, b, head, g.i0 + i + lane)) empty[lane] = -1;
    }
    store(factor + i, select(empty, Vec{}, part / total));
    if (call.operands.lse) {
      float* lse = call.operands.lse.row(b, head, seq + i);
      const Vec value = select(empty, sink, reference + log(total));
      if (i + kLanes <= g.rows) {
        store(lse, value);
      } else {
        store_part<StoreF32>(lse, value, g.rows - i);
      }
    }
    if (any(empty)) {  // exactly 0, whatever is in memory or in V
      for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
        float* out = g.out_t + c * kWidth + i;
        store(out, select(empty, Vec{}, load(out)));
      }
    }
  }
  store_transposed(call.operands.out, b, seq, head, g.rows, p.head_dim_v, g.out_t, kWidth, factor);
}

/// Query rows [i0, i0 + rows) of one head: one turn of the algorithm's outer loop, for several groups at once, so that
/// a key block is used several times while it is in the cache.
void run_task(const Call& call, const Scratch& t, const Sequence& sequence, std::int64_t b, std::int64_t head,
              std::int64_t i0, std::int64_t rows) {
  const Problem& p = call.problem;
  const HeadScore h = head_score(p, sequence, b, head);
  RowGroup groups[256 / kWidth];
  const Interval seen = sequence.visible_to_any(i0, i0 + rows);
  const std::int64_t count = ceil_div(rows, kWidth);
  // Lines 4 and 5: Q; O = 0, l = 0 (as `fresh`), m = -inf.
  for (std::int64_t n = 0; n < count; ++n) {
    RowGroup& g = groups[n];
    g.i0 = i0 + n * kWidth;
    g.rows = min_of<std::int64_t>(kWidth, rows - n * kWidth);
    g.any = sequence.visible_to_any(g.i0, g.i0 + g.rows);
    g.all = sequence.visible_to_all(g.i0, g.i0 + g.rows);
    float* q_t = t.q_t + n * kWidth * p.head_dim;
    g.q_t = q_t;
    g.out_t = t.out_t + n * kWidth * p.head_dim_v;
    g.m = t.m + n * kWidth;
    g.l = t.l + n * kWidth;
    g.fresh = true;
    load_transposed(q_t, kWidth, round_up(g.rows, kLanes), call.operands.q, b, sequence.q_row + g.i0, head, g.rows,
                    p.head_dim, call.units.q_factor);
    for (int v = 0; v < kVectors; ++v) store(g.m + v * kLanes, broadcast(-kInf));
  }
  // Lines 6 and 7. Blocks lie at multiples of kBlockK, whatever the task's rows see, so that a row's sums do not depend
  // on its task.
  for (std::int64_t j0 = seen.begin / kBlockK * kBlockK; j0 < seen.end; j0 += kBlockK) {
    const std::int64_t begin = max_of(j0, seen.begin), end = min_of(j0 + kBlockK, seen.end);
    const KeyBlock block = key_block(call, t, sequence, b, p.kv_head(head), begin, end - begin);
    for (std::int64_t n = 0; n < count; ++n) {
      RowGroup& g = groups[n];
      KeyBlock part = block;  // what this group sees of it
      part.j0 = max_of(begin, g.any.begin);
      part.keys = min_of(end, g.any.end) - part.j0;
      if (part.keys <= 0) continue;
      // Once for all groups; widened rows are read in order before.
      if (n == 0 && !call.plan.widen) part.ahead = seen.end - kBlockK - part.j0;
      part.k += (part.j0 - begin) * block.k_row;
      part.v += (part.j0 - begin) * block.v_row;
      if (call.modified) {
        attend<true>(g, part, h, call.units, t.s);
      } else {
        attend<false>(g, part, h, call.units, t.s);
      }
    }
  }
  for (std::int64_t n = 0; n < count; ++n) finish_group(call, sequence, groups[n], b, head);
}

}  // namespace

std::size_t forward_workspace(const Problem& problem, int threads) {
  return 64 + static_cast<std::size_t>(threads) * Plan(problem, threads).bytes;
}

void forward(const Problem& problem, const ForwardOperands& operands, const Launch& launch) {
  const Call call{problem, operands, Plan(problem, launch.threads), problem.score.modified(), Units(problem.score)};
  auto* queue = static_cast<Queue*>(launch.workspace);
  queue->next = 0;
  write_outside_rows(problem, operands.out, operands.lse);
  const auto blocks = [&](const Sequence& s) { return ceil_div(s.q_length, call.plan.rows); };
  // Threads that would get less than about 20 microseconds of work cost more than they bring.
  const double work = static_cast<double>(problem.batch * problem.heads_q) * static_cast<double>(problem.seq_q) *
                      static_cast<double>(problem.seq_k) * static_cast<double>(problem.head_dim + problem.head_dim_v);
  const double useful = 1 + work / (65536.0 * kLanes);
  const int threads = useful < launch.threads ? static_cast<int>(useful) : launch.threads;
  parallel(threads, [&](int worker) {
    Scratch t;
    call.plan.carve(problem,
                    static_cast<char*>(launch.workspace) + 64 + static_cast<std::size_t>(worker) * call.plan.bytes, &t);
    SequenceCursor cursor;
    for (;;) {
      const std::int64_t task =
          cursor.seek(problem, queue->pop(), [&](const Sequence& s) { return blocks(s) * problem.heads_q; });
      if (task < 0) return;
      // Head by head, whose keys stay in the cache; its last rows first, the longest tasks under a causal mask.
      const std::int64_t count = blocks(cursor.sequence), head = task / count;
      const std::int64_t i0 = (count - 1 - task % count) * call.plan.rows;
      run_task(call, t, cursor.sequence, cursor.b, head, i0, min_of(call.plan.rows, cursor.sequence.q_length - i0));
    }
  });
}

}  // namespace onepass::cpu::ONEPASS_ISA
