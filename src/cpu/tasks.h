// How work is shared out: tasks by number, and the rows that belong to no task.
#pragma once

#include "cpu/pack.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// A queue is a counter that starts at 0: tasks leave it in ascending order, so that whoever waits for the turn of an
/// earlier task waits for one that some worker has begun. That holds for any number of workers.
struct alignas(64) Queue {
  std::int64_t next;
  std::int64_t pop(std::int64_t count = 1) { return __atomic_fetch_add(&next, count, __ATOMIC_RELAXED); }
};

/// Numbers the tasks of all sequences, count(sequence) of each, one sequence after the other. A worker asks in
/// ascending order, so that finding a task costs one step a sequence.
struct SequenceCursor {
  std::int64_t b = 0, first = 0, count = -1;
  Sequence sequence;

  /// The number of task `index` within sequence `b`, or -1 if it comes after all of them, by index - first.
  template <class Count>
  std::int64_t seek(const Problem& problem, std::int64_t index, Count&& count_of) {
    while (b < problem.batch) {
      if (count < 0) {
        sequence = problem.sequence(b);
        count = count_of(sequence);
      }
      if (index < first + count) return index - first;
      first += count;
      count = -1;
      ++b;
    }
    return -1;
  }
};

/// Rows of a packed operand up to which the items before b own them; for b = batch all rows.
ONEPASS_INLINE std::int64_t packed_begin(const std::int32_t* offsets, std::int64_t b, std::int64_t batch,
                                         std::int64_t total) {
  return b >= batch ? total : b == 0 ? 0 : clamp_to<std::int64_t>(offsets[b], 0, total);
}

/// Out 0 and lse -inf in the rows of [begin, end) of one item.
inline void write_empty_rows(const Problem& problem, const Tensor& out, const RowTensor& lse, std::int64_t b,
                             std::int64_t begin, std::int64_t end) {
  for (std::int64_t head = 0; head < problem.heads_q && begin < end; ++head) {
    clear_rows(out, b, begin, head, end - begin, problem.head_dim_v);
    if (!lse) continue;
    float* row = lse.row(b, head, begin);
    for (std::int64_t i = 0; i < end - begin; ++i) row[i] = -kInf;
  }
}

/// Query rows outside every sequence.
inline void write_outside_rows(const Problem& problem, const Tensor& out, const RowTensor& lse) {
  const MaskSpec& mask = problem.mask;
  if (mask.varlen && problem.batch == 0) write_empty_rows(problem, out, lse, 0, 0, problem.total_q);
  if (!mask.varlen && mask.q_length == nullptr) return;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const Sequence s = problem.sequence(b);
    const bool packed = mask.cu_seqlens_q != nullptr;
    const std::int64_t begin = packed ? packed_begin(mask.cu_seqlens_q, b, problem.batch, problem.total_q) : 0;
    const std::int64_t end =
        packed ? packed_begin(mask.cu_seqlens_q, b + 1, problem.batch, problem.total_q) : problem.seq_q;
    const std::int64_t item = mask.varlen ? 0 : b;
    write_empty_rows(problem, out, lse, item, begin, s.q_row);
    write_empty_rows(problem, out, lse, item, s.q_row + s.q_length, end);
  }
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
