// The decode's division of work and its workspace.
#pragma once

#include "core/problem.h"
#include "cpu/vec.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Keys of a tile, for which scores exist; most packed rows of a task. A packed row is (query row i, head of the KV
/// group): one sweep over K and V serves them all.
inline constexpr std::int64_t kTileKeys = 512, kTaskRows = 32;
/// Keys that stay in the first-level cache while all rows use them.
inline constexpr std::int64_t kStepKeys = 32;
/// Floats from one row of scores to the next: a step may write up to kLanes keys past the tile.
inline constexpr std::int64_t kScoreRow = kTileKeys + kLanes;

/// A task is a chunk of keys for up to 32 packed rows of one sequence and KV head; it leaves a partial result (m, l,
/// O). Chunks follow from the problem's sizes alone and are merged in order, so the number of threads changes no bit.
///
/// Workspace in bytes, each part rounded up to 64, with R = seq_q heads_q / heads_kv packed rows, in T = ceil(R / 32)
/// tasks of r <= 32 rows, and chunks of C keys, C = 512 max(T, ceil(seq_k / 262144)), half of that where an item would
/// have less than 64 tasks:
///   8 (batch + 1)                                 the first task of each item
/// + 4 batch heads_kv T                            tasks left
/// + 4 heads_kv T chunks r (dim_v + 2)             partial results; chunks = batch ceil(seq_k / C), or, packed,
///                                                 total_k / C + batch
/// + 4 workers (32 dim + 25088 + dim_v)            Q, scores, paired weights, a row of O
/// dim, dim_v: head_dim, head_dim_v rounded up to 2 and 1 vectors of 16; workers <= threads. r / C <= 1/8, so that
/// partial results take at most half a byte for each element of V.
struct DecodePlan {
  std::int64_t rows = 0;       // R
  std::int64_t task_rows = 0;  // r, a multiple of 4
  std::int64_t row_tasks = 0;  // T
  std::int64_t chunk = 0;      // C
  std::int64_t chunks = 0;     // of one head and row task: all items
  std::int64_t dim = 0, dim_v = 0;
  std::int64_t partial = 0;  // floats of one: m[r], l[r], O[r][dim_v]
  int workers = 1;
  std::int64_t first_task = 0, left = 0, partials = 0, scratch = 0, scratch_each = 0, bytes = 0;  // in bytes
};

inline DecodePlan plan_decode(const Problem& problem, int threads) {
  DecodePlan p;
  const bool packed = problem.mask.varlen;
  p.rows = problem.seq_q * problem.group();
  p.row_tasks = ceil_div(p.rows, kTaskRows);
  p.task_rows = p.row_tasks > 0 ? round_up(ceil_div(p.rows, p.row_tasks), 4) : 0;
  p.chunk =
      kTileKeys * max_of<std::int64_t>(max_of<std::int64_t>(p.row_tasks, 1), ceil_div(problem.seq_k, 512 * kTileKeys));
  if (problem.heads_kv * p.row_tasks * ceil_div(problem.seq_k, p.chunk) < 64) p.chunk /= 2;
  const std::int64_t item_chunks = max_of<std::int64_t>(1, ceil_div(problem.seq_k, p.chunk));
  p.chunks = packed ? problem.total_k / p.chunk + problem.batch : problem.batch * item_chunks;
  p.dim = round_up(problem.head_dim, 2 * kLanes);
  p.dim_v = round_up(problem.head_dim_v, kLanes);
  p.partial = p.task_rows * (p.dim_v + 2);

  // Waking a thread costs about 20 us.
  const double tasks = static_cast<double>(problem.heads_kv * p.row_tasks) * static_cast<double>(p.chunks);
  const double elements =
      static_cast<double>(problem.heads_kv * (packed ? problem.total_k : problem.batch * problem.seq_k)) *
      static_cast<double>(problem.head_dim + problem.head_dim_v);
  const bool small =
      elements * static_cast<double>(dtype_size(problem.dtype)) < 4e5 && elements * static_cast<double>(p.rows) < 6e5;
  p.workers = small ? 1 : max_of(threads, 1);
  if (tasks < p.workers) p.workers = max_of(1, static_cast<int>(tasks));

  const auto part = [&p](std::int64_t bytes) {
    const std::int64_t at = p.bytes;
    p.bytes += round_up(bytes, 64);
    return at;
  };
  p.first_task = part(8 * (problem.batch + 1));
  p.left = part(4 * problem.batch * problem.heads_kv * p.row_tasks);
  p.partials = part(4 * problem.heads_kv * p.row_tasks * p.chunks * p.partial);
  p.scratch_each = round_up(4 * (kTaskRows * (p.dim + kScoreRow + kTileKeys / 2) + p.dim_v), 64);
  p.scratch = part(p.workers * p.scratch_each);
  return p;
}

/// One worker's tiles.
struct DecodeScratch {
  void* q;               // [kTaskRows][dim] float32, or bfloat16
  float* s;              // [kTaskRows][kScoreRow]: scores, then weights
  std::uint32_t* pairs;  // [kTaskRows][kTileKeys / 2]: weights as pairs of bfloat16
  float* row;            // [dim_v]
};

/// A call and its parts of the workspace.
struct Decode {
  const Problem& problem;
  const ForwardOperands& x;
  DecodePlan plan;
  char* workspace;
  std::int64_t heads = 1;      // KV heads of a task: several where they lie side by side and have few rows
  std::int64_t head_rows = 0;  // rows of Q and the scores from one of them to the next

  std::int64_t* first_task() const { return reinterpret_cast<std::int64_t*>(workspace + plan.first_task); }
  std::int32_t* left(std::int64_t b, std::int64_t kv_head, std::int64_t row_task) const {
    return reinterpret_cast<std::int32_t*>(workspace + plan.left) + (b * problem.heads_kv + kv_head) * plan.row_tasks +
           row_task;
  }
  /// Chunks of packed sequences are numbered by their first key and sequence, so that every number is used once.
  float* partial(const Sequence& sequence, std::int64_t b, std::int64_t kv_head, std::int64_t row_task,
                 std::int64_t chunk) const {
    const std::int64_t first =
        problem.mask.varlen ? sequence.k_row / plan.chunk + b : b * (plan.chunks / problem.batch);
    return reinterpret_cast<float*>(workspace + plan.partials) +
           ((kv_head * plan.row_tasks + row_task) * plan.chunks + first + chunk) * plan.partial;
  }
  DecodeScratch scratch(int worker) const {
    float* q = reinterpret_cast<float*>(workspace + plan.scratch + worker * plan.scratch_each);
    float* s = q + kTaskRows * plan.dim;
    float* pairs = s + kTaskRows * kScoreRow;
    return {q, s, reinterpret_cast<std::uint32_t*>(pairs), pairs + kTaskRows * kTileKeys / 2};
  }
};

inline Decode make_decode(const Problem& problem, const ForwardOperands& x, const Launch& launch) {
  Decode call{problem, x, plan_decode(problem, launch.threads), static_cast<char*>(launch.workspace)};
  const DecodePlan& plan = call.plan;
  call.head_rows = plan.rows <= 2 ? plan.rows : plan.task_rows;
  // Memory streams whole keys, not one head's part of them. Every result is the same either way.
  const bool side_by_side = x.k.stride_head == problem.head_dim && x.v.stride_head == problem.head_dim_v &&
                            x.k.stride_seq > x.k.stride_head && x.v.stride_seq > x.v.stride_head;
  if (!side_by_side || call.head_rows == 0) return call;
  call.heads = clamp_to<std::int64_t>(kTaskRows / call.head_rows, 1, max_of<std::int64_t>(problem.heads_kv, 1));
  const std::int64_t tasks = problem.heads_kv * plan.row_tasks * plan.chunks;
  while (call.heads > 1 && tasks < 4 * plan.workers * call.heads) call.heads = (call.heads + 1) / 2;
  return call;
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
