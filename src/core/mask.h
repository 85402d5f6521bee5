// The mask: an interval of keys per query row. One function serves host and device.
#pragma once

#include "core/base.h"

namespace onepass {

enum class Align : std::uint8_t { bottom_right, top_left };

/// "No bound" for windows: far outside every key index, small enough to add to one.
inline constexpr std::int64_t kFar = std::int64_t{1} << 60;

/// The mask as the caller gave it. Pointers are int32 arrays in the memory of the tensors, or null.
struct MaskSpec {
  bool causal = false;
  Align align = Align::bottom_right;
  std::int64_t window_left = -1;  // -1: unbounded
  std::int64_t window_right = -1;
  const std::int32_t* cu_seqlens_q = nullptr;  // (batch + 1); with cu_seqlens_k: packed sequences
  const std::int32_t* cu_seqlens_k = nullptr;  // (batch + 1)
  const std::int32_t* q_length = nullptr;      // (batch)
  const std::int32_t* k_start = nullptr;       // (batch)
  const std::int32_t* k_length = nullptr;      // (batch)
  const std::int32_t* q_position = nullptr;    // (batch)
  bool varlen = false;                         // packed operands; the pointers may still be null when only planning
};

struct Interval {
  std::int64_t begin = 0;
  std::int64_t end = 0;  // >= begin
  ONEPASS_INLINE std::int64_t size() const { return end - begin; }
};

/// One sequence of the batch: where its rows are, and which of its keys each query row sees. Keys are counted from
/// the sequence's own first key (k_start), queries from its own first query.
struct Sequence {
  std::int64_t q_row = 0;    // first query row in the operand's seq dimension (packed: cu_seqlens_q[b])
  std::int64_t k_row = 0;    // first key row (packed: cu_seqlens_k[b]; else k_start[b])
  std::int64_t k_start = 0;  // k_row within the batch item, the column of key 0 in a bias
  std::int64_t q_length = 0;
  std::int64_t k_length = 0;
  std::int64_t position = 0;      // p(i) = i + position, the key position of query row i
  std::int64_t lo_shift = -kFar;  // row i sees the keys max(0, i + lo_shift) <= j < min(k_length, i + hi_shift)
  std::int64_t hi_shift = kFar;

  /// Keys seen by query row i. Both ends grow with i.
  ONEPASS_INLINE Interval visible(std::int64_t i) const {
    const std::int64_t begin = clamp_to<std::int64_t>(i + lo_shift, 0, k_length);
    return {begin, max_of(begin, clamp_to<std::int64_t>(i + hi_shift, 0, k_length))};
  }
  /// Keys seen by at least one of the rows [i0, i1), as one interval; i0 < i1.
  ONEPASS_INLINE Interval visible_to_any(std::int64_t i0, std::int64_t i1) const {
    const std::int64_t begin = visible(i0).begin;
    return {begin, max_of(begin, visible(i1 - 1).end)};
  }
  /// Keys seen by all of the rows [i0, i1); i0 < i1.
  ONEPASS_INLINE Interval visible_to_all(std::int64_t i0, std::int64_t i1) const {
    const std::int64_t begin = visible(i1 - 1).begin;
    return {begin, max_of(begin, visible(i0).end)};
  }
  /// Query rows that see at least one of the keys [j0, j1), as one interval (rows inside it may see none of them
  /// only if the window itself is empty); j0 < j1.
  ONEPASS_INLINE Interval rows_seeing(std::int64_t j0, std::int64_t j1) const {
    if (hi_shift <= lo_shift) return {0, 0};
    const std::int64_t begin = clamp_to<std::int64_t>(j0 - hi_shift + 1, 0, q_length);
    return {begin, max_of(begin, clamp_to<std::int64_t>(j1 - lo_shift, 0, q_length))};
  }
};

/// Sequence `b` of a batch with the given maxima. Values from the length arrays are clamped, so that whatever they
/// hold, every row stays inside the operands (padded: seq_q and seq_k rows; packed: total_q and total_k rows).
ONEPASS_INLINE Sequence sequence_at(const MaskSpec& mask, std::int64_t b, std::int64_t seq_q, std::int64_t seq_k,
                                    std::int64_t total_q, std::int64_t total_k) {
  Sequence s;
  s.q_length = seq_q;
  s.k_length = seq_k;
  if (mask.cu_seqlens_q != nullptr) {
    s.q_row = clamp_to<std::int64_t>(mask.cu_seqlens_q[b], 0, total_q);
    s.q_length = clamp_to<std::int64_t>(mask.cu_seqlens_q[b + 1] - s.q_row, 0, min_of(seq_q, total_q - s.q_row));
  }
  if (mask.cu_seqlens_k != nullptr) {
    s.k_row = clamp_to<std::int64_t>(mask.cu_seqlens_k[b], 0, total_k);
    s.k_length = clamp_to<std::int64_t>(mask.cu_seqlens_k[b + 1] - s.k_row, 0, min_of(seq_k, total_k - s.k_row));
  }
  if (mask.q_length != nullptr) s.q_length = clamp_to<std::int64_t>(mask.q_length[b], 0, s.q_length);
  if (mask.k_start != nullptr) {
    s.k_start = clamp_to<std::int64_t>(mask.k_start[b], 0, s.k_length);
    s.k_row += s.k_start;
    s.k_length -= s.k_start;
  }
  if (mask.k_length != nullptr) s.k_length = clamp_to<std::int64_t>(mask.k_length[b], 0, s.k_length);
  s.position = mask.q_position != nullptr          ? std::int64_t{mask.q_position[b]}
               : mask.align == Align::bottom_right ? s.k_length - s.q_length
                                                   : 0;
  if (mask.window_left >= 0) s.lo_shift = s.position - min_of(mask.window_left, kFar);
  if (mask.window_right >= 0) s.hi_shift = s.position + min_of(mask.window_right, kFar) + 1;
  if (mask.causal) s.hi_shift = min_of(s.hi_shift, s.position + 1);
  return s;
}

}  // namespace onepass
