#include "api/tensor.h"

#include <cinttypes>
#include <cstdio>
#include <string>

namespace onepass::api {
namespace {

/// Address of tensors that own no byte to read: empty ones, and all of them when planning.
alignas(64) char g_no_data[64];

std::string shape_text(std::initializer_list<std::int64_t> sizes) {
  std::string text = "(";
  for (const std::int64_t size : sizes)
    text += (text.size() > 1 ? ", " : "") + (size < 0 ? "any" : std::to_string(size));
  return text + ")";
}
std::string shape_text(const Parsed& p) {
  std::string text = "(";
  for (int i = 0; i < p.rank; ++i) text += (i > 0 ? ", " : "") + std::to_string(p.size[i]);
  return text + ")";
}

Status parse_dtype(const Expect& expect, const DLTensor& t, Parsed* parsed) {
  parsed->bits = t.dtype.bits;
  if (t.dtype.lanes == 1) {
    if (t.dtype.code == kDLFloat && t.dtype.bits == 32) return parsed->dtype = DType::f32, Status{};
    if (t.dtype.code == kDLFloat && t.dtype.bits == 16) return parsed->dtype = DType::f16, Status{};
    if (t.dtype.code == kDLFloat && t.dtype.bits == 64) return parsed->dtype = DType::f64, Status{};
    if (t.dtype.code == kDLBfloat && t.dtype.bits == 16) return parsed->dtype = DType::bf16, Status{};
    if (t.dtype.code == kDLInt && (t.dtype.bits == 32 || t.dtype.bits == 64)) return parsed->is_float = false, Status{};
  }
  return invalid_argument(
      "%s: unknown dtype (DLPack code %d, %d bits, %d lanes); supported: float32, float16, "
      "bfloat16, float64, and int32 for lengths",
      expect.name, t.dtype.code, t.dtype.bits, t.dtype.lanes);
}

}  // namespace

Status parse(const Expect& expect, const DLTensor* tensor, int min_rank, int max_rank, Parsed* parsed) {
  const char* name = expect.name;
  if (tensor == nullptr) return invalid_argument("%s is null: this call needs it", name);
  if (tensor->ndim < min_rank || tensor->ndim > max_rank) {
    return invalid_argument("%s must have %d%s dimensions: got %d", name, min_rank,
                            max_rank > min_rank ? (" to " + std::to_string(max_rank)).c_str() : "", tensor->ndim);
  }
  if (tensor->ndim > 0 && tensor->shape == nullptr) return invalid_argument("%s: its shape is null", name);
  ONEPASS_RETURN_IF_ERROR(parse_dtype(expect, *tensor, parsed));
  parsed->rank = tensor->ndim;
  bool empty = false;  // then no stride matters: nothing is read
  for (int i = 0; i < parsed->rank; ++i) empty = empty || tensor->shape[i] == 0;
  unsigned __int128 reach = 1, compact = 1;  // elements from the base to the last one; product of sizes
  constexpr unsigned __int128 kLimit = static_cast<unsigned __int128>(1) << 60;
  for (int i = parsed->rank - 1; i >= 0; --i) {
    const std::int64_t size = tensor->shape[i];
    if (size < 0) return invalid_argument("%s: size of dimension %d must be 0 or more: got %" PRId64, name, i, size);
    const std::int64_t stride =
        tensor->strides != nullptr && !empty ? tensor->strides[i] : static_cast<std::int64_t>(compact);
    if (size > 1 && stride < 0) {
      return invalid_argument("%s: negative strides are not served: dimension %d has %" PRId64 "; pass a copy", name, i,
                              stride);
    }
    if (size > 1 && i == parsed->rank - 1 && stride != 1) {
      return invalid_argument(
          "%s: the last dimension must be contiguous (stride 1): got stride %" PRId64 "; pass a copy", name, stride);
    }
    parsed->size[i] = size;
    parsed->stride[i] = size > 1 ? stride : 0;
    if (size > 1) reach += static_cast<unsigned __int128>(size - 1) * static_cast<unsigned __int128>(parsed->stride[i]);
    compact *= static_cast<unsigned __int128>(max_of<std::int64_t>(size, 1));
    if (reach > kLimit || compact > kLimit) {
      return invalid_argument("%s: its elements must lie within 2^60 of its first: sizes or strides are too large",
                              name);
    }
  }
  if (tensor->data == nullptr && !empty && !expect.planning)
    return invalid_argument("%s: its data pointer is null", name);
  parsed->data = tensor->data == nullptr || empty ? g_no_data : static_cast<char*>(tensor->data) + tensor->byte_offset;
  const std::uintptr_t element = static_cast<std::uintptr_t>(parsed->bits / 8);
  if (reinterpret_cast<std::uintptr_t>(parsed->data) % element != 0) {
    return invalid_argument("%s: its address must be a multiple of the element size: it is off by %d of %d bytes", name,
                            static_cast<int>(reinterpret_cast<std::uintptr_t>(parsed->data) % element),
                            static_cast<int>(element));
  }
  return {};
}

Status require_shape(const Expect& expect, const Parsed& parsed, std::initializer_list<std::int64_t> sizes) {
  bool same = parsed.rank == static_cast<int>(sizes.size());
  for (int i = 0; same && i < parsed.rank; ++i) same = sizes.begin()[i] < 0 || sizes.begin()[i] == parsed.size[i];
  if (same) return {};
  return invalid_argument("%s must have shape %s: got %s", expect.name, shape_text(sizes).c_str(),
                          shape_text(parsed).c_str());
}

Status require_dtype(const Expect& expect, const Parsed& parsed, DType dtype) {
  if (parsed.is_float && parsed.dtype == dtype) return {};
  return invalid_argument("%s must be of dtype %s, as q is: got %s", expect.name, dtype_name(dtype),
                          parsed.is_float ? dtype_name(parsed.dtype) : "an integer type");
}

Status parse_operand(const Expect& expect, const DLTensor* tensor, bool packed, Parsed* parsed, Tensor* operand) {
  if (tensor != nullptr && tensor->ndim == (packed ? 4 : 3)) {
    return packed ? invalid_argument("%s must have 3 dimensions (tokens, heads, dim) where cu_seqlens are given: got 4",
                                     expect.name)
                  : invalid_argument(
                        "%s must have 4 dimensions (batch, seq, heads, dim): got 3; packed sequences need cu_seqlens",
                        expect.name);
  }
  ONEPASS_RETURN_IF_ERROR(parse(expect, tensor, packed ? 3 : 4, packed ? 3 : 4, parsed));
  if (!parsed->is_float)
    return invalid_argument("%s must be float32, float16 or bfloat16: got an integer type", expect.name);
  const std::int64_t* stride = parsed->stride + (packed ? 0 : 1);
  *operand = {parsed->data, parsed->dtype, packed ? 0 : parsed->stride[0], stride[0], stride[1]};
  return {};
}

Status parse_rows(const Expect& expect, const DLTensor* tensor, const Problem& problem, RowTensor* rows) {
  Parsed parsed;
  if (problem.mask.varlen) {
    ONEPASS_RETURN_IF_ERROR(parse(expect, tensor, 2, 2, &parsed));
    ONEPASS_RETURN_IF_ERROR(require_shape(expect, parsed, {problem.heads_q, problem.total_q}));
  } else {
    ONEPASS_RETURN_IF_ERROR(parse(expect, tensor, 3, 3, &parsed));
    ONEPASS_RETURN_IF_ERROR(require_shape(expect, parsed, {problem.batch, problem.heads_q, problem.seq_q}));
  }
  if (!parsed.is_float || parsed.dtype != DType::f32) {
    return invalid_argument("%s must be float32: got %s", expect.name,
                            parsed.is_float ? dtype_name(parsed.dtype) : "an integer type");
  }
  const int head = problem.mask.varlen ? 0 : 1;
  *rows = {static_cast<float*>(parsed.data), problem.mask.varlen ? 0 : parsed.stride[0], parsed.stride[head]};
  return {};
}

Status parse_bias(const Expect& expect, const DLTensor* tensor, const Problem& problem, BiasTensor* bias) {
  Parsed parsed;
  ONEPASS_RETURN_IF_ERROR(parse(expect, tensor, 0, 4, &parsed));
  if (!parsed.is_float)
    return unsupported("%s must be a float type: got an integer type; pass 0 and -inf as float32", expect.name);
  const std::int64_t full[4] = {problem.batch, problem.heads_q, problem.seq_q, problem.seq_k};
  std::int64_t stride[4] = {};
  for (int i = 0; i < parsed.rank; ++i) {
    const int axis = 4 - parsed.rank + i;
    if (parsed.size[i] != 1 && parsed.size[i] != full[axis]) {
      return invalid_argument("%s must broadcast to (batch, heads_q, seq_q, seq_k) = %s: got %s", expect.name,
                              shape_text({full[0], full[1], full[2], full[3]}).c_str(), shape_text(parsed).c_str());
    }
    stride[axis] = parsed.size[i] == 0 ? 1 : parsed.stride[i];  // 0 would say that an empty dimension broadcasts
  }
  *bias = {parsed.data, parsed.dtype, stride[0], stride[1], stride[2], stride[3]};
  return {};
}

Status parse_heads(const Expect& expect, const DLTensor* tensor, const Problem& problem, bool per_batch,
                   HeadTensor* heads) {
  Parsed parsed;
  ONEPASS_RETURN_IF_ERROR(parse(expect, tensor, 1, per_batch ? 2 : 1, &parsed));
  if (parsed.rank == 2) {
    ONEPASS_RETURN_IF_ERROR(require_shape(expect, parsed, {problem.batch, problem.heads_q}));
  } else {
    ONEPASS_RETURN_IF_ERROR(require_shape(expect, parsed, {problem.heads_q}));
  }
  if (!parsed.is_float) return invalid_argument("%s must be a float type: got an integer type", expect.name);
  *heads = {parsed.data, parsed.dtype, parsed.rank == 2 ? parsed.stride[0] : 0, parsed.stride[parsed.rank - 1]};
  return {};
}

Status parse_int32(const Expect& expect, const DLTensor* tensor, std::int64_t count, const std::int32_t** values) {
  Parsed parsed;
  ONEPASS_RETURN_IF_ERROR(parse(expect, tensor, 1, 1, &parsed));
  if (parsed.is_float || parsed.bits != 32) {
    return invalid_argument("%s must be int32: got %s", expect.name,
                            parsed.is_float ? dtype_name(parsed.dtype) : "int64");
  }
  ONEPASS_RETURN_IF_ERROR(require_shape(expect, parsed, {count}));
  // Without data (planning) the lengths are unknown: the declared maxima stand in.
  *values = tensor->data != nullptr ? static_cast<const std::int32_t*>(parsed.data) : nullptr;
  return {};
}

}  // namespace onepass::api
