#include "shape.h"

#include <algorithm>

namespace onepass::cli {
namespace {

/// Replaces every shape by one copy for each value, with the value in the given members.
template <class T, class... Members>
void vary(std::vector<Shape>& shapes, const std::vector<T>& values, Members... members) {
  if (values.empty()) return;
  std::vector<Shape> varied;
  for (const Shape& shape : shapes) {
    for (const T& value : values) {
      Shape& copy = varied.emplace_back(shape);
      ((copy.*members = value), ...);
    }
  }
  shapes = std::move(varied);
}

/// Two members with lists of their own and one that sets both. The first's list alone sets both too.
template <class Member>
void vary_pair(std::vector<Shape>& shapes, const std::vector<std::int64_t>& both,
               const std::vector<std::int64_t>& first, const std::vector<std::int64_t>& second, Member a, Member b) {
  if (both.empty() && second.empty()) return vary(shapes, first, a, b);
  vary(shapes, both, a, b);
  vary(shapes, first, a);
  vary(shapes, second, b);
}

std::int64_t longest(const Array& offsets) {
  std::int64_t longest = 0;
  const auto* values = offsets.as<std::int32_t>();
  for (std::int64_t i = 1; i < offsets.count(); ++i) {
    longest = std::max(longest, std::int64_t{values[i]} - values[i - 1]);
  }
  return longest;
}

std::int64_t total(const Array& offsets) {
  const std::int64_t count = offsets.count();
  return count > 0 ? std::max(0, offsets.as<std::int32_t>()[count - 1]) : 0;
}

}  // namespace

std::vector<Shape> shapes_of(const Options& o, onepass_pass_t pass) {
  Shape base;
  base.pass = pass;
  base.causal = o.causal;
  std::vector<Shape> shapes = {base};
  vary(shapes, o.dtypes, &Shape::dtype);
  vary(shapes, o.batch, &Shape::batch);
  vary_pair(shapes, o.heads, o.heads_q, o.heads_kv, &Shape::heads_q, &Shape::heads_kv);
  vary_pair(shapes, o.head_dim, {}, o.head_dim_v, &Shape::head_dim, &Shape::head_dim_v);
  if (pass == ONEPASS_DECODE) {
    vary(shapes, o.seq_k.empty() ? o.seq : o.seq_k, &Shape::seq_k);
    vary(shapes, o.seq_q.empty() ? std::vector<std::int64_t>{1} : o.seq_q, &Shape::seq_q);
  } else {
    vary_pair(shapes, o.seq, o.seq_q, o.seq_k, &Shape::seq_q, &Shape::seq_k);
  }
  vary(shapes, o.kernels, &Shape::kernel);
  return shapes;
}

Status load_modifiers(const Options& o, const TensorSource& source, Attention& attention) {
  const auto load = [&](const std::string& name, Array& array, bool integers) -> Status {
    if (name.empty()) return {};
    ONEPASS_ASSIGN(array, integers ? source.load_int32(name) : source.load(name));
    return {};
  };
  ONEPASS_RETURN_IF_ERROR(load(o.cu_seqlens_q, attention.cu_seqlens_q, true));
  ONEPASS_RETURN_IF_ERROR(load(o.cu_seqlens_k, attention.cu_seqlens_k, true));
  ONEPASS_RETURN_IF_ERROR(load(o.q_length, attention.q_length, true));
  ONEPASS_RETURN_IF_ERROR(load(o.k_start, attention.k_start, true));
  ONEPASS_RETURN_IF_ERROR(load(o.k_length, attention.k_length, true));
  ONEPASS_RETURN_IF_ERROR(load(o.q_position, attention.q_position, true));
  ONEPASS_RETURN_IF_ERROR(load(o.alibi, attention.alibi, false));
  ONEPASS_RETURN_IF_ERROR(load(o.bias, attention.bias, false));
  ONEPASS_RETURN_IF_ERROR(load(o.sinks, attention.sinks, false));
  // One list of offsets is enough where queries and keys are packed alike.
  if (attention.cu_seqlens_q && !attention.cu_seqlens_k) attention.cu_seqlens_k = attention.cu_seqlens_q;
  if (attention.cu_seqlens_q) attention.max_seqlen_q = longest(attention.cu_seqlens_q);
  if (attention.cu_seqlens_k) attention.max_seqlen_k = longest(attention.cu_seqlens_k);
  return {};
}

Status plan_shape(const Shape& s, const Options& options, Attention& a) {
  options.apply(a);
  a.causal = s.causal;
  a.kernel = s.kernel;
  ONEPASS_RETURN_IF_ERROR(load_modifiers(options, TensorSource(), a));
  if (a.packed()) {
    const std::int64_t rows_q = total(a.cu_seqlens_q ? a.cu_seqlens_q : a.cu_seqlens_k), rows_k = total(a.cu_seqlens_k);
    a.q = Array::planned(s.dtype, {rows_q, s.heads_q, s.head_dim});
    a.k = Array::planned(s.dtype, {rows_k, s.heads_kv, s.head_dim});
    a.v = Array::planned(s.dtype, {rows_k, s.heads_kv, s.head_dim_v});
  } else {
    a.q = Array::planned(s.dtype, {s.batch, s.seq_q, s.heads_q, s.head_dim});
    a.k = Array::planned(s.dtype, {s.batch, s.seq_k, s.heads_kv, s.head_dim});
    a.v = Array::planned(s.dtype, {s.batch, s.seq_k, s.heads_kv, s.head_dim_v});
  }
  if (s.pass == ONEPASS_DECODE) a.cache_seqlens = Array::planned(ElementType::i32, {s.batch});
  a.plan_outputs(s.pass);
  return {};
}

}  // namespace onepass::cli
