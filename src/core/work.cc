#include "core/work.h"

#include "core/half.h"

namespace onepass {
namespace {

/// Sum over rows 0 <= i < n of clamp(i + shift, 0, limit).
double sum_of_clamped(std::int64_t n, std::int64_t shift, std::int64_t limit) {
  // Rows below `first` give 0, rows from `last` on give the limit, between them an arithmetic series.
  const std::int64_t first = clamp_to<std::int64_t>(-shift, 0, n),
                     last = clamp_to<std::int64_t>(limit - shift, first, n);
  const double count = static_cast<double>(last - first);
  const double series =
      count == 0 ? 0 : count * (static_cast<double>(first + shift) + static_cast<double>(last - 1 + shift)) / 2;
  return series + static_cast<double>(n - last) * static_cast<double>(limit);
}

}  // namespace

double visible_pairs(const Problem& problem) {
  Problem p = problem;
  if (p.on_device) {  // lengths that the host cannot see: the declared maxima stand in
    MaskSpec& m = p.mask;
    m.cu_seqlens_q = m.cu_seqlens_k = m.q_length = m.k_start = m.k_length = m.q_position = nullptr;
  }
  double pairs = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = p.sequence(b);
    if (s.hi_shift <= s.lo_shift) continue;
    pairs += sum_of_clamped(s.q_length, s.hi_shift, s.k_length) - sum_of_clamped(s.q_length, s.lo_shift, s.k_length);
    if (p.mask.cu_seqlens_q == nullptr && p.mask.q_length == nullptr && p.mask.cu_seqlens_k == nullptr &&
        p.mask.k_start == nullptr && p.mask.k_length == nullptr && p.mask.q_position == nullptr) {
      return pairs * static_cast<double>(p.batch);  // all sequences alike
    }
  }
  return pairs;
}

double convention_flops(const Problem& p) {
  const bool uniform = p.mask.cu_seqlens_q == nullptr && p.mask.q_length == nullptr && p.mask.k_length == nullptr;
  const bool square_causal = p.mask.causal && p.seq_q == p.seq_k && p.mask.window_left < 0 && uniform;
  const double pairs =
      square_causal ? static_cast<double>(p.batch) * static_cast<double>(p.seq_q) * static_cast<double>(p.seq_k) / 2
                    : visible_pairs(p);
  const double per_pair = p.pass == Pass::backward
                              ? 3.0 * static_cast<double>(p.head_dim) + 2.0 * static_cast<double>(p.head_dim_v)
                              : static_cast<double>(p.head_dim + p.head_dim_v);
  return 2 * pairs * static_cast<double>(p.heads_q) * per_pair;
}

double operand_bytes(const Problem& p) {
  const double items = p.mask.varlen ? 1 : static_cast<double>(p.batch);
  const double size = static_cast<double>(dtype_size(p.dtype));
  const double rows_q = items * static_cast<double>(p.total_q) * static_cast<double>(p.heads_q);
  const double rows_k = items * static_cast<double>(p.total_k) * static_cast<double>(p.heads_kv);
  const double q = rows_q * static_cast<double>(p.head_dim) * size, k = rows_k * static_cast<double>(p.head_dim) * size;
  const double o = rows_q * static_cast<double>(p.head_dim_v) * size,
               v = rows_k * static_cast<double>(p.head_dim_v) * size;
  const double lse = 4 * rows_q;
  return p.pass == Pass::backward ? 2 * (q + k + v + o) + lse : q + k + v + o + lse;
}

bool nothing_to_write(const Problem& p, const ForwardOperands& operands) {
  const bool no_row = (p.batch == 0 && !p.mask.varlen) || p.total_q == 0 || p.heads_q == 0;
  return no_row || (p.head_dim_v == 0 && !operands.lse);
}

bool nothing_to_write(const Problem& p, const BackwardOperands& operands) {
  const bool sums = operands.grad_bias || operands.grad_sinks;
  const bool no_item = p.batch == 0 && !p.mask.varlen;
  const bool no_q = no_item || p.total_q == 0 || p.heads_q == 0, no_k = no_item || p.total_k == 0 || p.heads_kv == 0;
  return (no_q || (p.head_dim == 0 && !sums)) && (no_k || (p.head_dim == 0 && p.head_dim_v == 0));
}

void clear_sums(const Problem& p, const BackwardOperands& operands) {
  const BiasTensor& bias = operands.grad_bias;
  const auto size = [](std::int64_t stride, std::int64_t whole) { return stride != 0 ? whole : 1; };
  const std::int64_t batch = bias ? size(bias.stride_batch, p.batch) : 0, rows = size(bias.stride_q, p.seq_q);
  for (std::int64_t b = 0; b < batch && rows > 0; ++b) {
    for (std::int64_t h = 0; h < size(bias.stride_head, p.heads_q); ++h) {
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < size(bias.stride_k, p.seq_k); ++j) {
          store_float(bias.data, bias.dtype, bias.offset(b, h, i, j), 0);
        }
      }
    }
  }
  const HeadTensor& sinks = operands.grad_sinks;
  for (std::int64_t h = 0; sinks && h < p.heads_q; ++h) store_float(sinks.data, sinks.dtype, h * sinks.stride_head, 0);
}

}  // namespace onepass
