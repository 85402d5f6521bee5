// Before and after the main float32 backward kernel: D, LSE, the parts of Q and dO and a zero dQ; dQ in its place.
#pragma once

#include "cuda/sm80/backward_clear.cuh"
#include "cuda/sm80/backward_scope.cuh"
#include "cuda/sm80/f32_parts.cuh"

namespace onepass::cuda::sm80 {

/// Splits a tile of rows, of which `rows` exist, into parts at g_parts: PartsTile<kRows, kCols>.
template <int kRows, int kCols>
__device__ __forceinline__ void split_rows(unsigned char* g_parts, const Tensor& x, std::int64_t b, std::int64_t row,
                                           std::int64_t head, std::int64_t rows, int dim, bool aligned) {
  constexpr int kGroups = kCols / 16;
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * kGroups; i += kPassThreads) {
    const int r = i / kGroups;
    const bool inside = r < rows;
    const auto* g_row = reinterpret_cast<const float*>(x.row(b, row + (inside ? r : 0), head));
    PartsTile<kRows, kCols>::split(g_row, r, i % kGroups, inside, dim, aligned,
                                   [&](int byte, uint4 y) { *reinterpret_cast<uint4*>(g_parts + byte) = y; });
  }
}

/// Fills the tile's statistics, LSE and D, and the parts of its Q and dO, and clears its dQ and turns. Sixteen threads
/// a row.
template <class Shape>
__global__ void __launch_bounds__(kPassThreads) backward_f32_prepare(const __grid_constant__ BackwardParams p) {
  constexpr int kD = Shape::kHeadDim, kQ = Shape::kTile.block_q, kWarps = Shape::kTile.warps();
  constexpr int kRowThreads = 16, kRows = kPassThreads / kRowThreads;
  static_assert(kQ % kRows == 0);
  if (p.deterministic && blockIdx.x == 0 && threadIdx.x == 0) p.turns[p.heads_q * p.tiles * kWarps] = 0;
  const PassTile at(p);
  const Sequence s = p.sequence(at.b);
  if (at.tile * kQ >= s.q_length) return;
  const std::int64_t index = at.index(p, s, kQ);
  auto* g_dq = reinterpret_cast<float4*>(p.dq_sum + index * (kQ * kD));
#pragma unroll 4
  for (int i = threadIdx.x; i < kQ * kD / 4; i += kPassThreads) g_dq[i] = {0, 0, 0, 0};
  if (p.deterministic && threadIdx.x < kWarps) p.turns[index * kWarps + threadIdx.x] = 0;

  const auto& o = p.operands;
  constexpr int kPartsBytes = PartsTile<kQ, kD>::kBytes;
  unsigned char* g_parts = p.parts + index * (2 * kPartsBytes);
  const std::int64_t first_row = s.q_row + at.tile * kQ, rows = s.q_length - at.tile * kQ;
  split_rows<kQ, kD>(g_parts, o.q, at.b, first_row, at.head, rows, p.head_dim, p.q_aligned);
  split_rows<kQ, kD>(g_parts + kPartsBytes, o.grad_out, at.b, first_row, at.head, rows, p.head_dim_v,
                     p.grad_out_aligned);
  const int lane = threadIdx.x % kRowThreads;
  float* g_stats = p.stats + index * (2 * kQ);
#pragma unroll 1
  for (int r = threadIdx.x / kRowThreads; r < kQ; r += kRows) {
    const std::int64_t row = at.tile * kQ + r;
    float lse = -INFINITY, sum = 0;
    if (row < s.q_length) {
      lse = *o.lse.row(at.b, at.head, s.q_row + row);
      const auto* g_grad = reinterpret_cast<const float*>(o.grad_out.row(at.b, s.q_row + row, at.head));
      const auto* g_out = reinterpret_cast<const float*>(o.out.row(at.b, s.q_row + row, at.head));
#pragma unroll
      for (int column = 4 * lane; column < kD; column += 4 * kRowThreads) {
        const float4 x = load_four(g_grad, column, p.head_dim_v, p.grad_out_aligned);
        const float4 y = load_four(g_out, column, p.head_dim_v, p.out_aligned);
        sum = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, sum))));
      }
    }
#pragma unroll
    for (int offset = kRowThreads / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane != 0) continue;
    const bool empty = lse == -INFINITY;  // sees no key: P = 0 whatever its score
    if (!empty && o.grad_lse) sum -= *o.grad_lse.row(at.b, at.head, s.q_row + row);
    g_stats[r] = empty ? INFINITY : lse;
    g_stats[kQ + r] = empty ? 0 : sum;
  }
}

/// Scales and writes the dQ of a tile, 0 for rows that the sequence does not use. A thread takes four elements of a
/// row; a warp reads the lanes of a fragment (multiply_across) in a row.
template <class Shape>
__global__ void __launch_bounds__(kPassThreads) backward_f32_finish(const __grid_constant__ BackwardParams p) {
  constexpr int kD = Shape::kHeadDim, kQ = Shape::kTile.block_q;
  const PassTile at(p);
  const Sequence s = p.sequence(at.b);
  const std::int64_t item_rows = p.item_queries(at.b, s);
  if (at.tile * kQ >= item_rows) return;
  const float* g_dq = p.dq_sum + at.index(p, s, kQ) * (kQ * kD);
#pragma unroll 2
  for (int i = threadIdx.x; i < kQ * kD / 4; i += kPassThreads) {
    const int lane = i % 32, group = i / 32 % (kD / 16), block = i / (2 * kD);  // block: of 8 rows
    const std::int64_t row = at.tile * kQ + 8 * block + lane / 4;
    if (row >= item_rows) continue;
    float4 x = {0, 0, 0, 0};
    if (row < s.q_length) {
      const float* g = g_dq + (block / 2 * (kD / 8) + 2 * group) * 128 + block % 2 * 64 + lane;
      x = {g[0] * p.scale, g[128] * p.scale, g[32] * p.scale, g[160] * p.scale};
    }
    store_four(reinterpret_cast<float*>(p.operands.grad_q.row(at.b, s.q_row + row, at.head)), 16 * group + lane % 4 * 4,
               p.head_dim, p.grad_q_aligned, x);
  }
}

}  // namespace onepass::cuda::sm80
