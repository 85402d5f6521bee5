#include "core/support.h"

#include <array>
#include <cinttypes>
#include <cmath>
#include <limits>

#include "core/layout.h"

namespace onepass {
namespace {

Status check_size(const char* name, std::int64_t value) {
  if (value < 0)
    return invalid_argument("%s must be 0 or more: got %" PRId64 "; pass 0 for an empty problem", name, value);
  return {};
}

/// The numbers that plans are made of, sizes of a workspace among them, stay below 2^63 with room to spare. Operands
/// that exist are smaller by far; planning needs none, and inputs may be broadcast.
Status check_magnitude(const Problem& p) {
  using Wide = unsigned __int128;
  const auto wide = [](std::int64_t x) { return static_cast<Wide>(x); };
  const Wide batch = wide(p.batch), heads = wide(p.heads_q), longest = wide(max_of(p.seq_q, p.seq_k));
  // Empty items cost nothing, however many there are, but where their lengths are in memory.
  const Wide rows = p.mask.varlen ? wide(max_of(p.total_q, p.total_k)) + batch : batch * longest;
  const Wide row = wide(p.head_dim) + wide(p.head_dim_v) + 64;
  constexpr Wide kMostElements = Wide{1} << 55, kMostRows = Wide{1} << 60;
  const auto fits = [](Wide a, Wide b, Wide limit) { return a <= limit && b <= limit && a * b <= limit; };
  if (fits(rows, heads, kMostElements) && fits(rows * heads, row, kMostElements) && fits(batch, heads, kMostRows) &&
      fits(batch * heads, longest, kMostRows)) {
    return {};
  }
  return invalid_argument("the problem is too large: %" PRId64 " items of %" PRId64 " queries and %" PRId64
                          " keys, %" PRId64 " heads and head_dim %" PRId64 " pass 2^55 elements; split it",
                          p.batch, p.seq_q, p.seq_k, p.heads_q, p.head_dim);
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

/// What a call writes or reads.
class NamedList {
 public:
  void add(const char* name, const Layout& layout) {
    if (layout.run != 0) items_[count_++] = {name, layout};
  }
  const Named* begin() const { return items_.data(); }
  const Named* end() const { return items_.data() + count_; }

 private:
  std::array<Named, 20> items_;
  std::size_t count_ = 0;
};

Status check_overlap(const NamedList& outputs, const NamedList& inputs) {
  for (const Named& out : outputs) {
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
    for (const Named& other : outputs) {
      if (&other == &out) break;
      if (overlap(out.layout, other.layout)) {
        return invalid_argument("%s overlaps the output %s: pass a separate tensor", out.name, other.name);
      }
    }
  }
  return {};
}

/// The inputs that every call may have: they are read while outputs are written, or after.
void add_modifiers(const Problem& p, NamedList& inputs) {
  const auto integers = [&](const char* name, const void* data, std::int64_t count, DType of_same_size) {
    inputs.add(name, make_layout(data, of_same_size, count, {}, {}));
  };
  inputs.add("bias", layout_of(p.score.bias, p));
  inputs.add("sinks", layout_of(p.score.sinks, p));
  inputs.add("alibi_slopes", layout_of(p.score.alibi_slopes, p));
  integers("cu_seqlens_q", p.mask.cu_seqlens_q, p.batch + 1, DType::f32);
  integers("cu_seqlens_k", p.mask.cu_seqlens_k, p.batch + 1, DType::f32);
  integers("q_length", p.mask.q_length, p.batch, DType::f32);
  integers("k_start", p.mask.k_start, p.batch, DType::f32);
  integers("k_length", p.mask.k_length, p.batch, DType::f32);
  integers("q_position", p.mask.q_position, p.batch, DType::f32);
  integers("dropout_state", p.score.dropout.state, 2, DType::f64);
}

/// Bytes that belong to the call alone while it runs.
Layout layout_of(const Workspace& workspace) {
  return make_layout(workspace.data, DType::f32, static_cast<std::int64_t>(workspace.size / 4), {}, {});
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
  ONEPASS_RETURN_IF_ERROR(check_magnitude(p));
  const ScoreSpec& score = p.score;
  // Scores are float32: what is infinite or 0 there would turn all of them into NaN. Beyond this scale products that
  // float32 (and bfloat16 hardware, without denormal numbers) takes for 0 would be scores.
  constexpr double kLargest = std::numeric_limits<float>::max(), kSmallest = std::numeric_limits<float>::min();
  constexpr double kLargestScale = 1e30;
  if (!(std::fabs(score.scale) <= kLargestScale)) {
    return invalid_argument("scale must be between %g and %g: got %g; NAN means 1/sqrt(head_dim)", -kLargestScale,
                            kLargestScale, score.scale);
  }
  if (score.softcap != 0 && !(score.softcap >= kSmallest && score.softcap <= kLargest)) {
    return invalid_argument("softcap must be 0 (none) or between %g and %g: got %g; nearest: %g", kSmallest, kLargest,
                            score.softcap, score.softcap > kLargest ? kLargest : 0.0);
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

Status check_operands(const Problem& p, const ForwardOperands& o, const Workspace& workspace, const Append& append) {
  NamedList outputs, inputs;
  const Layout k = layout_of(o.k, p, p.total_k, p.heads_kv, p.head_dim),
               v = layout_of(o.v, p, p.total_k, p.heads_kv, p.head_dim_v);
  const bool appends = static_cast<bool>(append.k_new);
  outputs.add("out", layout_of(o.out, p, p.total_q, p.heads_q, p.head_dim_v));
  outputs.add("lse", layout_of(o.lse, p));
  (appends ? outputs : inputs).add(append.k_name, k);
  (appends ? outputs : inputs).add(append.v_name, v);
  outputs.add("workspace", layout_of(workspace));
  inputs.add("q", layout_of(o.q, p, p.total_q, p.heads_q, p.head_dim));
  inputs.add("k_new", layout_of(append.k_new, p, append.seq_new, p.heads_kv, p.head_dim));
  inputs.add("v_new", layout_of(append.v_new, p, append.seq_new, p.heads_kv, p.head_dim_v));
  inputs.add("cache_seqlens", make_layout(append.cache_seqlens, DType::f32, p.batch, {}, {}));
  add_modifiers(p, inputs);
  return check_overlap(outputs, inputs);
}

Status check_operands(const Problem& p, const BackwardOperands& o, const Workspace& workspace) {
  NamedList outputs, inputs;
  outputs.add("grad_q", layout_of(o.grad_q, p, p.total_q, p.heads_q, p.head_dim));
  outputs.add("grad_k", layout_of(o.grad_k, p, p.total_k, p.heads_kv, p.head_dim));
  outputs.add("grad_v", layout_of(o.grad_v, p, p.total_k, p.heads_kv, p.head_dim_v));
  outputs.add("grad_bias", layout_of(o.grad_bias, p));
  outputs.add("grad_sinks", layout_of(o.grad_sinks, p));
  outputs.add("workspace", layout_of(workspace));
  inputs.add("q", layout_of(o.q, p, p.total_q, p.heads_q, p.head_dim));
  inputs.add("k", layout_of(o.k, p, p.total_k, p.heads_kv, p.head_dim));
  inputs.add("v", layout_of(o.v, p, p.total_k, p.heads_kv, p.head_dim_v));
  inputs.add("out", layout_of(o.out, p, p.total_q, p.heads_q, p.head_dim_v));
  inputs.add("grad_out", layout_of(o.grad_out, p, p.total_q, p.heads_q, p.head_dim_v));
  inputs.add("lse", layout_of(o.lse, p));
  inputs.add("grad_lse", layout_of(o.grad_lse, p));
  add_modifiers(p, inputs);
  return check_overlap(outputs, inputs);
}

}  // namespace onepass
