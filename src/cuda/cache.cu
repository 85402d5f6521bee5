#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/cache.h"
#include "cuda/host/launch.h"

namespace onepass::cuda {
namespace {

constexpr int kThreads = 128;

/// A block for each (item, new row, head), at least one for each item; the first thread of an item's first block writes
/// its length.
__global__ void append_rows(Problem p, CacheAppend a, std::int32_t* lengths, std::int64_t blocks_per_item) {
  const std::int64_t b = blockIdx.x / blocks_per_item, at = blockIdx.x % blocks_per_item;
  const std::int64_t held = clamp_to<std::int64_t>(a.cache_seqlens[b], 0, p.seq_k);
  if (at == 0 && threadIdx.x == 0) {
    const std::int64_t start = p.mask.k_start != nullptr ? p.mask.k_start[b] : 0;
    lengths[b] = static_cast<std::int32_t>(clamp_to<std::int64_t>(held + a.seq_new - start, 0, p.seq_k));
  }
  const std::int64_t i = at / max_of<std::int64_t>(p.heads_kv, 1), head = at % max_of<std::int64_t>(p.heads_kv, 1);
  if (!a.k_new || i >= a.seq_new || held + i >= p.seq_k || p.heads_kv == 0) return;
  // Storage types have 2 or 4 bytes; rows are element-aligned, so 2 bytes at a time serve both.
  const auto copy = [](char* to, const char* from, std::int64_t bytes) {
    for (std::int64_t n = threadIdx.x; n < bytes / 2; n += kThreads) {
      reinterpret_cast<std::uint16_t*>(to)[n] = reinterpret_cast<const std::uint16_t*>(from)[n];
    }
  };
  copy(a.k.row(b, held + i, head), a.k_new.row(b, i, head), p.head_dim * dtype_size(p.dtype));
  copy(a.v.row(b, held + i, head), a.v_new.row(b, i, head), p.head_dim_v * dtype_size(p.dtype));
}

__device__ float load(const char* row, DType dtype, std::int64_t n) {
  if (dtype == DType::f32) return reinterpret_cast<const float*>(row)[n];
  if (dtype == DType::f16) return __half2float(reinterpret_cast<const __half*>(row)[n]);
  return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[n]);
}
__device__ void store(char* row, DType dtype, std::int64_t n, float x) {
  if (dtype == DType::f32) reinterpret_cast<float*>(row)[n] = x;
  if (dtype == DType::f16) reinterpret_cast<__half*>(row)[n] = __float2half_rn(x);
  if (dtype == DType::bf16) reinterpret_cast<__nv_bfloat16*>(row)[n] = __float2bfloat16_rn(x);
}

/// A warp for each row.
__global__ void merge_rows(Problem p, Partial a, Partial z, Partial merged, std::int64_t rows) {
  const std::int64_t n = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  if (n >= rows) return;
  const int lane = threadIdx.x % 32;
  const std::int64_t head = n % p.heads_q, i = n / p.heads_q % p.total_q, b = n / (p.heads_q * p.total_q);
  const float lse_a = *a.lse.row(b, head, i), lse_z = *z.lse.row(b, head, i);
  __syncwarp();  // the whole row has read before lane 0 writes: lse may be lse_a or lse_b
  const float no_key = -INFINITY;
  const char *row_a = a.out.row(b, i, head), *row_z = z.out.row(b, i, head);
  char* target = merged.out.row(b, i, head);
  float total = no_key;
  if (lse_a == no_key && lse_z == no_key) {
    for (std::int64_t c = lane; c < p.head_dim_v; c += 32) store(target, merged.out.dtype, c, 0.0f);
  } else if (lse_a == no_key || lse_z == no_key) {
    // A conversion to the same type and back changes no bit of a number.
    total = lse_a == no_key ? lse_z : lse_a;
    const Partial& part = lse_a == no_key ? z : a;
    const char* row = lse_a == no_key ? row_z : row_a;
    for (std::int64_t c = lane; c < p.head_dim_v; c += 32) {
      store(target, merged.out.dtype, c, load(row, part.out.dtype, c));
    }
  } else {
    // One of the two exponentials is 1: neither their sum nor the logarithm leaves the range.
    const double largest = lse_a < lse_z ? lse_z : lse_a;
    const double weight_a = exp(lse_a - largest), weight_z = exp(lse_z - largest), sum = weight_a + weight_z;
    total = static_cast<float>(largest + log(sum));
    const float factor_a = static_cast<float>(weight_a / sum), factor_z = static_cast<float>(weight_z / sum);
    for (std::int64_t c = lane; c < p.head_dim_v; c += 32) {
      store(target, merged.out.dtype, c,
            factor_a * load(row_a, a.out.dtype, c) + factor_z * load(row_z, z.out.dtype, c));
    }
  }
  if (lane == 0) *merged.lse.row(b, head, i) = total;
}

}  // namespace

Status append_to_cache(const Problem& problem, const CacheAppend& append, std::int32_t* lengths, const Launch& where) {
  const DeviceScope scope(where.device);
  ONEPASS_RETURN_IF_ERROR(scope.status());
  const std::int64_t rows = append.k_new ? append.seq_new * problem.heads_kv : 0;
  const std::int64_t blocks_per_item = max_of<std::int64_t>(rows, 1);
  return launch(append_rows, problem.batch * blocks_per_item, kThreads, 0, where, problem, append, lengths,
                blocks_per_item);
}

Status merge_partial(const Problem& problem, const Partial& a, const Partial& b, const Partial& merged,
                     const Launch& where) {
  const DeviceScope scope(where.device);
  ONEPASS_RETURN_IF_ERROR(scope.status());
  const std::int64_t rows = (problem.mask.varlen ? 1 : problem.batch) * problem.total_q * problem.heads_q;
  return launch(merge_rows, ceil_div(rows, kThreads / 32), kThreads, 0, where, problem, a, b, merged, rows);
}

}  // namespace onepass::cuda
