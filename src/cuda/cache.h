// Small kernels around the attention itself: the key-value cache of a decode, and the merge of partial results.
#pragma once

#include "core/problem.h"
#include "core/status.h"

namespace onepass::cuda {

struct CacheAppend {
  Tensor k_new, v_new;  // (batch, seq_new, heads_kv, dim), or absent
  std::int64_t seq_new = 0;
  const std::int32_t* cache_seqlens = nullptr;  // (batch), in device memory
  Tensor k, v;                                  // (batch, capacity, heads_kv, dim)
};

/// Writes the new rows behind each item's cache_seqlens, and the resulting key counts from k_start on into
/// lengths (batch). Lengths out of range are clamped to the cache: rows that have no place are not written.
Status append_to_cache(const Problem& problem, const CacheAppend& append, std::int32_t* lengths, const Launch& launch);

struct Partial {
  Tensor out;
  RowTensor lse;
};

/// As cpu::merge_partial (src/cpu/merge.h), in device memory.
Status merge_partial(const Problem& problem, const Partial& a, const Partial& b, const Partial& merged,
                     const Launch& launch);

}  // namespace onepass::cuda
