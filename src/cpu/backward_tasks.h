// What the float32 and the bfloat16 backward share: waiting for a turn at a block of dQ, zeros outside the sequences.
#pragma once

#include "cpu/tasks.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#endif

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Waits until *ticket == turn: spins while its owner is likely to be running, then lets others run.
inline void wait_for(const std::int32_t* ticket, std::int32_t turn) {
  for (int spins = 0; __atomic_load_n(ticket, __ATOMIC_ACQUIRE) != turn; ++spins) {
    if (spins < 2000) {
#if defined(__x86_64__)
      _mm_pause();
#endif
    } else {
#if defined(__unix__) || defined(__APPLE__)
      sched_yield();
#endif
    }
  }
}

/// Rows of an operand's batch entry outside the sequence: [begin, first) and [last, end), where [begin, end) belongs to
/// the item.
inline void clear_outside(const Tensor& t, std::int64_t b, std::int64_t heads, std::int64_t begin, std::int64_t first,
                          std::int64_t last, std::int64_t end, std::int64_t dim) {
  for (std::int64_t head = 0; head < heads; ++head) {
    clear_rows(t, b, begin, head, first - begin, dim);
    clear_rows(t, b, last, head, end - last, dim);
  }
}

/// Zeros in the gradients of an item's rows outside its sequence.
inline void clear_outside_item(const Problem& p, const BackwardOperands& x, const Sequence& s, std::int64_t b) {
  std::int64_t q_begin = 0, q_end = p.total_q, k_begin = 0, k_end = p.total_k;
  if (p.mask.varlen && p.batch > 0) {
    q_begin = packed_begin(p.mask.cu_seqlens_q, b, p.batch, p.total_q);
    q_end = packed_begin(p.mask.cu_seqlens_q, b + 1, p.batch, p.total_q);
    k_begin = packed_begin(p.mask.cu_seqlens_k, b, p.batch, p.total_k);
    k_end = packed_begin(p.mask.cu_seqlens_k, b + 1, p.batch, p.total_k);
  }
  clear_outside(x.grad_q, b, p.heads_q, q_begin, s.q_row, s.q_row + s.q_length, q_end, p.head_dim);
  clear_outside(x.grad_k, b, p.heads_kv, k_begin, s.k_row, s.k_row + s.k_length, k_end, p.head_dim);
  clear_outside(x.grad_v, b, p.heads_kv, k_begin, s.k_row, s.k_row + s.k_length, k_end, p.head_dim_v);
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
