// The bfloat16 backward's work on rows: D and the operands' magnitudes before the tiles, blocks of query rows made
// ready for products, gradients of sinks and bias after the tiles.
#pragma once

#include "cpu/backward_bias.h"
#include "cpu/backward_plan_bf16.h"
#include "cpu/backward_tasks.h"
#include "cpu/parallel.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// A call and its parts of the workspace.
template <class Products>
struct PairCall {
  const Problem& problem;
  const BackwardOperands& x;
  PairPlan plan;
  char* workspace;

  std::int64_t row_at(std::int64_t b, std::int64_t head, std::int64_t row) const {
    return problem.mask.varlen ? head * problem.total_q + row : (b * problem.heads_q + head) * problem.seq_q + row;
  }
  float* d(std::int64_t b, std::int64_t head, std::int64_t row) const {
    return reinterpret_cast<float*>(workspace + plan.d) + row_at(b, head, row);
  }
  /// Of a block's first row.
  float* dq(std::int64_t b, std::int64_t head, std::int64_t row) const {
    const std::int64_t at = problem.mask.varlen ? row + b * (kLanes - 1) : b * round_up(problem.seq_q, kLanes) + row;
    return reinterpret_cast<float*>(workspace + plan.dq) + (head * plan.dq_rows + at) * plan.dim;
  }
  /// Blocks of packed sequences are numbered by their first row and sequence: each number once, below blocks_q.
  std::int32_t* ticket(const Sequence& sequence, std::int64_t b, std::int64_t head, std::int64_t block) const {
    constexpr std::int64_t kBlock = Products::kBlockQ;
    const std::int64_t first = problem.mask.varlen ? sequence.q_row / kBlock + b : b * ceil_div(problem.seq_q, kBlock);
    return reinterpret_cast<std::int32_t*>(workspace + plan.tickets) + head * plan.blocks_q + first + block;
  }
  PairScratch scratch(int worker) const {
    PairScratch s;
    carve_scratch<Products>(plan, workspace + plan.scratch + worker * plan.scratch_each, &s);
    return s;
  }
};

/// The largest magnitude of each operand, as bfloat16 bits, over all that some row or key may look at.
struct Magnitudes {
  std::uint32_t q, k, v, dout;

  /// False where pair products go wrong: NaN and Inf in Q, K or dO reach rows and keys that do not see them (0 * NaN
  /// inside a product), and an operand of nothing but tiny numbers (below 2^-64) gives results that they flush to 0.
  bool usual() const {
    constexpr std::uint32_t kNotFinite = 0x7f80, kTiny = (127 - 64) << 7;
    const auto tiny = [](std::uint32_t x) { return x != 0 && x < kTiny; };
    return max_of(max_of(q, k), dout) < kNotFinite && !tiny(q) && !tiny(k) && !tiny(v) && !tiny(dout);
  }
  static void raise(std::uint32_t& to, __m512i magnitudes) {
    alignas(64) std::uint16_t lanes[32];
    _mm512_store_si512(lanes, magnitudes);
    std::uint32_t largest = 0, seen = __atomic_load_n(&to, __ATOMIC_RELAXED);
    for (const std::uint16_t x : lanes) largest = max_of<std::uint32_t>(largest, x);
    while (seen < largest &&
           !__atomic_compare_exchange_n(&to, &seen, largest, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
};

ONEPASS_INLINE __m512i raise_magnitudes(__m512i largest, __m512i x) {
  return _mm512_max_epu16(largest, _mm512_and_si512(x, _mm512_set1_epi16(0x7fff)));
}
inline __m512i scan_row(__m512i largest, const Bf16* row, std::int64_t dim) {
  for (std::int64_t c = 0; c < dim; c += 32) largest = raise_magnitudes(largest, load_row32(row + c, dim - c));
  return largest;
}

struct MagnitudeScan {
  __m512i q{}, k{}, v{}, dout{};
};

/// Query rows that see some key.
ONEPASS_INLINE Interval live_rows(const Sequence& sequence) {
  return sequence.k_length > 0 ? sequence.rows_seeing(0, sequence.k_length) : Interval{};
}

/// D of a block's rows, 0 from grad_q where no tile will come, and the block's ticket for its first key block.
template <class Products>
void prepare_pair_rows(const PairCall<Products>& call, MagnitudeScan& scan, const Sequence& sequence, std::int64_t b,
                       std::int64_t head, std::int64_t block) {
  const Problem& problem = call.problem;
  const BackwardOperands& x = call.x;
  const std::int64_t i0 = block * Products::kBlockQ, i1 = min_of(i0 + Products::kBlockQ, sequence.q_length);
  const std::int64_t dim = problem.head_dim, dim_v = problem.head_dim_v;
  const Interval all = live_rows(sequence);
  const Interval live{max_of(i0, all.begin), min_of(i1, all.end)};
  if (live.begin < live.end) {
    const Interval keys = sequence.visible_to_any(live.begin, live.end);
    *call.ticket(sequence, b, head, block) = static_cast<std::int32_t>(keys.begin / call.plan.block_k);
  }
  for (std::int64_t i = i0; i < i1; ++i) {
    const std::int64_t seq = sequence.q_row + i;
    const bool sees = i >= live.begin && i < live.end;
    if (!sees) {
      clear_rows(x.grad_q, b, seq, head, 1, dim);
      if (!problem.score.sinks) continue;
    }
    const Bf16 *out = row_as<StoreBf16>(x.out, b, seq, head), *dout = row_as<StoreBf16>(x.grad_out, b, seq, head);
    __m512 sum{};
    __m512i largest{};
    for (std::int64_t c = 0; c < dim_v; c += 32) {
      const __m512i y = load_row32(dout + c, dim_v - c);
      sum = _mm512_dpbf16_ps(sum, (__m512bh)load_row32(out + c, dim_v - c), (__m512bh)y);
      largest = raise_magnitudes(largest, y);
    }
    const bool empty = !sees || (problem.score.bias && is_empty_row(problem, sequence, b, head, i));
    *call.d(b, head, seq) = (empty ? 0 : sum_of((Vec)sum)) - (x.grad_lse ? *x.grad_lse.row(b, head, seq) : 0.0f);
    if (empty || *x.lse.row(b, head, seq) == -kInf) continue;
    scan.dout = _mm512_max_epu16(scan.dout, largest);
    scan.q = scan_row(scan.q, row_as<StoreBf16>(x.q, b, seq, head), dim);
  }
}

/// Magnitudes of a block of keys, of those that some row sees.
template <class Products>
void scan_keys(const PairCall<Products>& call, MagnitudeScan& scan, const Sequence& sequence, std::int64_t b,
               std::int64_t kv_head, std::int64_t block) {
  if (sequence.q_length == 0) return;
  const Interval seen = sequence.visible_to_any(0, sequence.q_length);
  const std::int64_t j0 = max_of(block * call.plan.block_k, seen.begin);
  const std::int64_t j1 = min_of((block + 1) * call.plan.block_k, seen.end);
  for (std::int64_t row = sequence.k_row + j0; row < sequence.k_row + j1; ++row) {
    scan.k = scan_row(scan.k, row_as<StoreBf16>(call.x.k, b, row, kv_head), call.problem.head_dim);
    scan.v = scan_row(scan.v, row_as<StoreBf16>(call.x.v, b, row, kv_head), call.problem.head_dim_v);
  }
}

/// D, tickets, magnitudes, and zeros where no tile writes.
template <class Products>
void run_pair_rows(const PairCall<Products>& call, Queue& queue, Magnitudes& magnitudes, int worker) {
  const Problem& problem = call.problem;
  constexpr std::int64_t kRun = 4;  // tasks at a time: they are short
  if (worker == 0 && problem.mask.varlen && problem.batch == 0) clear_outside_item(problem, call.x, Sequence{}, 0);
  MagnitudeScan scan;
  SequenceCursor cursor;
  for (bool more = true; more;) {
    const std::int64_t index = queue.pop(kRun);
    for (std::int64_t n = index; n < index + kRun && more; ++n) {
      std::int64_t task = cursor.seek(problem, n, [&](const Sequence& s) {
        return 1 + ceil_div(s.q_length, Products::kBlockQ) * problem.heads_q +
               ceil_div(s.k_length, call.plan.block_k) * problem.heads_kv;
      });
      const std::int64_t query_tasks = ceil_div(cursor.sequence.q_length, Products::kBlockQ) * problem.heads_q;
      if (task < 0) {
        more = false;
      } else if (task-- == 0) {
        clear_outside_item(problem, call.x, cursor.sequence, cursor.b);
      } else if (task < query_tasks) {
        prepare_pair_rows(call, scan, cursor.sequence, cursor.b, task % problem.heads_q, task / problem.heads_q);
      } else {
        task -= query_tasks;
        scan_keys(call, scan, cursor.sequence, cursor.b, task % problem.heads_kv, task / problem.heads_kv);
      }
    }
  }
  Magnitudes::raise(magnitudes.q, scan.q);
  Magnitudes::raise(magnitudes.k, scan.k);
  Magnitudes::raise(magnitudes.v, scan.v);
  Magnitudes::raise(magnitudes.dout, scan.dout);
}

/// A block of query rows: packed Q and dO, lse, D.
template <class Products>
struct QueryRows {
  static constexpr std::int64_t kBlock = Products::kBlockQ;

  std::int64_t i0 = 0, count = 0;
  Interval live;      // of the sequence's rows, those that see some key
  Interval keys;      // seen by the block's rows
  bool dead = false;  // some live row has lse -inf: nothing is to come from it
  alignas(64) float lse[kBlock], lse_log2[kBlock], d[kBlock];
  alignas(64) std::int32_t row[kBlock];

  void load(const PairCall<Products>& call, const PairScratch& t, const Sequence& sequence, std::int64_t b,
            std::int64_t head, std::int64_t first_row) {
    const Problem& problem = call.problem;
    i0 = first_row;
    count = min_of(kBlock, sequence.q_length - i0);
    live = live_rows(sequence);
    const std::int64_t begin = max_of(i0, live.begin), end = min_of(i0 + count, live.end);
    keys = sequence.visible_to_any(begin, end);
    dead = false;
    const std::int64_t seq = sequence.q_row + i0;
    const float *l = call.x.lse.row(b, head, seq), *rows_d = call.d(b, head, seq);
    for (std::int64_t i = 0; i < kBlock; ++i) {
      const bool sees = i0 + i >= begin && i0 + i < end;
      const bool counts =
          sees && l[i] != -kInf && !(problem.score.bias && is_empty_row(problem, sequence, b, head, i0 + i));
      if (sees && !counts) dead = true;
      lse[i] = counts ? l[i] : 0;
      lse_log2[i] = lse[i] * kLog2e;
      d[i] = counts ? rows_d[i] : 0;
      row[i] = counts ? static_cast<std::int32_t>(i) : kDeadRow;
    }
    const bool clean = dead || begin > i0 || end < i0 + count;
    pack(t, call.x.q, b, seq, head, problem.head_dim, call.plan.dim, clean, t.q_t, t.q);
    pack(t, call.x.grad_out, b, seq, head, problem.head_dim_v, call.plan.dim_v, clean, t.dout_t, t.dout);
  }

 private:
  void pack(const PairScratch& t, const Tensor& x, std::int64_t b, std::int64_t seq, std::int64_t head,
            std::int64_t dim, std::int64_t padded_dim, bool clean, Bf16* columns, Bf16* rows) const {
    if (dim == 0) {
      __builtin_memset(columns, 0, static_cast<std::size_t>(2 * kBlock * 32));
      return;
    }
    const Bf16* from = row_as<StoreBf16>(x, b, seq, head);
    std::int64_t stride = x.stride_seq;
    if (clean) {
      for (std::int64_t i = 0; i < count; ++i) {
        copy_rows_padded(from + i * stride, 0, row[i] == kDeadRow ? 0 : 1, 1, dim, t.clean + i * dim, dim);
      }
      from = t.clean;
      stride = dim;
    }
    pack_lanes_of_rows(from, stride, count, dim, columns, Products::right_layout(kBlock), round_up(count, kWidth));
    pack_lanes_of_columns(from, stride, count, dim, rows, Products::right_layout(padded_dim));
  }
};

// ---- gradients of sinks and bias: the float32 kernel's passes, from the same D ----

template <class Products>
Backward row_gradients_call(const PairCall<Products>& call, int threads) {
  Backward rows{call.problem, call.x, plan_backward(call.problem, threads), call.workspace};
  rows.plan.d = call.plan.d;
  rows.plan.scratch = call.plan.scratch;  // the tiles are done
  return rows;
}

inline std::size_t row_gradients_workspace(const Problem& problem, const PairPlan& plan, int threads) {
  if (!problem.score.bias) return 0;
  const BackwardPlan rows = plan_backward(problem, threads);
  return static_cast<std::size_t>(plan.scratch + rows.workers * rows.scratch_each);
}

template <class Products>
void add_row_gradients(const PairCall<Products>& call, Queue* queues, int threads) {
  if (!call.x.grad_sinks && !call.x.grad_bias) return;
  const Backward rows = row_gradients_call(call, threads);
  if (call.x.grad_sinks) {
    parallel(call.plan.workers, [&](int) {
      for (std::int64_t head; (head = queues[0].pop()) < call.problem.heads_q;) sink_gradient(rows, head);
    });
  }
  if (call.x.grad_bias) {
    const BiasRegions regions = bias_regions(rows);
    parallel(rows.plan.workers, [&](int worker) {
      const Scratch t = rows.scratch(worker);
      for (std::int64_t region; (region = queues[1].pop()) < regions.count();) bias_gradient(rows, t, regions, region);
    });
  }
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
