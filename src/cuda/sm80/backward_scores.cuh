// Elementwise work on transposed score fragments (keys x query rows), in pieces of two neighbouring scores that fit
// between matrix products: P, dS, the mask.
#pragma once

#include "cuda/device/swizzle.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm80/backward_scope.cuh"

namespace onepass::cuda::sm80 {

template <class T>
__device__ __forceinline__ void unpack(std::uint32_t x, float& low, float& high);
template <>
__device__ __forceinline__ void unpack<__nv_bfloat16>(std::uint32_t x, float& low, float& high) {
  low = __uint_as_float(x << 16);
  high = __uint_as_float(x & 0xffff0000u);
}
template <>
__device__ __forceinline__ void unpack<__half>(std::uint32_t x, float& low, float& high) {
  const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&x));
  low = f.x, high = f.y;
}

/// A warp's scores of 16 kN query rows: 16 kM keys, fragments of 16 x 8.
template <int kM, int kN>
using Scores = float[kM][2 * kN][4];
/// The same as T, as A fragments of the products with dO and Q.
template <int kM, int kN>
using Weights = std::uint32_t[kM][kN][4];
template <int kM, int kN>
__device__ __forceinline__ void copy_weights(std::uint32_t (&to)[kM][kN][4], const std::uint32_t (&from)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kM * kN; ++i) to[i / 4 / kN][i / 4 % kN][i % 4] = from[i / 4 / kN][i / 4 % kN][i % 4];
}

/// Where piece i of a warp's scores is: two neighbouring query rows of one key a lane.
template <int kM>
struct Piece {
  int m, n, half;  // fragment; its upper or lower 8 keys
  __device__ __forceinline__ explicit Piece(int i) : m(i / 2 % kM), n(i / 2 / kM), half(i % 2) {}
  __device__ __forceinline__ int register_of_weights() const { return n % 2 * 2 + half; }
};
template <int kM, int kN>
inline constexpr int kPieces = 4 * kM* kN;

/// The pieces that belong behind block `at` of `count`, so that all are done after the last.
template <int kAll, class F>
__device__ __forceinline__ void pieces_behind(int at, int count, F&& f) {
#pragma unroll
  for (int i = at * kAll / count; i < (at + 1) * kAll / count; ++i) f(i);
}

/// The pieces that belong behind block `at` of a product with weights that has kAcross blocks for each 16 query rows:
/// those of the next 16 rows.
template <int kM, int kN, int kAcross, class F>
__device__ __forceinline__ void pieces_ahead(int at, F&& f) {
  constexpr int kEach = 4 * kM;
  const int begin = kEach + at * kEach / kAcross, end = kEach + (at + 1) * kEach / kAcross;
  if (end <= kPieces<kM, kN>) f(begin, end);
}

/// A statistic of this lane's rows of 16 query rows, in two fragments. s_rows: of the first row of all, as
/// statistic_place has them.
template <int kN>
__device__ __forceinline__ void load_statistic(float (&r)[2 * kN][2], int n, std::uint32_t s_rows, int lane) {
  ptx::load_shared(s_rows + 64 * n + lane % 4 * 16, r[2 * n][0], r[2 * n][1], r[2 * n + 1][0], r[2 * n + 1][1]);
}
template <int kN>
__device__ __forceinline__ void load_statistic(float (&r)[2 * kN][2], std::uint32_t s_rows, int lane) {
#pragma unroll
  for (int n = 0; n < kN; ++n) load_statistic<kN>(r, n, s_rows, lane);
}

/// P = 2^(scale_log2 S - log2(e) LSE).
template <class T, int kM, int kN>
__device__ __forceinline__ void weigh(int i, const Scores<kM, kN>& r_s, const float (&lse)[2], float scale_log2,
                                      Weights<kM, kN>& r_p) {
  const Piece<kM> x(i);
  const float* s = &r_s[x.m][x.n][2 * x.half];
  r_p[x.m][x.n / 2][x.register_of_weights()] =
      ptx::pack<T>(ptx::exp2_approx(s[0] * scale_log2 - lse[0]), ptx::exp2_approx(s[1] * scale_log2 - lse[1]));
}

/// dS = P (dP - D), in the place of P.
template <class T, int kM, int kN>
__device__ __forceinline__ void differentiate(int i, const Scores<kM, kN>& r_dp, const float (&d)[2],
                                              Weights<kM, kN>& r_p) {
  const Piece<kM> x(i);
  std::uint32_t& p = r_p[x.m][x.n / 2][x.register_of_weights()];
  const float* dp = &r_dp[x.m][x.n][2 * x.half];
  float low, high;
  unpack<T>(p, low, high);
  p = ptx::pack<T>(low * (dp[0] - d[0]), high * (dp[1] - d[1]));
}

/// The lowest `count` bits, which may be any number.
__device__ __forceinline__ std::uint32_t first_bits(int count) {
  return static_cast<std::uint32_t>((1ull << clamp_to(count, 0, 32)) - 1);
}

/// 0 where a key is hidden from a row, whatever stood there. first_row, first_key: of the weights, in tile and block.
/// Each key of the lane is seen by an interval of rows: the bits of 32 rows at a time become bytes, those bytes masks.
template <int kM, int kN>
__device__ __forceinline__ void hide(Weights<kM, kN>& r, const TileMask& mask, int first_row, int first_key, int lane) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int begin, end;
      mask.rows(first_key + 16 * m + 8 * half + lane / 4, begin, end);
#pragma unroll
      for (int n = 0; n < 2 * kN; n += 4) {
        const int first = first_row + 8 * n;
        const std::uint32_t seen = (first_bits(end - first) & ~first_bits(begin - first)) >> (lane % 4 * 2);
        const std::uint32_t even = (seen & 0x01010101) * 255, odd = (seen >> 1 & 0x01010101) * 255;
#pragma unroll
        for (int i = 0; i < 4 && n + i < 2 * kN; ++i) {
          r[m][(n + i) / 2][i % 2 * 2 + half] &= __byte_perm(even, odd, 0x4400 + 0x1111 * i);
        }
      }
    }
  }
}

}  // namespace onepass::cuda::sm80
