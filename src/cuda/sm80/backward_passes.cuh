// Before and after the main backward kernel: D, LSE and a zero dQ; dQ in its type.
#pragma once

#include "cuda/device/row_dots.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm80/backward_clear.cuh"
#include "cuda/sm80/backward_scores.cuh"
#include "cuda/sm80/rows.cuh"

namespace onepass::cuda::sm80 {

/// Fills the tile's statistics and clears its dQ and turns. Grid: batch x query_tiles x heads_q.
template <class Shape>
__global__ void __launch_bounds__(kPassThreads) backward_prepare(const __grid_constant__ BackwardParams p) {
  using T = typename Shape::Element;
  constexpr int kD = Shape::kD, kDV = Shape::kDV, kWarps = Shape::kTile.warps / Shape::kTile.roles,
                kQ = Shape::kTile.block_q;
  const PassTile at(p);
  const int head = at.head;
  const std::int64_t tile = at.tile, b = at.b;
  if (p.deterministic && blockIdx.x == 0 && threadIdx.x == 0) p.turns[p.heads_q * p.tiles * kWarps] = 0;
  const Sequence s = p.sequence(b);
  if (tile * kQ >= s.q_length) return;
  const std::int64_t index = at.index(p, s, kQ);
  auto* g_dq = reinterpret_cast<float4*>(p.dq_sum + index * (kQ * kD));
#pragma unroll
  for (int i = threadIdx.x; i < kQ * kD / 4; i += kPassThreads) g_dq[i] = {0, 0, 0, 0};
  if (p.deterministic && threadIdx.x < kWarps) p.turns[index * kWarps + threadIdx.x] = 0;

  const auto& o = p.operands;
  float* g_stats = p.stats + index * 2 * kQ;
#pragma unroll 1
  for (int first = threadIdx.x / 32 * 16; first < kQ; first += kPassThreads / 2) {
    const void *g_out[2], *g_grad[2];
    std::int64_t rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t row = tile * kQ + first + threadIdx.x % 32 / 4 + 8 * half;
      const bool inside = row < s.q_length;
      rows[half] = inside ? row : -1;
      g_out[half] = inside ? o.out.row(b, s.q_row + row, head) : nullptr;
      g_grad[half] = inside ? o.grad_out.row(b, s.q_row + row, head) : nullptr;
    }
    const float2 sums = o.out.dtype == DType::f32
                            ? row_dots_f32<T, kDV>(g_out, g_grad, p.grad_out_aligned, p.head_dim_v)
                            : row_dots<T, kDV>(g_out, p.out_aligned, g_grad, p.grad_out_aligned, p.head_dim_v);
    if (!owns_row_dots()) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float lse = rows[half] < 0 ? -INFINITY : *o.lse.row(b, head, s.q_row + rows[half]);
      const bool empty = lse == -INFINITY;  // sees no key: P = 0 whatever its score
      float sum = half == 0 ? sums.x : sums.y;
      if (!empty && o.grad_lse) sum -= *o.grad_lse.row(b, head, s.q_row + rows[half]);
      float* const g = g_stats + statistic_place(first + threadIdx.x % 32 / 4 + 8 * half);
      g[0] = empty ? INFINITY : lse * 1.44269504088896341f;
      g[kQ] = empty ? 0 : sum;
    }
  }
}

/// Scales, rounds and writes the dQ of a tile, 0 for rows that the sequence does not use. A thread takes eight elements
/// of a row, which fragment order keeps in two runs of four: columns 0, 2, 4, 6, and 1, 3, 5, 7.
/// Grid: batch x query_tiles x heads_q.
template <class Shape>
__global__ void __launch_bounds__(kPassThreads) backward_finish(const __grid_constant__ BackwardParams p) {
  using T = typename Shape::Element;
  constexpr int kD = Shape::kD, kQ = Shape::kTile.block_q, kChunks = kD / 8, kNear = kChunks % 8 == 0 ? 8 : 4;
  const PassTile at(p);
  const int head = at.head;
  const std::int64_t tile = at.tile, b = at.b;
  const Sequence s = p.sequence(b);
  const std::int64_t item_rows = p.item_queries(b, s);
  if (tile * kQ >= item_rows) return;
  const auto* g_dq = reinterpret_cast<const float4*>(p.dq_sum + at.index(p, s, kQ) * (kQ * kD));
  const Tensor& grad = p.operands.grad_q;
#pragma unroll 4
  for (int i = threadIdx.x; i < kQ * kChunks; i += kPassThreads) {
    // Neighbouring threads: kNear chunks of a row, then 8 rows, so that both sides move whole sectors.
    const int near = i % kNear, row8 = i / kNear % 8, rest = i / kNear / 8;
    const int chunk = rest % (kChunks / kNear) * kNear + near, block = rest / (kChunks / kNear);  // of 8 rows
    const int r = 8 * block + row8;
    const std::int64_t row = tile * kQ + r;
    if (row >= item_rows) continue;
    uint4 x = {0, 0, 0, 0};
    if (row < s.q_length) {
      const float4* g = g_dq + (block / 2 * kChunks + chunk) * 32 + block % 2 * 16 + row8;
      const float4 even = g[0], odd = g[8];
      x = {ptx::pack<T>(even.x * p.scale, odd.x * p.scale), ptx::pack<T>(even.y * p.scale, odd.y * p.scale),
           ptx::pack<T>(even.z * p.scale, odd.z * p.scale), ptx::pack<T>(even.w * p.scale, odd.w * p.scale)};
    }
    store_eight(reinterpret_cast<std::uint16_t*>(grad.row(b, s.q_row + row, head)), 8 * chunk, p.head_dim,
                p.grad_q_aligned, x);
  }
}

}  // namespace onepass::cuda::sm80
