// The decode's task: a chunk of keys for the packed rows of one or several KV heads, tile by tile.
#pragma once

#include "cpu/decode_dot.h"
#include "cpu/decode_score.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// The packed rows [first, first + count) of one sequence and the KV heads [kv_head, kv_head + heads), and the keys
/// that they see.
struct RowTask {
  Sequence sequence;
  std::int64_t b, kv_head, heads, index;
  std::int64_t first, count;
  Interval visible;

  /// Query row and head of packed row r of KV head h of the task.
  ONEPASS_INLINE std::int64_t query_row(std::int64_t group, std::int64_t r) const { return (first + r) / group; }
  ONEPASS_INLINE std::int64_t query_head(std::int64_t group, std::int64_t h, std::int64_t r) const {
    return (kv_head + h) * group + (first + r) % group;
  }
};

template <class Products>
class Worker {
  using Store = typename Products::Store;
  using Element = typename Store::Element;
  using Query = typename Products::Query;

 public:
  Worker(const Decode& call, int index)
      : call_(call),
        scratch_(call.scratch(index)),
        group_(call.problem.group()),
        scale_(static_cast<float>(call.problem.score.scale)),
        in_pairs_(Products::kPairs && call.x.out.dtype != DType::f32) {}

  /// The chunk's partial result. `next`: the keys that this worker reads after it.
  void run(const RowTask& task, std::int64_t chunk, const Rows& next) {
    RowState state[kTaskRows];
    const std::int64_t begin = max_of(task.visible.begin, chunk * call_.plan.chunk);
    const std::int64_t end = min_of(task.visible.end, (chunk + 1) * call_.plan.chunk);
    for (std::int64_t h = 0; h < task.heads; ++h) {
      o_[h] = call_.partial(task.sequence, task.b, task.kv_head + h, task.index, chunk) + 2 * call_.plan.task_rows;
      if (begin < end) __builtin_memset(o_[h], 0, static_cast<std::size_t>(4 * task.count * call_.plan.dim_v));
    }
    if (begin < end) load_queries(task);
    for (std::int64_t j0 = begin; j0 < end; j0 += kTileKeys) {
      const bool last = j0 + kTileKeys >= end;
      const Rows after = last ? next : rows_of(call_.x.k, task, j0 + kTileKeys, call_.problem.head_dim);
      tile(task, j0, min_of(kTileKeys, end - j0), state, after);
    }
    for (std::int64_t h = 0; h < task.heads; ++h) {
      float *l = o_[h] - call_.plan.task_rows, *m = l - call_.plan.task_rows;
      for (std::int64_t r = 0; r < task.count; ++r) {
        m[r] = state[h * call_.head_rows + r].m;
        l[r] = state[h * call_.head_rows + r].l;
      }
    }
  }

  /// The first head's keys, or values, from key j on.
  static Rows rows_of(const Tensor& t, const RowTask& task, std::int64_t j, std::int64_t dim) {
    return {t.row(task.b, task.sequence.k_row + j, task.kv_head), t.stride_seq * dtype_size(t.dtype),
            dim * dtype_size(t.dtype)};
  }
  float* row_scratch() const { return scratch_.row; }

 private:
  void load_queries(const RowTask& task) {
    if (task.b == loaded_b_ && task.kv_head == loaded_head_ && task.index == loaded_index_) return;
    loaded_b_ = task.b;
    loaded_head_ = task.kv_head;
    loaded_index_ = task.index;
    const std::int64_t pitch = call_.plan.dim;
    for (std::int64_t h = 0; h < task.heads; ++h) {
      Query* q = static_cast<Query*>(scratch_.q) + h * call_.head_rows * pitch;
      for (std::int64_t r = 0; r < task.count; ++r) {
        Products::load_query(q + r * pitch, pitch, call_.x.q, task.b, task.sequence.q_row + task.query_row(group_, r),
                             task.query_head(group_, h, r), call_.problem.head_dim);
      }
      // Blocks of four rows: what fills the last one is computed and not used.
      for (std::int64_t x = task.count * pitch; x < call_.head_rows * pitch; ++x) q[x] = 0;
    }
  }

  /// Keys [j0, j0 + keys) of the sequence. `next`: the keys read after this tile's values.
  void tile(const RowTask& task, std::int64_t j0, std::int64_t keys, RowState* state, const Rows& next) {
    const Rows k = rows_of(call_.x.k, task, j0, call_.problem.head_dim);
    const Rows v = rows_of(call_.x.v, task, j0, call_.problem.head_dim_v);
    k_ = reinterpret_cast<const Element*>(k.data);
    v_ = reinterpret_cast<const Element*>(v.data);
    Interval seen[kTaskRows], common{0, keys};
    for (std::int64_t r = 0; r < task.count; ++r) {
      const Interval visible = task.sequence.visible(task.query_row(group_, r));
      seen[r].begin = clamp_to<std::int64_t>(visible.begin - j0, 0, keys);
      seen[r].end = clamp_to<std::int64_t>(visible.end - j0, seen[r].begin, keys);
      common = {max_of(common.begin, seen[r].begin), min_of(common.end, seen[r].end)};
    }
    const std::int64_t run = max_of<std::int64_t>(common.end - common.begin, 0) / kStepKeys * kStepRun;
    const KeyRuns runs{common.begin, run, run};
    // What is not in the runs, key by key. Scores before the runs' ones, since they write a few more than asked for.
    const auto outside = [&](auto&& step) {
      const std::int64_t begin = runs.first, end = runs.first + kRuns * run;
      for (std::int64_t j = 0; j < begin; j += kStepKeys) step(j, min_of(j + kStepKeys, begin));
      for (std::int64_t j = end; j < keys; j += kStepKeys) step(j, min_of(j + kStepKeys, keys));
    };
    outside([&](std::int64_t j, std::int64_t end) { key_scores(task, j, end - j); });
    run_scores(task, runs, Ahead::of_keys(k, v, runs, task.heads));
    softmax(task, j0, seen, state);
    run_values(task, runs, Ahead::of_values(v, next, runs, task.heads));
    outside([&](std::int64_t j, std::int64_t end) { key_values(task, j, end, seen); });
  }

  /// f(h, r, rows) for the blocks of up to kBlock rows of each head.
  template <std::int64_t kBlock, class F>
  static void for_blocks(const RowTask& task, F&& f) {
    for (std::int64_t h = 0; h < task.heads; ++h) {
      for (std::int64_t r = 0; r < task.count; r += kBlock) f(h, r, min_of(kBlock, task.count - r));
    }
  }
  /// Scores are computed for 1, 2 or 4 rows; a block of three has a row of zeros.
  template <class F>
  static void with_score_rows(std::int64_t rows, F&& f) {
    rows == 1 ? f(Size<1>{}) : rows == 2 ? f(Size<2>{}) : f(Size<4>{});
  }
  template <class F>
  static void with_value_rows(std::int64_t rows, F&& f) {
    rows == 1 ? f(Size<1>{}) : f(Size<kValueRows>{});
  }

  const Query* query(std::int64_t h, std::int64_t r) const {
    return static_cast<const Query*>(scratch_.q) + (h * call_.head_rows + r) * call_.plan.dim;
  }
  float* scores(std::int64_t h, std::int64_t r) const { return scratch_.s + (h * call_.head_rows + r) * kScoreRow; }

  void key_scores(const RowTask& task, std::int64_t j, std::int64_t keys) const {
    const Tensor& k = call_.x.k;
    for_blocks<4>(task, [&](std::int64_t h, std::int64_t r, std::int64_t rows) {
      with_score_rows(rows, [&](auto count) {
        score_keys<Products, decltype(count)::value>(k_ + h * k.stride_head + j * k.stride_seq, k.stride_seq, keys,
                                                     query(h, r), call_.plan.dim, call_.problem.head_dim, scale_,
                                                     scores(h, r) + j);
      });
    });
  }

  /// Four keys of each run at a time for all rows.
  void run_scores(const RowTask& task, const KeyRuns& runs, const Ahead& ahead) {
    const Tensor& k = call_.x.k;
    for (std::int64_t j = runs.first; j < runs.first + runs.keys; j += 4) {
      for (std::int64_t n = 0; n < 4; ++n) {
        for_blocks<4>(task, [&](std::int64_t h, std::int64_t r, std::int64_t rows) {
          with_score_rows(rows, [&](auto count) {
            constexpr int kR = decltype(count)::value;
            if (n % kStepPart<kR> != 0) return;
            score_step<Products, kR>(k_ + h * k.stride_head, k.stride_seq, runs, j + n, query(h, r), call_.plan.dim,
                                     call_.problem.head_dim, scale_, scores(h, r), sums_ + h * call_.head_rows + r + n,
                                     r == 0 ? ahead : Ahead());
          });
        });
      }
      for_blocks<4>(task, [&](std::int64_t h, std::int64_t r, std::int64_t rows) {
        if (kTransposed<4> && rows > 2) {
          store_transposed_scores(scores(h, r) + j, runs.apart, sums_ + h * call_.head_rows + r);
        }
      });
    }
  }

  /// Scores of the keys that a row sees become weights; O is rescaled where a row's maximum grew.
  void softmax(const RowTask& task, std::int64_t j0, const Interval* seen, RowState* state) const {
    const ScoreSpec& spec = call_.problem.score;
    for_blocks<1>(task, [&](std::int64_t h, std::int64_t r, std::int64_t) {
      const auto [begin, end] = seen[r];
      if (begin == end) return;
      const std::int64_t i = task.query_row(group_, r);
      float *s = scores(h, r), *o = o_[h] + r * call_.plan.dim_v;
      const HeadScore score = head_score(call_.problem, task.sequence, task.b, task.query_head(group_, h, r));
      if (spec.modified()) modify_row(score, s, i, j0, begin, end);
      const float factor = softmax_row(state[h * call_.head_rows + r], s, begin, end);
      for (std::int64_t x = 0; x < call_.plan.dim_v && factor != 1.0f; x += kLanes) store(o + x, load(o + x) * factor);
      if (spec.dropout.threshold != 0) drop_row(score, s, i, j0, begin, end);
    });
  }

  /// O += P V for the keys of the runs, few at a time, so that they stay in the first-level cache for all rows of a
  /// head.
  void run_values(const RowTask& task, const KeyRuns& runs, const Ahead& ahead) const {
    if (runs.keys == 0) return;
    const std::uint32_t* pairs = scratch_.pairs;
    if constexpr (Products::kPairs) {
      for_blocks<1>(task, [&](std::int64_t h, std::int64_t r, std::int64_t) {
        if (in_pairs_)
          Products::pack_weights(scores(h, r), runs, scratch_.pairs + (h * call_.head_rows + r) * (kTileKeys / 2));
      });
    }
    const Tensor& v = call_.x.v;
    const std::int64_t pitch = call_.plan.dim_v, dim_v = call_.problem.head_dim_v;
    const std::int64_t step = (task.heads == 1 ? kStepRun : kStepRunOfHeads) * (Products::kColumnPairs ? 2 : 1);
    for (KeyRuns part{runs.first, step, runs.apart}; part.first < runs.first + runs.keys; part.first += step) {
      if constexpr (Products::kColumnPairs) part.keys = min_of(step, runs.first + runs.keys - part.first);
      for_blocks<kValueRows>(task, [&](std::int64_t h, std::int64_t r, std::int64_t rows) {
        const int pass = task.count <= kValueRows ? -1 : r == 0 ? 0 : 1;
        const Ahead here = r < 2 * kValueRows ? ahead : Ahead();
        with_value_rows(rows, [&](auto count) {
          constexpr int kR = decltype(count)::value;
          const Element* values = v_ + h * v.stride_head;
          float* o = o_[h] + r * pitch;
          std::int64_t done = 0;
          if constexpr (Products::kPairs) {
            if (in_pairs_) {
              const std::uint32_t* p = pairs + (h * call_.head_rows + r) * (kTileKeys / 2) + (part.first - runs.first);
              done = Products::template values<kR>(values, v.stride_seq, dim_v, part, p, o, pitch, here, pass);
            }
          } else if constexpr (Products::kColumnPairs) {
            done = Products::template values<kR>(values, v.stride_seq, dim_v, part, scores(h, r), o, pitch, here, pass);
          }
          value_rows<Store, kR>(values, v.stride_seq, ValueColumns(dim_v), part, scores(h, r), o, pitch, here, pass,
                                done);
        });
      });
    }
  }

  /// O += P V for the keys [j, end). A weight times an invisible value is never formed, since that may be NaN: keys
  /// that only some rows of a block see go row by row.
  void key_values(const RowTask& task, std::int64_t j, std::int64_t end, const Interval* seen) const {
    for_blocks<kValueRows>(task, [&](std::int64_t h, std::int64_t r, std::int64_t rows) {
      const auto part = [&](std::int64_t first, std::int64_t last, std::int64_t row, std::int64_t row_count) {
        if (first >= last) return;
        with_value_rows(row_count, [&](auto count) {
          const std::int64_t pitch = call_.plan.dim_v;
          value_rows<Store, decltype(count)::value>(v_ + h * call_.x.v.stride_head, call_.x.v.stride_seq,
                                                    ValueColumns(call_.problem.head_dim_v), {first, last - first, 0, 1},
                                                    scores(h, row), o_[h] + row * pitch, pitch, {}, 1);
        });
      };
      const Interval a = seen[r], z = seen[r + rows - 1];
      Interval common{max_of(j, max_of(a.begin, z.begin)), min_of(end, min_of(a.end, z.end))};
      if (common.begin >= common.end) common = {end, end};
      part(common.begin, common.end, r, rows);
      for (std::int64_t x = r; x < r + rows && (a.begin != z.begin || a.end != z.end); ++x) {
        part(max_of(j, seen[x].begin), min_of(common.begin, seen[x].end), x, 1);
        part(max_of(common.end, seen[x].begin), min_of(end, seen[x].end), x, 1);
      }
    });
  }

  const Decode& call_;
  DecodeScratch scratch_;
  std::int64_t group_;
  float scale_;
  bool in_pairs_;                              // P V from rounded weights
  const Element *k_ = nullptr, *v_ = nullptr;  // the first head's rows of the tile
  float* o_[kTaskRows];                        // of each head
  Vec sums_[kTaskRows];                        // scores of four steps, for blocks of four rows
  std::int64_t loaded_b_ = -1, loaded_head_ = -1, loaded_index_ = -1;
};

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
