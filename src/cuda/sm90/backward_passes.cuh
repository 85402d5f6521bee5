// What runs before the main kernel: D and LSE, the plan, the progress of dQ; and after it zeros where no gradient is.
#pragma once

#include "cuda/sm90/backward_plan.cuh"

namespace onepass::cuda::sm90 {

inline constexpr int kPassThreads = 256;

template <class T>
__device__ __forceinline__ float2 unpack(std::uint32_t x);
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(std::uint32_t x) {
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}
template <>
__device__ __forceinline__ float2 unpack<__half>(std::uint32_t x) {
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
}

/// Eight elements of a row of `dim`, from column `first` on, zeros beyond; the row is 16-byte aligned.
template <class T>
__device__ __forceinline__ void load_eight(float (&x)[8], const void* g_row, int first, int dim) {
  uint4 packed = {0, 0, 0, 0};
  if (first + 8 <= dim) {
    packed = *reinterpret_cast<const uint4*>(static_cast<const T*>(g_row) + first);
  } else {
    std::uint16_t elements[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      elements[i] = first + i < dim ? static_cast<const std::uint16_t*>(g_row)[first + i] : std::uint16_t{0};
    }
    packed = {elements[0] | std::uint32_t{elements[1]} << 16, elements[2] | std::uint32_t{elements[3]} << 16,
              elements[4] | std::uint32_t{elements[5]} << 16, elements[6] | std::uint32_t{elements[7]} << 16};
  }
  const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<T>(words[i]);
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}
template <>
__device__ __forceinline__ void load_eight<float>(float (&x)[8], const void* g_row, int first, int dim) {
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = first + i < dim ? static_cast<const float*>(g_row)[first + i] : 0;
}

/// Statistics of a query tile of one head, and the number of additions to its dQ.
template <class C>
__device__ __forceinline__ void prepare_rows(const BackwardParams& p, std::int64_t index) {
  constexpr int kLanes = C::kDV / 8, kAtOnce = kPassThreads / kLanes;  // threads of a row, rows at once
  using T = typename C::T;
  const int head = static_cast<int>(index / p.tiles);
  const std::int64_t tile = index % p.tiles;
  const TileOwner owner = tile_owner(p.mask.cu_seqlens_q, tile, p.batch, p.total_q, p.item_q_tiles, C::kBlockQ);
  const Sequence s = p.sequence(owner.b);
  const Extent x = seen(s);
  const std::int64_t first = (tile - owner.first) * C::kBlockQ;
  if (first >= x.rows.size()) return;
  if (threadIdx.x < 4) {
    const std::int64_t begin = x.rows.begin + first, end = min_of<std::int64_t>(begin + C::kBlockQ, x.rows.end);
    const Interval keys = s.visible_to_any(begin, end);
    const std::int64_t first_rank = (keys.begin - x.keys.begin) / C::kBlockK;
    const std::int64_t additions = (keys.end - 1 - x.keys.begin) / C::kBlockK + 1 - first_rank;
    p.progress[index * 4 + threadIdx.x] = {0, 0, static_cast<float>(additions), static_cast<float>(first_rank)};
  }

  const BackwardOperands& o = p.operands;
  const int lane = threadIdx.x % kLanes;
  float* const g_stats = p.stats + index * C::kStatFloats;
#pragma unroll
  for (int step = 0; step < C::kBlockQ / kAtOnce; ++step) {
    const int r = threadIdx.x / kLanes + step * kAtOnce;
    const std::int64_t row = s.q_row + x.rows.begin + first + r;
    float lse = INFINITY, sum = 0;  // P = 0 past the end, and where a row that could see keys has no weight
    if (first + r < x.rows.size()) {
      float a[8], b[8];
      load_eight<T>(a, o.grad_out.row(owner.b, row, head), 8 * lane, p.head_dim_v);
      if (o.out.dtype == DType::f32) {
        load_eight<float>(b, o.out.row(owner.b, row, head), 8 * lane, p.head_dim_v);
      } else {
        load_eight<T>(b, o.out.row(owner.b, row, head), 8 * lane, p.head_dim_v);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += a[i] * b[i];
      lse = *o.lse.row(owner.b, head, row) * 1.4426950408889634f;
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane != 0) continue;
    if (o.grad_lse && first + r < x.rows.size()) sum -= *o.grad_lse.row(owner.b, head, row);
    const bool empty = lse == -INFINITY || lse == INFINITY;
    float* const g = g_stats + (r % 8 / 2) * C::kStatWidth + r / 8 * 2 + r % 2;
    g[0] = empty ? INFINITY : lse;
    g[4 * C::kStatWidth] = empty ? 0 : sum;
  }
}

/// Blocks: heads_q tiles for the rows, then enough for a thread each key tile.
template <class C>
__global__ void __launch_bounds__(kPassThreads) backward_prepare(const __grid_constant__ BackwardParams p) {
  const std::int64_t row_blocks = p.heads_q * p.tiles;
  if (blockIdx.x < row_blocks) return prepare_rows<C>(p, blockIdx.x);
  const std::int64_t index = (blockIdx.x - row_blocks) * kPassThreads + threadIdx.x;
  if (index == 0) *p.next_tile = 0;
  if (index < p.key_tiles * p.heads_kv) p.plan[index] = plan_key_tile<C>(p, index);
}

/// Zeros for one row of all heads, by a warp.
__device__ inline void clear_row(const Tensor& x, std::int64_t b, std::int64_t row, int heads, int dim) {
  for (int i = threadIdx.x % 32; i < heads * dim; i += 32) {
    reinterpret_cast<std::uint16_t*>(x.row(b, row, i / dim))[i % dim] = 0;
  }
}

/// Zeros for dK and dV of keys that no row sees, and for dQ of rows that see no key. A warp for each row of K, then of
/// Q.
template <class C>
__global__ void __launch_bounds__(kPassThreads) backward_clear(const __grid_constant__ BackwardParams p) {
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kPassThreads / 32) + threadIdx.x / 32;
  const BackwardOperands& o = p.operands;
  const bool packed = p.mask.varlen;
  const std::int64_t key_rows = packed ? p.total_k : p.batch * p.seq_k;
  const bool of_keys = row < key_rows;
  if (!of_keys) row -= key_rows;
  const std::int64_t seq = of_keys ? p.seq_k : p.seq_q;
  if (!of_keys && row >= (packed ? p.total_q : p.batch * p.seq_q)) return;
  const std::int32_t* const cu_seqlens = of_keys ? p.mask.cu_seqlens_k : p.mask.cu_seqlens_q;
  const std::int64_t b = packed ? last_begun(p.batch, row, [&](std::int64_t i) { return cu_seqlens[i]; }) : row / seq;
  const std::int64_t item = packed ? 0 : b;
  if (!packed) row %= seq;
  Extent x = {};
  Sequence s;
  if (p.batch > 0) {
    s = p.sequence(b);
    x = seen(s);
  }
  const Interval& used = of_keys ? x.keys : x.rows;
  const std::int64_t first = (of_keys ? s.k_row : s.q_row) + used.begin;
  if (first <= row && row < first + used.size()) return;
  if (of_keys) {
    clear_row(o.grad_k, item, row, p.heads_kv, p.head_dim);
    clear_row(o.grad_v, item, row, p.heads_kv, p.head_dim_v);
  } else {
    clear_row(o.grad_q, item, row, p.heads_q, p.head_dim);
  }
}

}  // namespace onepass::cuda::sm90
