// The matrix products of the backward pass, each by one warp: operands from swizzled tiles in shared memory or from
// registers, sums in registers. Other work of the warp, which the tensor cores would otherwise wait for, goes in
// between: `between(at, count)` is called after each of `count` blocks of 16 x 16 columns.
#pragma once

#include "cuda/device/sums.cuh"
#include "cuda/device/swizzle.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/shared.cuh"

namespace onepass::cuda::sm80 {

/// Nothing in between.
struct Nothing {
  __device__ __forceinline__ void operator()(int, int) const {}
};

/// r_sum[.][16 n .. 16 n + 15] += a b of 16 kM x 16 by 16 x 16.
template <class T, int kM, int kN>
__device__ __forceinline__ void multiply_block(float (&r_sum)[kM][kN][4], int n, const std::uint32_t (&r_a)[kM][4],
                                               const std::uint32_t (&r_b)[4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    ptx::mma_16x8x16<T>(r_sum[m][2 * n], r_a[m], r_b[0], r_b[1]);
    ptx::mma_16x8x16<T>(r_sum[m][2 * n + 1], r_a[m], r_b[2], r_b[3]);
  }
}

/// r_sum (16 kM x 16 kN) = a b^T over kK columns: a is 16 kM rows of `rows_a`, b 16 kN rows of `rows_b`.
template <class T, int kM, int kN, int kK, int kColsA, int kColsB, class Between = Nothing>
__device__ __forceinline__ void multiply_rows(float (&r_sum)[kM][2 * kN][4], const LaneRows<kColsA>& rows_a,
                                              const LaneRows<kColsB>& rows_b, const Between& between = {}) {
  constexpr int kBlocks = kK / 16 * kN;
  const auto load_b = [&](std::uint32_t(&r)[4], int at) { ptx::ldmatrix_x4(r, rows_b.at(at % kN * 16, at / kN * 2)); };
  const auto load_a = [&](std::uint32_t(&r)[kM][4], int k) {
#pragma unroll
    for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(r[m], rows_a.at(16 * m, 2 * k));
  };
  set_zero(r_sum);
  std::uint32_t r_a[2][kM][4], r_b[2][4];
  load_a(r_a[0], 0);
  load_b(r_b[0], 0);
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    if (k + 1 < kK / 16) load_a(r_a[(k + 1) % 2], k + 1);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int at = k * kN + n;
      if (at + 1 < kBlocks) load_b(r_b[(at + 1) % 2], at + 1);
      multiply_block<T>(r_sum, n, r_a[k % 2], r_b[at % 2]);
      between(at, kBlocks);
    }
  }
}

/// r_sum (16 kM x 16 kN) += a b: a (16 kM x 16 kK) in registers as A fragments, b 16 kK rows of `rows_b`.
template <class T, int kM, int kN, int kK, int kCols, class Between = Nothing>
__device__ __forceinline__ void multiply_add(float (&r_sum)[kM][2 * kN][4], const std::uint32_t (&r_a)[kM][kK][4],
                                             const LaneRows<kCols>& rows_b, const Between& between = {}) {
  constexpr int kBlocks = kK * kN;
  const auto load_b = [&](std::uint32_t(&r)[4], int at) {
    ptx::ldmatrix_x4_trans(r, rows_b.at(at / kN * 16, at % kN * 2));
  };
  std::uint32_t r_b[2][4];
  load_b(r_b[0], 0);
#pragma unroll
  for (int k = 0; k < kK; ++k) {
    std::uint32_t r_a_k[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) r_a_k[m][e] = r_a[m][k][e];
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int at = k * kN + n;
      if (at + 1 < kBlocks) load_b(r_b[(at + 1) % 2], at + 1);
      multiply_block<T>(r_sum, n, r_a_k, r_b[at % 2]);
      between(at, kBlocks);
    }
  }
}

/// r_sum (16 kM x 16 kN) = a^T b over kK rows: a is every kStepM-th block of 16 columns of `rows_a`, b every kStepN-th
/// of `rows_b` from number `first` on, both counted from the lane's own; both steps are powers of two.
template <class T, int kM, int kStepM, int kN, int kStepN, int kK, int kColsA, int kColsB>
__device__ __forceinline__ void multiply_columns(float (&r_sum)[kM][2 * kN][4], const LaneRows<kColsA>& rows_a,
                                                 const LaneRows<kColsB>& rows_b, int first) {
  constexpr int kBlocks = kK / 16 * kN;
  const auto load_b = [&](std::uint32_t(&r)[4], int at) {
    ptx::ldmatrix_x4_trans(r, rows_b.at(at / kN * 16, 2 * kStepN * (first + at % kN)));
  };
  const auto load_a = [&](std::uint32_t(&r)[kM][4], int k) {
#pragma unroll
    for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4_trans(r[m], rows_a.at(16 * k, 2 * kStepM * m));
  };
  set_zero(r_sum);
  std::uint32_t r_a[2][kM][4], r_b[2][4];
  load_a(r_a[0], 0);
  load_b(r_b[0], 0);
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    if (k + 1 < kK / 16) load_a(r_a[(k + 1) % 2], k + 1);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int at = k * kN + n;
      if (at + 1 < kBlocks) load_b(r_b[(at + 1) % 2], at + 1);
      multiply_block<T>(r_sum, n, r_a[k % 2], r_b[at % 2]);
    }
  }
}

/// A warp's sums (16 kM x kCols), times `factor`, as rows of type T in shared memory, where it may read them then.
template <class T, int kM, int kCols>
__device__ __forceinline__ void put_sums(std::uint32_t s_rows, const float (&r_sum)[kM][kCols / 8][4], float factor,
                                         int lane) {
  const LaneRows<kCols> rows(s_rows, lane / 4, 0);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const x = &r_sum[m][n][2 * half];
        ptx::store_shared(rows.at(16 * m + 8 * half, n) + lane % 4 * 4, ptx::pack<T>(x[0] * factor, x[1] * factor));
      }
    }
  }
  __syncwarp();
}

}  // namespace onepass::cuda::sm80
