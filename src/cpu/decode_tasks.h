// The decode: tasks from a queue, each a chunk of keys for up to 32 packed rows; whoever finishes the last chunk of
// some rows merges their partial results in key order.
#pragma once

#include "cpu/decode_tile.h"
#include "cpu/parallel.h"
#include "cpu/tasks.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

inline RowTask row_task(const Decode& call, const Sequence& sequence, std::int64_t b, std::int64_t kv_head,
                        std::int64_t index) {
  const std::int64_t group = call.problem.group(), first = index * call.plan.task_rows;
  const std::int64_t heads = min_of(call.heads, call.problem.heads_kv - kv_head);
  const std::int64_t count = min_of(call.plan.task_rows, sequence.q_length * group - first);
  const Interval visible = sequence.visible_to_any(first / group, (first + count - 1) / group + 1);
  return {sequence, b, kv_head, heads, index, first, count, visible};
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

/// The row in `from`, divided by l, to the output's type.
inline void store_out(const Tensor& out, std::int64_t b, std::int64_t seq, std::int64_t head, std::int64_t dim_v,
                      const float* from, float l) {
  const ValueColumns columns(dim_v);
  with_storage(
      out.dtype, [&](auto storage) __attribute__((always_inline)) {
        using Out = decltype(storage);
        auto* row = writable_row_as<Out>(out, b, seq, head);
        for (std::int64_t n = 0; n < columns.vectors; ++n) {
          const Vec x = load(from + n * kLanes) / l;
          if (dim_v < kLanes) {
            store_part<Out>(row, x, dim_v);
          } else {
            store_from_float<Out>(row + columns.at(n), x);
          }
        }
      });
}

/// Results of KV head h of the task from the partial results of `chunks`, in the order of keys. row: dim_v floats.
inline void merge(const Decode& call, const RowTask& task, std::int64_t h, Interval all_chunks, float* row) {
  const Problem& problem = call.problem;
  const std::int64_t group = problem.group(), rows = call.plan.task_rows, dim_v = call.plan.dim_v;
  for (std::int64_t r = 0; r < task.count; ++r) {
    const std::int64_t seq = task.sequence.q_row + task.query_row(group, r), head = task.query_head(group, h, r);
    const auto part = [&](std::int64_t c) {
      return call.partial(task.sequence, task.b, task.kv_head + h, task.index, c) + r;
    };
    const bool empty =
        problem.score.bias && is_empty_row(problem, task.sequence, task.b, head, task.query_row(group, r));
    const Interval chunks = empty ? Interval{} : all_chunks;
    const float sink = sink_of(problem, head);
    float m = sink;
    for (std::int64_t c = chunks.begin; c < chunks.end; ++c) m = max_of(m, *part(c));
    const float base = softmax_base(m);
    float l = exp_of(sink - base);
    for (std::int64_t x = 0; x < dim_v; x += kLanes) store(row + x, Vec{});
    for (std::int64_t c = chunks.begin; c < chunks.end; ++c) {
      const float* p = part(c);
      if (p[rows] == 0) continue;  // no key: O was not written
      const float weight = exp_of(*p - base), *o = p - r + 2 * rows + r * dim_v;
      l += weight * p[rows];
      for (std::int64_t x = 0; x < dim_v; x += kLanes) store(row + x, load(row + x) + weight * load(o + x));
    }
    if (call.x.lse) *call.x.lse.row(task.b, head, seq) = m + __builtin_logf(l);
    store_out(call.x.out, task.b, seq, head, problem.head_dim_v, row, l == 0 ? 1.0f : l);
  }
}

/// Numbers the tasks of all items, and counts what is left of each.
inline void prepare(const Decode& call) {
  std::int64_t tasks = 0;
  for (std::int64_t b = 0; b < call.problem.batch; ++b) {
    const Sequence sequence = call.problem.sequence(b);
    const std::int64_t chunks = sequence_chunks(call, sequence).size(), row_tasks = sequence_row_tasks(call, sequence);
    call.first_task()[b] = tasks;
    tasks += chunks * row_tasks * ceil_div(call.problem.heads_kv, call.heads);
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
    const std::int64_t blocks = ceil_div(call_.problem.heads_kv, call_.heads), n = number_ / row_tasks_;
    const std::int64_t block = heads_inside_ ? n % blocks : n / chunks_.size();
    chunk_ = chunks_.begin + (heads_inside_ ? n / blocks : n % chunks_.size());
    rows_ = row_task(call_, sequence_, b_, block * call_.heads, number_ % row_tasks_);
  }

  const Decode& call_;
  bool heads_inside_;
  Sequence sequence_;
  Interval chunks_;
  std::int64_t b_ = 0, row_tasks_ = 0, number_ = 0, chunk_ = 0;
  RowTask rows_{};
};

template <class Products>
void run_decode(const Problem& problem, const ForwardOperands& operands, const Launch& launch) {
  const Decode call = make_decode(problem, operands, launch);
  write_outside_rows(problem, operands.out, operands.lse);
  if (problem.batch == 0) return;
  prepare(call);
  const std::int64_t tasks = call.first_task()[problem.batch];
  std::int64_t next = 0;
  parallel(call.plan.workers, [&](int index) {
    Worker<Products> worker(call, index);
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
        Rows after;
        if (n + 1 < count) {
          cursor.advance();
          const std::int64_t j = max_of(cursor.rows().visible.begin, cursor.chunk() * call.plan.chunk);
          after = worker.rows_of(operands.k, cursor.rows(), j, problem.head_dim);
        }
        const RowTask& rows = here.rows();
        worker.run(rows, here.chunk(), after);
        for (std::int64_t h = 0; h < rows.heads; ++h) {
          std::int32_t* left = call.left(rows.b, rows.kv_head + h, rows.index);
          if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) == 0)
            merge(call, rows, h, here.chunks(), worker.row_scratch());
        }
      }
    }
  });
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
