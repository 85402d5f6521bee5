// DLPack tensors to the core's types, with every check that needs one tensor alone.
#pragma once

#include <initializer_list>

#include "core/problem.h"
#include "core/status.h"

namespace onepass::api {

/// What a tensor argument may be. Sizes of -1 accept anything.
struct Expect {
  const char* name;
  bool planning = false;  // data pointers may be null
};

/// Dimensions of a checked tensor: rank, sizes, strides in elements (0 for dimensions of size 1), address.
struct Parsed {
  static constexpr int kMaxRank = 4;
  int rank = 0;
  std::int64_t size[kMaxRank] = {}, stride[kMaxRank] = {};
  DType dtype = DType::f32;
  bool is_float = true;  // else int32 or int64, by `bits`
  int bits = 0;
  void* data = nullptr;  // never null for a given tensor: a stand-in address when planning or when it is empty
};

/// Rank within [min_rank, max_rank]; last dimension contiguous; no negative stride; element-aligned;
/// offsets that fit 63 bits.
Status parse(const Expect& expect, const DLTensor* tensor, int min_rank, int max_rank, Parsed* parsed);

/// Same, and then the sizes and element type asked for.
Status require_shape(const Expect& expect, const Parsed& parsed, std::initializer_list<std::int64_t> sizes);
Status require_dtype(const Expect& expect, const Parsed& parsed, DType dtype);

/// (batch, seq, heads, dim), or (tokens, heads, dim) when packed.
Status parse_operand(const Expect& expect, const DLTensor* tensor, bool packed, Parsed* parsed, Tensor* operand);
/// (batch, heads, seq) float32, or (heads, tokens).
Status parse_rows(const Expect& expect, const DLTensor* tensor, const Problem& problem, RowTensor* rows);
/// Broadcastable to (batch, heads_q, seq_q, seq_k).
Status parse_bias(const Expect& expect, const DLTensor* tensor, const Problem& problem, BiasTensor* bias);
/// (heads_q), or (batch, heads_q) where `per_batch`.
Status parse_heads(const Expect& expect, const DLTensor* tensor, const Problem& problem, bool per_batch,
                   HeadTensor* heads);
/// int32 of `count` entries.
Status parse_int32(const Expect& expect, const DLTensor* tensor, std::int64_t count, const std::int32_t** values);

}  // namespace onepass::api
