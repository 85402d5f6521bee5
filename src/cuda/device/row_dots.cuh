// D = rowsum(dO ∘ O) of the backward pass, by the instruction that computes dP = dO V^T: the diagonal of dO O^T, 16
// columns at a time from the first on. Tensor cores cut off their running sum, so that both lean towards 0; summed
// alike they lean alike. A row that sees one key has O = V, and its dS = P (dP - D) is exactly 0.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/ptx/matrix.cuh"

namespace onepass::cuda {

/// Two neighbouring elements in float32.
template <class T>
__device__ __forceinline__ float2 widen(std::uint32_t pair);
template <>
__device__ __forceinline__ float2 widen<__nv_bfloat16>(std::uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
template <>
__device__ __forceinline__ float2 widen<__half>(std::uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

/// Elements [first, first + 4) of a row of `dim`, as pairs, zeros beyond it; g_row (dim) is null outside the sequence,
/// `aligned` if it begins at a multiple of 16 bytes.
__device__ __forceinline__ uint2 load_four(const void* g_row, bool aligned, int first, int dim) {
  if (g_row == nullptr) return {0, 0};
  const auto* const g = static_cast<const std::uint16_t*>(g_row) + first;
  if (aligned && first + 4 <= dim) return *reinterpret_cast<const uint2*>(g);
  std::uint32_t x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = first + i < dim ? g[i] : 0;
  return {x[0] | x[1] << 16, x[2] | x[3] << 16};
}

/// Elements [first, first + 8), likewise.
__device__ __forceinline__ uint4 load_eight(const void* g_row, bool aligned, int first, int dim) {
  if (g_row != nullptr && aligned && first + 8 <= dim) {
    return *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(g_row) + first);
  }
  const uint2 low = load_four(g_row, aligned, first, dim), high = load_four(g_row, aligned, first + 4, dim);
  return {low.x, low.y, high.x, high.y};
}

/// Lane t of a quad has elements [8 t, 8 t + 8) of 32; it gets four of the first 16 (x, y), and four of the last (z,
/// w).
__device__ __forceinline__ uint4 halves_of_32(uint4 own) {
  const bool last = threadIdx.x % 4 / 2 != 0;
  const std::uint32_t x = __shfl_xor_sync(~0u, last ? own.x : own.z, 2);
  const std::uint32_t y = __shfl_xor_sync(~0u, last ? own.y : own.w, 2);
  return last ? uint4{x, y, own.z, own.w} : uint4{own.x, own.y, x, y};
}

/// A warp's 16 rows, of which lane 4 g + t holds rows g and g + 8: g_out and g_grad are those rows of O and dO (dim),
/// null for rows that are not there. Returns the sums of rows g and g + 8 in the lane with t = g / 2, which is the one
/// that owns_row_dots.
template <class T, int kCols>
__device__ __forceinline__ float2 row_dots(const void* const (&g_out)[2], bool out_aligned,
                                           const void* const (&g_grad)[2], bool grad_aligned, int dim) {
  static_assert(kCols % 32 == 0);
  constexpr int kParts = kCols / 32, kAtOnce = kParts % 4 == 0 ? 4 : kParts % 3 == 0 ? 3 : kParts;  // of 32 columns
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float upper[4] = {}, lower[4] = {};  // columns: rows 0 to 7 of dO, and 8 to 15
#pragma unroll 1
  for (int part = 0; part < kParts; part += kAtOnce) {
    uint4 out[kAtOnce][2], grad[kAtOnce][2];  // all on their way before the first is used
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        out[i][half] = load_eight(g_out[half], out_aligned, (part + i) * 32 + 8 * t, dim);
        grad[i][half] = load_eight(g_grad[half], grad_aligned, (part + i) * 32 + 8 * t, dim);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // Any order of 16 columns will do.
      const uint4 a0 = halves_of_32(out[i][0]), a1 = halves_of_32(out[i][1]);
      const uint4 b0 = halves_of_32(grad[i][0]), b1 = halves_of_32(grad[i][1]);
      const std::uint32_t first[4] = {a0.x, a1.x, a0.y, a1.y}, last[4] = {a0.z, a1.z, a0.w, a1.w};
      ptx::mma_16x8x16<T>(upper, first, b0.x, b0.y);
      ptx::mma_16x8x16<T>(lower, first, b1.x, b1.y);
      ptx::mma_16x8x16<T>(upper, last, b0.z, b0.w);
      ptx::mma_16x8x16<T>(lower, last, b1.z, b1.w);
    }
  }
  return {g % 2 == 0 ? upper[0] : upper[1], g % 2 == 0 ? lower[2] : lower[3]};
}

/// The same where O is float32: plain sums.
template <class T, int kCols>
__device__ __forceinline__ float2 row_dots_f32(const void* const (&g_out)[2], const void* const (&g_grad)[2],
                                               bool grad_aligned, int dim) {
  const int t = threadIdx.x % 4;
  float sum[2] = {};
#pragma unroll 1
  for (int k = 4 * t; k < kCols; k += 16) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 pairs = load_four(g_grad[half], grad_aligned, k, dim);
      const float2 low = widen<T>(pairs.x), high = widen<T>(pairs.y);
      const float grad[4] = {low.x, low.y, high.x, high.y};
      const auto* const g = static_cast<const float*>(g_out[half]);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[half] += g != nullptr && k + i < dim ? grad[i] * g[k + i] : 0;
    }
  }
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], offset);
  }
  return {sum[0], sum[1]};
}

__device__ __forceinline__ bool owns_row_dots() {
  return threadIdx.x % 32 / 8 == threadIdx.x % 4;
}

}  // namespace onepass::cuda
