// The decode: tasks from a queue, each a chunk of keys for up to 32 packed rows; whoever finishes the last chunk of
// some rows merges their partial results in key order.
#pragma once

#include "cpu/decode_dot.h"
#include "cpu/decode_score.h"
#include "cpu/parallel.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// The packed rows [first, first + count) of one sequence and KV head, and the keys that they see.
struct RowTask {
  Sequence sequence;
  std::int64_t b, kv_head, index;
  std::int64_t first, count;
  Interval visible;
};

inline RowTask row_task(const Decode& call, const Sequence& sequence, std::int64_t b, std::int64_t kv_head,
                        std::int64_t index) {
  const std::int64_t group = call.problem.group(), first = index * call.plan.task_rows;
  const std::int64_t count = min_of(call.plan.task_rows, sequence.q_length * group - first);
  return {sequence,
          b,
          kv_head,
          index,
          first,
          count,
          sequence.visible_to_any(first / group, (first + count - 1) / group + 1)};
}

/// The chunks that a sequence's rows see; one if they see no key, since somebody must write that.
inline Interval sequence_chunks(const Decode& call, const Sequence& sequence) {
  if (sequence.q_length == 0) return {0, 0};
  const Interval keys = sequence.visible_to_any(0, sequence.q_length);
  if (keys.size() == 0) return {0, 1};
  return {keys.begin / call.plan.chunk, ceil_div(keys.end, call.plan.chunk)};
}
inline std::int64_t sequence_row_tasks(const Decode& call, const Sequence& sequence) {
  return call.plan.task_rows > 0 ? ceil_div(sequence.q_length * call.problem.group(), call.plan.task_rows) : 0;
}

template <class Scores>
class Worker {
  using Store = typename Scores::Store;
  using Element = typename Store::Element;
  using Query = typename Scores::Query;

 public:
  Worker(const Decode& call, int index) : call_(call), scratch_(call.scratch(index)) {}

  /// The chunk's partial result. `next`: what this worker reads after it.
  void run(const RowTask& task, std::int64_t chunk, const Ahead& next) {
    float* m = call_.partial(task.sequence, task.b, task.kv_head, task.index, chunk);
    float *l = m + call_.plan.task_rows, *o = l + call_.plan.task_rows;
    RowState state[kTaskRows];
    const std::int64_t begin = max_of(task.visible.begin, chunk * call_.plan.chunk);
    const std::int64_t end = min_of(task.visible.end, (chunk + 1) * call_.plan.chunk);
    if (begin < end) {
      load_queries(task);
      __builtin_memset(o, 0, static_cast<std::size_t>(4 * task.count * call_.plan.dim_v));
      for (std::int64_t j0 = begin; j0 < end; j0 += kTileKeys) {
        const bool last = j0 + kTileKeys >= end;
        tile(task, j0, min_of(kTileKeys, end - j0), state, o, last ? next : keys_ahead(task, j0 + kTileKeys));
      }
    }
    for (std::int64_t r = 0; r < task.count; ++r) {
      m[r] = state[r].m;
      l[r] = state[r].l;
    }
  }

  /// The rows' results from the partial results of `chunks`.
  void merge(const RowTask& task, Interval chunks) const {
    const Problem& problem = call_.problem;
    const std::int64_t group = problem.group(), rows = call_.plan.task_rows, dim_v = call_.plan.dim_v;
    for (std::int64_t r = 0; r < task.count; ++r) {
      const std::int64_t i = (task.first + r) / group, head = task.kv_head * group + (task.first + r) % group;
      const auto part = [&](std::int64_t c) {
        return call_.partial(task.sequence, task.b, task.kv_head, task.index, c) + r;
      };
      const float sink = sink_of(problem, head);
      float m = sink;
      for (std::int64_t c = chunks.begin; c < chunks.end; ++c) m = max_of(m, *part(c));
      const float base = softmax_base(m);
      float l = exp_of(sink - base);
      for (std::int64_t x = 0; x < dim_v; x += kLanes) store(scratch_.row + x, Vec{});
      for (std::int64_t c = chunks.begin; c < chunks.end; ++c) {
        const float* p = part(c);
        if (p[rows] == 0) continue;  // no key: O was not written
        const float weight = exp_of(*p - base), *o = p - r + 2 * rows + r * dim_v;
        l += weight * p[rows];
        for (std::int64_t x = 0; x < dim_v; x += kLanes) {
          store(scratch_.row + x, load(scratch_.row + x) + weight * load(o + x));
        }
      }
      if (call_.x.lse) *call_.x.lse.row(task.b, head, task.sequence.q_row + i) = m + __builtin_logf(l);
      store_out(call_.x.out, task.b, task.sequence.q_row + i, head, l == 0 ? 1.0f : l);
    }
  }

  Ahead keys_ahead(const RowTask& task, std::int64_t j) const {
    const Tensor& k = call_.x.k;
    return {k.row(task.b, task.sequence.k_row + j, task.kv_head), k.stride_seq * dtype_size(k.dtype),
            call_.problem.head_dim * dtype_size(k.dtype)};
  }

 private:
  void load_queries(const RowTask& task) {
    if (task.b == loaded_b_ && task.kv_head == loaded_head_ && task.index == loaded_index_) return;
    loaded_b_ = task.b;
    loaded_head_ = task.kv_head;
    loaded_index_ = task.index;
    const std::int64_t group = call_.problem.group(), pitch = call_.plan.dim;
    Query* q = static_cast<Query*>(scratch_.q);
    for (std::int64_t r = 0; r < task.count; ++r) {
      Scores::load_query(q + r * pitch, pitch, call_.x.q, task.b, task.sequence.q_row + (task.first + r) / group,
                         task.kv_head * group + (task.first + r) % group, call_.problem.head_dim);
    }
    // Blocks of four rows: what fills the last one is computed and not used.
    for (std::int64_t x = task.count * pitch; x < round_up(task.count, 4) * pitch; ++x) q[x] = 0;
  }

  /// Keys [j0, j0 + keys) of the sequence.
  void tile(const RowTask& task, std::int64_t j0, std::int64_t keys, RowState* state, float* o, const Ahead& next) {
    const Tensor &k = call_.x.k, &v = call_.x.v;
    const std::int64_t row = task.sequence.k_row + j0, dim_v = call_.problem.head_dim_v;
    const Element* k_rows = row_as<Store>(k, task.b, row, task.kv_head);
    const Element* v_rows = row_as<Store>(v, task.b, row, task.kv_head);
    const Ahead ahead_k = keys_ahead(task, j0);
    const Ahead ahead_v{reinterpret_cast<const char*>(v_rows), v.stride_seq * dtype_size(v.dtype),
                        dim_v * dtype_size(v.dtype)};
    const auto ahead = [keys](std::int64_t j, const Ahead& same, const Ahead& after) {
      if (j + kStepKeys >= keys) return after;
      return Ahead{same.data + (j + kStepKeys) * same.stride, same.stride, same.bytes};
    };

    const float scale = static_cast<float>(call_.problem.score.scale);
    for (std::int64_t j = 0; j < keys; j += kStepKeys) {
      const std::int64_t n = min_of(kStepKeys, keys - j), pitch = call_.plan.dim;
      Ahead soon = ahead(j, ahead_k, ahead_v);
      for (std::int64_t r = 0; r < task.count; r += 4) {
        const Query* q = static_cast<const Query*>(scratch_.q) + r * pitch;
        float* s = scratch_.s + r * kScoreRow + j;
        const Element* from = k_rows + j * k.stride_seq;
        const std::int64_t dim = call_.problem.head_dim;
        switch (task.count - r) {
          case 1: score_block<Scores, 1>(from, k.stride_seq, n, q, pitch, dim, scale, s, soon); break;
          case 2: score_block<Scores, 2>(from, k.stride_seq, n, q, pitch, dim, scale, s, soon); break;
          default: score_block<Scores, 4>(from, k.stride_seq, n, q, pitch, dim, scale, s, soon); break;
        }
        soon.bytes = 0;
      }
    }

    Interval seen[kTaskRows];
    softmax(task, j0, keys, state, o, seen);

    for (std::int64_t j = 0; j < keys; j += kStepKeys) {
      Ahead soon = ahead(j, ahead_v, next);
      for (std::int64_t r = 0; r < task.count; r += 4) {
        values(v_rows, v.stride_seq, j, min_of(j + kStepKeys, keys), r, min_of<std::int64_t>(4, task.count - r),
               seen + r, o + r * call_.plan.dim_v, soon);
        soon.bytes = 0;
      }
    }
  }

  /// Scores become weights; O is rescaled where a row's maximum grew; seen[r]: the tile's keys that row r sees.
  void softmax(const RowTask& task, std::int64_t j0, std::int64_t keys, RowState* state, float* o, Interval* seen) {
    const Problem& problem = call_.problem;
    const std::int64_t group = problem.group();
    for (std::int64_t r = 0; r < task.count; ++r) {
      const std::int64_t i = (task.first + r) / group, head = task.kv_head * group + (task.first + r) % group;
      const Interval visible = task.sequence.visible(i);
      const std::int64_t begin = clamp_to<std::int64_t>(visible.begin - j0, 0, keys);
      const std::int64_t end = clamp_to<std::int64_t>(visible.end - j0, begin, keys);
      seen[r] = {begin, end};
      if (begin == end) continue;
      float *s = scratch_.s + r * kScoreRow, *row = o + r * call_.plan.dim_v;
      const bool modified = problem.score.modified();
      const HeadScore h = head_score(problem, task.sequence, task.b, head);
      if (modified) modify_row(h, s, i, j0, begin, end);
      const float factor = softmax_row(state[r], s, begin, end);
      if (factor != 1.0f) {
        for (std::int64_t x = 0; x < call_.plan.dim_v; x += kLanes) store(row + x, load(row + x) * factor);
      }
      if (problem.score.dropout.threshold != 0) drop_row(h, s, i, j0, begin, end);
    }
  }

  /// O += P V for up to four rows and the keys [j, end). A weight times an invisible value is never formed, since that
  /// may be NaN: keys that only some of the rows see go row by row.
  void values(const Element* v, std::int64_t stride, std::int64_t j, std::int64_t end, std::int64_t first,
              std::int64_t rows, const Interval* seen, float* o, const Ahead& ahead) const {
    Interval common{j, end};
    bool same = true;
    for (std::int64_t r = 0; r < rows; ++r) {
      common = {max_of(common.begin, seen[r].begin), min_of(common.end, seen[r].end)};
      same = same && seen[r].begin == seen[0].begin && seen[r].end == seen[0].end;
    }
    if (common.begin >= common.end) common = {end, end};
    const float* p = scratch_.s + first * kScoreRow;
    weigh(v, stride, common, rows, p, o, ahead);
    if (same) return;
    for (std::int64_t r = 0; r < rows; ++r) {
      const Interval before{max_of(j, seen[r].begin), min_of(common.begin, seen[r].end)};
      const Interval after{max_of(common.end, seen[r].begin), min_of(end, seen[r].end)};
      weigh(v, stride, before, 1, p + r * kScoreRow, o + r * call_.plan.dim_v, {});
      weigh(v, stride, after, 1, p + r * kScoreRow, o + r * call_.plan.dim_v, {});
    }
  }

  void weigh(const Element* v, std::int64_t stride, Interval keys, std::int64_t rows, const float* p, float* o,
             const Ahead& ahead) const {
    const std::int64_t count = keys.end - keys.begin, pitch = call_.plan.dim_v;
    if (count <= 0) return;
    const ValueColumns columns(call_.problem.head_dim_v);
    v += keys.begin * stride;
    p += keys.begin;
    switch (rows) {
      case 1: value_rows<Store, 1>(v, stride, columns, count, p, o, pitch, ahead); break;
      case 2: value_rows<Store, 2>(v, stride, columns, count, p, o, pitch, ahead); break;
      case 3: value_rows<Store, 3>(v, stride, columns, count, p, o, pitch, ahead); break;
      default: value_rows<Store, 4>(v, stride, columns, count, p, o, pitch, ahead); break;
    }
  }

  /// The merged row / l, to the output's type.
  void store_out(const Tensor& out, std::int64_t b, std::int64_t seq, std::int64_t head, float l) const {
    const ValueColumns columns(call_.problem.head_dim_v);
    with_storage(
        out.dtype, [&](auto storage) __attribute__((always_inline)) {
          using Out = decltype(storage);
          auto* row = writable_row_as<Out>(out, b, seq, head);
          for (std::int64_t n = 0; n < columns.vectors; ++n) {
            const Vec x = load(scratch_.row + n * kLanes) / l;
            if (columns.dim_v < kLanes) {
              store_part<Out>(row, x, columns.dim_v);
            } else {
              store_from_float<Out>(row + columns.at(n), x);
            }
          }
        });
  }

  const Decode& call_;
  DecodeScratch scratch_;
  std::int64_t loaded_b_ = -1, loaded_head_ = -1, loaded_index_ = -1;
};

/// Zeros and -inf in the rows outside every sequence.
inline void clear_outside(const Decode& call) {
  const Problem& problem = call.problem;
  const bool packed = problem.mask.varlen;
  const auto clear = [&](std::int64_t b, std::int64_t begin, std::int64_t end) {
    for (std::int64_t head = 0; head < problem.heads_q && begin < end; ++head) {
      clear_rows(call.x.out, b, begin, head, end - begin, problem.head_dim_v);
      if (!call.x.lse) continue;
      for (std::int64_t i = begin; i < end; ++i) *call.x.lse.row(b, head, i) = -kInf;
    }
  };
  std::int64_t done = 0;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const Sequence sequence = problem.sequence(b);
    if (packed) {
      clear(0, done, sequence.q_row);
      done = max_of(done, sequence.q_row + sequence.q_length);
    } else {
      clear(b, sequence.q_length, problem.seq_q);
    }
  }
  if (packed) clear(0, done, problem.total_q);
}

/// Numbers the tasks of all items, and counts what is left of each.
inline void prepare(const Decode& call) {
  std::int64_t tasks = 0;
  for (std::int64_t b = 0; b < call.problem.batch; ++b) {
    const Sequence sequence = call.problem.sequence(b);
    const std::int64_t chunks = sequence_chunks(call, sequence).size(), row_tasks = sequence_row_tasks(call, sequence);
    call.first_task()[b] = tasks;
    tasks += chunks * row_tasks * call.problem.heads_kv;
    for (std::int64_t n = 0; n < call.problem.heads_kv * call.plan.row_tasks; ++n) {
      call.left(b, 0, 0)[n] = static_cast<std::int32_t>(chunks);
    }
  }
  call.first_task()[call.problem.batch] = tasks;
}

/// Walks the tasks in order from any number.
class Cursor {
 public:
  Cursor(const Decode& call, std::int64_t task)
      : call_(call), heads_inside_(call.x.k.stride_head < call.x.k.stride_seq) {
    std::int64_t lo = 0, hi = call.problem.batch;  // the item whose tasks include `task`
    while (hi - lo > 1) {
      const std::int64_t middle = (lo + hi) / 2;
      (call.first_task()[middle] <= task ? lo : hi) = middle;
    }
    b_ = lo - 1;
    next_item();
    number_ = task - call.first_task()[b_];
    locate();
  }
  void advance() {
    ++number_;
    while (number_ >= call_.first_task()[b_ + 1] - call_.first_task()[b_] && b_ + 1 < call_.problem.batch) {
      next_item();
      number_ = 0;
    }
    if (number_ < call_.first_task()[b_ + 1] - call_.first_task()[b_]) locate();
  }

  const RowTask& rows() const { return rows_; }
  std::int64_t chunk() const { return chunk_; }
  Interval chunks() const { return chunks_; }

 private:
  void next_item() {
    ++b_;
    sequence_ = call_.problem.sequence(b_);
    chunks_ = sequence_chunks(call_, sequence_);
    row_tasks_ = sequence_row_tasks(call_, sequence_);
  }
  /// Neighbours in memory are neighbours in order: heads inside a chunk if a key's heads lie side by side.
  void locate() {
    const std::int64_t heads = call_.problem.heads_kv, n = number_ / row_tasks_;
    const std::int64_t head = heads_inside_ ? n % heads : n / chunks_.size();
    chunk_ = chunks_.begin + (heads_inside_ ? n / heads : n % chunks_.size());
    rows_ = row_task(call_, sequence_, b_, head, number_ % row_tasks_);
  }

  const Decode& call_;
  bool heads_inside_;
  Sequence sequence_;
  Interval chunks_;
  std::int64_t b_ = 0, row_tasks_ = 0, number_ = 0, chunk_ = 0;
  RowTask rows_{};
};

template <class Scores>
void run_decode(const Problem& problem, const ForwardOperands& operands, const Launch& launch) {
  const Decode call{problem, operands, plan_decode(problem, launch.threads), static_cast<char*>(launch.workspace)};
  clear_outside(call);
  if (problem.batch == 0) return;
  prepare(call);
  const std::int64_t tasks = call.first_task()[problem.batch];
  std::int64_t next = 0;
  parallel(call.plan.workers, [&](int index) {
    Worker<Scores> worker(call, index);
    for (;;) {
      // Long runs first, since neighbouring tasks are neighbours in memory; short ones at the end, to finish together.
      std::int64_t first = __atomic_load_n(&next, __ATOMIC_RELAXED), count;
      do {
        count = max_of<std::int64_t>(1, (tasks - first) / (4 * call.plan.workers));
        if (first >= tasks) return;
      } while (!__atomic_compare_exchange_n(&next, &first, first + count, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
      Cursor cursor(call, first);
      for (std::int64_t n = 0; n < count; ++n) {
        const Cursor here = cursor;
        Ahead ahead;
        if (n + 1 < count) {
          cursor.advance();
          ahead =
              worker.keys_ahead(cursor.rows(), max_of(cursor.rows().visible.begin, cursor.chunk() * call.plan.chunk));
        }
        const RowTask& rows = here.rows();
        worker.run(rows, here.chunk(), ahead);
        if (__atomic_sub_fetch(call.left(rows.b, rows.kv_head, rows.index), 1, __ATOMIC_ACQ_REL) == 0) {
          worker.merge(rows, here.chunks());
        }
      }
    }
  });
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
