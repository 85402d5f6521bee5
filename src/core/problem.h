// A checked, normalised attention problem: sizes, operands, mask and score modifiers. Everything behind the C ABI
// works on these types; src/api makes them from DLPack tensors.
#pragma once

#include "core/base.h"
#include "core/dropout.h"
#include "core/mask.h"

namespace onepass {

enum class Pass : std::uint8_t { forward, backward, decode };

/// A (batch, seq, heads, dim) operand. Strides in elements; dim is contiguous. Packed operands have stride_batch 0.
struct Tensor {
  void* data = nullptr;  // null: absent
  DType dtype = DType::f32;
  std::int64_t stride_batch = 0;
  std::int64_t stride_seq = 0;
  std::int64_t stride_head = 0;

  ONEPASS_INLINE explicit operator bool() const { return data != nullptr; }
  /// Offset in elements of row `seq` of head `head` of item `b`.
  ONEPASS_INLINE std::int64_t offset(std::int64_t b, std::int64_t seq, std::int64_t head) const {
    return b * stride_batch + seq * stride_seq + head * stride_head;
  }
  /// Address of that row.
  ONEPASS_INLINE char* row(std::int64_t b, std::int64_t seq, std::int64_t head) const {
    return static_cast<char*>(data) + offset(b, seq, head) * dtype_size(dtype);
  }
};

/// float32, (batch, heads_q, seq_q), packed (heads_q, total_q): lse, D and their gradients. seq is contiguous.
struct RowTensor {
  float* data = nullptr;
  std::int64_t stride_batch = 0;
  std::int64_t stride_head = 0;

  ONEPASS_INLINE explicit operator bool() const { return data != nullptr; }
  ONEPASS_INLINE float* row(std::int64_t b, std::int64_t head, std::int64_t seq) const {
    return data + b * stride_batch + head * stride_head + seq;
  }
};

/// (batch, heads_q, seq_q, seq_k); a broadcast dimension has stride 0. Indexed by a sequence's own rows and by
/// k_start + key, packed problems too.
struct BiasTensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride_batch = 0, stride_head = 0, stride_q = 0, stride_k = 0;

  ONEPASS_INLINE explicit operator bool() const { return data != nullptr; }
  ONEPASS_INLINE std::int64_t offset(std::int64_t b, std::int64_t head, std::int64_t i, std::int64_t j) const {
    return b * stride_batch + head * stride_head + i * stride_q + j * stride_k;
  }
};

/// (heads_q) of any float type, or (batch, heads_q) with a batch stride.
struct HeadTensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t stride_batch = 0, stride_head = 1;

  ONEPASS_INLINE explicit operator bool() const { return data != nullptr; }
};

struct ScoreSpec {
  double scale = 1;
  double softcap = 0;       // 0: none
  HeadTensor alibi_slopes;  // float32
  BiasTensor bias;
  HeadTensor sinks;
  DropoutSpec dropout;

  /// True if scores need more than scale and mask. Sinks do not count: they enter once a row.
  ONEPASS_INLINE bool modified() const { return softcap != 0 || alibi_slopes || bias || dropout.threshold != 0; }
};

/// Sizes and options. Packed problems have seq_q and seq_k as declared maxima and total_q, total_k as row counts;
/// else total_q = seq_q and total_k = seq_k, the rows of one item.
struct Problem {
  Pass pass = Pass::forward;
  DType dtype = DType::f32;
  std::int64_t batch = 0;
  std::int64_t seq_q = 0, seq_k = 0;
  std::int64_t total_q = 0, total_k = 0;
  std::int64_t heads_q = 0, heads_kv = 0;
  std::int64_t head_dim = 0, head_dim_v = 0;
  MaskSpec mask;
  ScoreSpec score;
  int deterministic = -1;    // -1: the kernel's default
  bool on_device = false;    // operands and length arrays are in CUDA memory, which the host never reads
  bool aligned_rows = true;  // every row of every operand begins at a multiple of 16 bytes

  ONEPASS_INLINE std::int64_t group() const { return heads_kv > 0 ? heads_q / heads_kv : 1; }
  ONEPASS_INLINE std::int64_t kv_head(std::int64_t head) const { return head / group(); }
  ONEPASS_INLINE Sequence sequence(std::int64_t b) const {
    return sequence_at(mask, b, seq_q, seq_k, total_q, total_k);
  }
};

struct ForwardOperands {
  Tensor q, k, v;
  Tensor out;     // dtype of q, or f32
  RowTensor lse;  // may be absent
};

struct BackwardOperands {
  Tensor q, k, v, out, grad_out;
  RowTensor lse, grad_lse;  // grad_lse may be absent
  Tensor grad_q, grad_k, grad_v;
  BiasTensor grad_bias;   // may be absent; strides as the bias, 0 where it broadcasts
  HeadTensor grad_sinks;  // may be absent
};

/// How to run: what is not part of the problem's meaning.
struct Launch {
  void* workspace = nullptr;  // Kernel::workspace bytes, 64-byte aligned, of any content
  std::size_t workspace_size = 0;
  int threads = 1;         // CPU: at least 1
  int device = 0;          // CUDA ordinal
  void* stream = nullptr;  // cudaStream_t
};

}  // namespace onepass
