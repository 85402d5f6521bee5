#include "core/support.h"

#include <array>
#include <cinttypes>
#include <cmath>

#include "core/layout.h"

namespace onepass {
namespace {

Status check_size(const char* name, std::int64_t value) {
  if (value < 0)
    return invalid_argument("%s must be 0 or more: got %" PRId64 "; pass 0 for an empty problem", name, value);
  return {};
}

Layout layout_of(const Tensor& t, const Problem& p, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  return make_layout(t.data, t.dtype, dim, {p.mask.varlen ? 1 : p.batch, rows, heads},
                     {t.stride_batch, t.stride_seq, t.stride_head});
}
Layout layout_of(const RowTensor& t, const Problem& p) {
  return make_layout(t.data, DType::f32, p.total_q, {p.mask.varlen ? 1 : p.batch, p.heads_q},
                     {t.stride_batch, t.stride_head});
}
/// A broadcast dimension of a bias holds one entry.
Layout layout_of(const BiasTensor& t, const Problem& p) {
  return make_layout(t.data, t.dtype, 1,
                     {t.stride_batch != 0 ? p.batch : 1, t.stride_head != 0 ? p.heads_q : 1,
                      t.stride_q != 0 ? p.seq_q : 1, t.stride_k != 0 ? p.seq_k : 1},
                     {t.stride_batch, t.stride_head, t.stride_q, t.stride_k});
}
Layout layout_of(const HeadTensor& t, const Problem& p) {
  return make_layout(t.data, t.dtype, 1, {t.stride_batch != 0 ? p.batch : 1, p.heads_q},
                     {t.stride_batch, t.stride_head});
}

struct Named {
  const char* name;
  Layout layout;
};

template <std::size_t kOutputs, std::size_t kInputs>
Status check_overlap(const std::array<Named, kOutputs>& outputs, const std::array<Named, kInputs>& inputs) {
  for (std::size_t i = 0; i < kOutputs; ++i) {
    const Named& out = outputs[i];
    if (overlaps_itself(out.layout)) {
      return invalid_argument(
          "%s: an output's elements must not overlap: a stride is 0 or smaller than what it "
          "steps over; pass a contiguous tensor",
          out.name);
    }
    for (const Named& in : inputs) {
      if (overlap(out.layout, in.layout)) {
        return invalid_argument(
            "%s overlaps the input %s: outputs must have bytes of their own; pass a separate "
            "tensor",
            out.name, in.name);
      }
    }
    for (std::size_t j = 0; j < i; ++j) {
      if (overlap(out.layout, outputs[j].layout)) {
        return invalid_argument("%s overlaps the output %s: pass a separate tensor", out.name, outputs[j].name);
      }
    }
  }
  return {};
}

Status check_cu_seqlens(const char* name, const std::int32_t* offsets, std::int64_t batch, std::int64_t total,
                        std::int64_t longest) {
  if (offsets == nullptr) return {};
  if (offsets[0] != 0) return invalid_argument("%s must start at 0: got %d", name, offsets[0]);
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = std::int64_t{offsets[b + 1]} - offsets[b];
    if (length < 0) {
      return invalid_argument("%s must not decrease: entry %" PRId64 " is %d after %d", name, b + 1, offsets[b + 1],
                              offsets[b]);
    }
    if (length > longest) {
      return invalid_argument("%s: sequence %" PRId64 " has %" PRId64 " tokens, more than the declared maximum %" PRId64
                              "; pass a larger max_seqlen",
                              name, b, length, longest);
    }
  }
  if (offsets[batch] > total) {
    return invalid_argument("%s must end inside the operand: its last entry is %d of %" PRId64 " tokens", name,
                            offsets[batch], total);
  }
  return {};
}

/// Each value in [0, limit(b)].
template <class Limit>
Status check_values(const char* name, const std::int32_t* values, std::int64_t batch, Limit&& limit) {
  if (values == nullptr) return {};
  for (std::int64_t b = 0; b < batch; ++b) {
    if (values[b] < 0 || values[b] > limit(b)) {
      return invalid_argument("%s[%" PRId64 "] must be between 0 and %" PRId64 ": got %d", name, b, limit(b),
                              values[b]);
    }
  }
  return {};
}

}  // namespace

Status check_problem(const Problem& p) {
  ONEPASS_RETURN_IF_ERROR(check_size("batch", p.batch));
  ONEPASS_RETURN_IF_ERROR(check_size("seq_q", p.seq_q));
  ONEPASS_RETURN_IF_ERROR(check_size("seq_k", p.seq_k));
  ONEPASS_RETURN_IF_ERROR(check_size("heads_q", p.heads_q));
  ONEPASS_RETURN_IF_ERROR(check_size("heads_kv", p.heads_kv));
  ONEPASS_RETURN_IF_ERROR(check_size("head_dim", p.head_dim));
  ONEPASS_RETURN_IF_ERROR(check_size("head_dim_v", p.head_dim_v));
  if (p.heads_kv == 0 ? p.heads_q != 0 : p.heads_q % p.heads_kv != 0) {
    const std::int64_t nearest = p.heads_kv == 0 ? 0 : max_of<std::int64_t>(p.heads_q / p.heads_kv, 1) * p.heads_kv;
    return invalid_argument("heads_q must be a multiple of heads_kv: got %" PRId64 " query heads over %" PRId64
                            " KV heads; nearest: %" PRId64 " query heads",
                            p.heads_q, p.heads_kv, nearest);
  }
  const MaskSpec& mask = p.mask;
  if (mask.window_left < -1 || mask.window_right < -1) {
    return invalid_argument("a window bound must be -1 (unbounded) or more: got (%" PRId64 ", %" PRId64 ")",
                            mask.window_left, mask.window_right);
  }
  if (!mask.varlen && (mask.cu_seqlens_q != nullptr || mask.cu_seqlens_k != nullptr)) {
    return invalid_argument("cu_seqlens need packed operands of 3 dimensions (tokens, heads, head_dim)");
  }
  const ScoreSpec& score = p.score;
  if (!std::isfinite(score.scale))
    return invalid_argument("scale must be finite: got %g; NAN means 1/sqrt(head_dim)", score.scale);
  if (!std::isfinite(score.softcap) || score.softcap < 0) {
    return invalid_argument("softcap must be finite and 0 (none) or more: got %g", score.softcap);
  }
  if (score.bias && score.bias.dtype == DType::f64 && p.dtype != DType::f64) {
    return unsupported("bias: float64 goes with float64 operands only; pass float32");
  }
  return {};
}

Status check_lengths(const Problem& p) {
  const MaskSpec& mask = p.mask;
  ONEPASS_RETURN_IF_ERROR(check_cu_seqlens("cu_seqlens_q", mask.cu_seqlens_q, p.batch, p.total_q, p.seq_q));
  ONEPASS_RETURN_IF_ERROR(check_cu_seqlens("cu_seqlens_k", mask.cu_seqlens_k, p.batch, p.total_k, p.seq_k));
  const auto tokens = [&](const std::int32_t* offsets, std::int64_t padded) {
    return [=](std::int64_t b) -> std::int64_t { return offsets != nullptr ? offsets[b + 1] - offsets[b] : padded; };
  };
  const auto tokens_q = tokens(mask.cu_seqlens_q, p.seq_q), tokens_k = tokens(mask.cu_seqlens_k, p.seq_k);
  ONEPASS_RETURN_IF_ERROR(check_values("q_length", mask.q_length, p.batch, tokens_q));
  ONEPASS_RETURN_IF_ERROR(check_values("k_start", mask.k_start, p.batch, tokens_k));
  return check_values("k_length", mask.k_length, p.batch, [&](std::int64_t b) -> std::int64_t {
    return tokens_k(b) - (mask.k_start != nullptr ? mask.k_start[b] : 0);
  });
}

Status check_operands(const Problem& p, const ForwardOperands& o) {
  return check_overlap<2, 6>(
      {{{"out", layout_of(o.out, p, p.total_q, p.heads_q, p.head_dim_v)}, {"lse", layout_of(o.lse, p)}}},
      {{{"q", layout_of(o.q, p, p.total_q, p.heads_q, p.head_dim)},
        {"k", layout_of(o.k, p, p.total_k, p.heads_kv, p.head_dim)},
        {"v", layout_of(o.v, p, p.total_k, p.heads_kv, p.head_dim_v)},
        {"bias", layout_of(p.score.bias, p)},
        {"sinks", layout_of(p.score.sinks, p)},
        {"alibi_slopes", layout_of(p.score.alibi_slopes, p)}}});
}

Status check_operands(const Problem& p, const BackwardOperands& o) {
  return check_overlap<5, 10>({{{"grad_q", layout_of(o.grad_q, p, p.total_q, p.heads_q, p.head_dim)},
                                {"grad_k", layout_of(o.grad_k, p, p.total_k, p.heads_kv, p.head_dim)},
                                {"grad_v", layout_of(o.grad_v, p, p.total_k, p.heads_kv, p.head_dim_v)},
                                {"grad_bias", layout_of(o.grad_bias, p)},
                                {"grad_sinks", layout_of(o.grad_sinks, p)}}},
                              {{{"q", layout_of(o.q, p, p.total_q, p.heads_q, p.head_dim)},
                                {"k", layout_of(o.k, p, p.total_k, p.heads_kv, p.head_dim)},
                                {"v", layout_of(o.v, p, p.total_k, p.heads_kv, p.head_dim_v)},
                                {"out", layout_of(o.out, p, p.total_q, p.heads_q, p.head_dim_v)},
                                {"grad_out", layout_of(o.grad_out, p, p.total_q, p.heads_q, p.head_dim_v)},
                                {"lse", layout_of(o.lse, p)},
                                {"grad_lse", layout_of(o.grad_lse, p)},
                                {"bias", layout_of(p.score.bias, p)},
                                {"sinks", layout_of(p.score.sinks, p)},
                                {"alibi_slopes", layout_of(p.score.alibi_slopes, p)}}});
}

}  // namespace onepass
