// The decode: tasks from a queue, each a chunk of keys for up to 32 packed rows; whoever finishes the last chunk of
// some rows merges their partial results in key order.
#pragma once

#include "cpu/decode_dot.h"
#include "cpu/decode_score.h"
#include "cpu/parallel.h"
#include "cpu/tasks.h"

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

template <class Products>
class Worker {
  using Store = typename Products::Store;
  using Element = typename Store::Element;
  using Query = typename Products::Query;

 public:
  Worker(const Decode& call, int index)
      : call_(call),
        scratch_(call.scratch(index)),
        scale_(static_cast<float>(call.problem.score.scale)),
        in_pairs_(Products::kPairs && call.x.out.dtype != DType::f32) {}

  /// The chunk's partial result. `next`: the keys that this worker reads after it.
  void run(const RowTask& task, std::int64_t chunk, const Rows& next) {
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
        const Rows after = last ? next : rows_of(call_.x.k, task, j0 + kTileKeys, call_.problem.head_dim);
        tile(task, j0, min_of(kTileKeys, end - j0), state, o, after);
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

  /// The task's keys, or values, from key j on.
  static Rows rows_of(const Tensor& t, const RowTask& task, std::int64_t j, std::int64_t dim) {
    return {t.row(task.b, task.sequence.k_row + j, task.kv_head), t.stride_seq * dtype_size(t.dtype),
            dim * dtype_size(t.dtype)};
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
      Products::load_query(q + r * pitch, pitch, call_.x.q, task.b, task.sequence.q_row + (task.first + r) / group,
                           task.kv_head * group + (task.first + r) % group, call_.problem.head_dim);
    }
    // Blocks of four rows: what fills the last one is computed and not used.
    for (std::int64_t x = task.count * pitch; x < round_up(task.count, 4) * pitch; ++x) q[x] = 0;
  }

  /// Keys [j0, j0 + keys) of the sequence. `next`: the keys read after this tile's values.
  void tile(const RowTask& task, std::int64_t j0, std::int64_t keys, RowState* state, float* o, const Rows& next) {
    const Rows k = rows_of(call_.x.k, task, j0, call_.problem.head_dim);
    const Rows v = rows_of(call_.x.v, task, j0, call_.problem.head_dim_v);
    k_ = reinterpret_cast<const Element*>(k.data);
    v_ = reinterpret_cast<const Element*>(v.data);
    Interval seen[kTaskRows], common{0, keys};
    for (std::int64_t r = 0; r < task.count; ++r) {
      const Interval visible = task.sequence.visible((task.first + r) / call_.problem.group());
      seen[r].begin = clamp_to<std::int64_t>(visible.begin - j0, 0, keys);
      seen[r].end = clamp_to<std::int64_t>(visible.end - j0, seen[r].begin, keys);
      common = {max_of(common.begin, seen[r].begin), min_of(common.end, seen[r].end)};
    }
    const std::int64_t run = max_of<std::int64_t>(common.end - common.begin, 0) / kStepKeys * kStepRun;
    const KeyRuns runs{common.begin, run, run};
    const Interval whole{common.begin, common.begin + kRuns * run};  // by runs; before and after them key by key

    // A few keys at a time for all rows, so that they are read from memory once.
    const auto outside = [&](auto&& step) {
      for (std::int64_t j = 0; j < whole.begin; j += kStepKeys) step(j, min_of(j + kStepKeys, whole.begin));
      for (std::int64_t j = whole.end; j < keys; j += kStepKeys) step(j, min_of(j + kStepKeys, keys));
    };
    // Before the runs, since it writes a few scores more than it was asked for.
    outside([&](std::int64_t j, std::int64_t end) {
      for (std::int64_t r = 0; r < task.count; r += 4) {
        with_rows(task.count - r, [&](auto rows) { key_scores<decltype(rows)::value>(r, j, end - j); });
      }
    });
    const Ahead ahead_k(k, v, Ahead::kNearKeys, runs), ahead_v(v, next, Ahead::kNearValues, runs);
    for (std::int64_t j = 0; j < run; j += kStepRun) {
      for (std::int64_t r = 0; r < task.count; r += 4) {
        with_rows(task.count - r, [&](auto rows) {
          run_scores<decltype(rows)::value>(r, runs, runs.first + j, r == 0 ? ahead_k : Ahead());
        });
      }
    }

    softmax(task, j0, seen, state, o);

    const std::int64_t blocks = ceil_div(task.count, kValueRows);
    const auto rows_of_block = [&](std::int64_t block) { return min_of(kValueRows, task.count - block * kValueRows); };
    if constexpr (Products::kPairs) {
      for (std::int64_t r = 0; r < task.count && in_pairs_ && run > 0; ++r) {
        Products::pack_weights(scratch_.s + r * kScoreRow, runs, scratch_.pairs + r * (kTileKeys / 2));
      }
    }
    for (std::int64_t j = 0; j < run; j += kStepRun) {
      for (std::int64_t block = 0; block < blocks; ++block) {
        const int pass = blocks == 1 ? -1 : block == 0 ? 0 : 1;
        run_values(runs, runs.first + j, block * kValueRows, rows_of_block(block), o, block < 2 ? ahead_v : Ahead(),
                   pass);
      }
    }
    outside([&](std::int64_t j, std::int64_t end) {
      for (std::int64_t block = 0; block < blocks; ++block) {
        key_values(j, end, block * kValueRows, rows_of_block(block), seen, o);
      }
    });
  }

  /// Scores are computed for 1, 2 or 4 rows; a block of three has a row of zeros.
  template <class F>
  static void with_rows(std::int64_t rows, F&& f) {
    rows == 1 ? f(Size<1>{}) : rows == 2 ? f(Size<2>{}) : f(Size<4>{});
  }
  template <int kR>
  void run_scores(std::int64_t r, const KeyRuns& runs, std::int64_t j, const Ahead& ahead) const {
    score_runs<Products, kR>(k_, call_.x.k.stride_seq, runs, j, query(r), call_.plan.dim, call_.problem.head_dim,
                             scale_, scratch_.s + r * kScoreRow, ahead);
  }
  template <int kR>
  void key_scores(std::int64_t r, std::int64_t j, std::int64_t keys) const {
    score_keys<Products, kR>(k_ + j * call_.x.k.stride_seq, call_.x.k.stride_seq, keys, query(r), call_.plan.dim,
                             call_.problem.head_dim, scale_, scratch_.s + r * kScoreRow + j);
  }
  const Query* query(std::int64_t r) const { return static_cast<const Query*>(scratch_.q) + r * call_.plan.dim; }

  /// Scores of the keys that a row sees become weights; O is rescaled where a row's maximum grew.
  void softmax(const RowTask& task, std::int64_t j0, const Interval* seen, RowState* state, float* o) {
    const Problem& problem = call_.problem;
    const std::int64_t group = problem.group();
    for (std::int64_t r = 0; r < task.count; ++r) {
      if (seen[r].size() == 0) continue;
      const std::int64_t i = (task.first + r) / group, head = task.kv_head * group + (task.first + r) % group;
      float *s = scratch_.s + r * kScoreRow, *row = o + r * call_.plan.dim_v;
      const HeadScore h = head_score(problem, task.sequence, task.b, head);
      if (problem.score.modified()) modify_row(h, s, i, j0, seen[r].begin, seen[r].end);
      const float factor = softmax_row(state[r], s, seen[r].begin, seen[r].end);
      if (factor != 1.0f) {
        for (std::int64_t x = 0; x < call_.plan.dim_v; x += kLanes) store(row + x, load(row + x) * factor);
      }
      if (problem.score.dropout.threshold != 0) drop_row(h, s, i, j0, seen[r].begin, seen[r].end);
    }
  }

  /// O += P V for a block of rows and the keys [j, j + kStepRun) of each run.
  void run_values(KeyRuns runs, std::int64_t j, std::int64_t r, std::int64_t rows, float* o, const Ahead& ahead,
                  int pass) const {
    with_value_rows(rows, [&](auto count) {
      constexpr int kR = decltype(count)::value;
      const Tensor& v = call_.x.v;
      const std::int64_t pitch = call_.plan.dim_v, dim_v = call_.problem.head_dim_v;
      std::int64_t done = 0;
      if constexpr (Products::kPairs) {
        if (in_pairs_) {
          const std::uint32_t* pairs = scratch_.pairs + r * (kTileKeys / 2);
          done =
              Products::template values<kR>(v_, v.stride_seq, dim_v, runs, j, pairs, o + r * pitch, pitch, ahead, pass);
        }
      }
      runs.first = j;
      runs.keys = kStepRun;
      value_rows<Store, kR>(v_, v.stride_seq, ValueColumns(dim_v), runs, scratch_.s + r * kScoreRow, o + r * pitch,
                            pitch, ahead, pass, done);
    });
  }
  template <class F>
  static void with_value_rows(std::int64_t rows, F&& f) {
    rows == 1 ? f(Size<1>{}) : f(Size<kValueRows>{});
  }

  /// O += P V for a block of rows and the keys [j, end). A weight times an invisible value is never formed, since that
  /// may be NaN: keys that only some of the rows see go row by row.
  void key_values(std::int64_t j, std::int64_t end, std::int64_t r, std::int64_t rows, const Interval* seen,
                  float* o) const {
    Interval common{j, end};
    bool same = true;
    for (std::int64_t x = r; x < r + rows; ++x) {
      common = {max_of(common.begin, seen[x].begin), min_of(common.end, seen[x].end)};
      same = same && seen[x].begin == seen[r].begin && seen[x].end == seen[r].end;
    }
    if (common.begin >= common.end) common = {end, end};
    const auto part = [&](std::int64_t first, std::int64_t last, std::int64_t row, std::int64_t row_count) {
      if (first >= last) return;
      with_value_rows(row_count, [&](auto count) {
        const std::int64_t pitch = call_.plan.dim_v;
        value_rows<Store, decltype(count)::value>(v_, call_.x.v.stride_seq, ValueColumns(call_.problem.head_dim_v),
                                                  {first, last - first, 0, 1}, scratch_.s + row * kScoreRow,
                                                  o + row * pitch, pitch, {}, 1);
      });
    };
    part(common.begin, common.end, r, rows);
    for (std::int64_t x = r; x < r + rows && !same; ++x) {
      part(max_of(j, seen[x].begin), min_of(common.begin, seen[x].end), x, 1);
      part(max_of(common.end, seen[x].begin), min_of(end, seen[x].end), x, 1);
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
  float scale_;
  bool in_pairs_;                              // P V from rounded weights
  const Element *k_ = nullptr, *v_ = nullptr;  // the tile's rows
  std::int64_t loaded_b_ = -1, loaded_head_ = -1, loaded_index_ = -1;
};

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

template <class Products>
void run_decode(const Problem& problem, const ForwardOperands& operands, const Launch& launch) {
  const Decode call{problem, operands, plan_decode(problem, launch.threads), static_cast<char*>(launch.workspace)};
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
        if (__atomic_sub_fetch(call.left(rows.b, rows.kv_head, rows.index), 1, __ATOMIC_ACQ_REL) == 0) {
          worker.merge(rows, here.chunks());
        }
      }
    }
  });
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
