// GPU rung 3: v1 with its warps as it had them, split-K (Dao 2023, section 3.3).
//
// Each warp has 16 keys of a tile, their K and V in registers, and all 64 rows. So each has only a part of every row's
// maximum, sum and O: the parts go through shared memory at every step, O in float32, between two more barriers.
// src/ladder/parallel_warps_split_k.cc is the same, simulated and counted.
#include "cuda/ladder/warp.cuh"

namespace onepass::cuda::ladder {
namespace {

template <int kD>
struct Shared {
  Tile<kD> tile;                             // Q; before the loop over rows K, then V
  float4 o[kWarps][kWarps - 1][kD / 8][32];  // of each warp: its part of the other warps' rows, lane by lane
  float m[kWarps][kBr], l[kWarps][kBr];      // of each warp: its part of each row
};

template <int kD>
__global__ void __launch_bounds__(kThreads) flash_v1_keys(Shape shape, Arrays x) {
  extern __shared__ __align__(128) char s_bytes[];
  auto& s = *reinterpret_cast<Shared<kD>*>(s_bytes);
  const std::int64_t N = shape.N, first = blockIdx.x * N;  // the head's first row
  const int warp = warp_number(), lane = lane_number();
  Bf16* g_o = x.O + first * kD;
  float *g_m = x.m + first, *g_l = x.l + first;
  clear_rows(shape, g_o, g_m, g_l);
  for (std::int64_t j = 0; j < N; j += kBc) {
    Block r_k[kD / 16], r_v[kD / 16];
    load(s.tile, x.K + first * kD, kD, j, N);
    arrive();  // the first time, the cleared rows are there too
#pragma unroll
    for (int n = 0; n < kD / 16; ++n) r_k[n] = right_transposed(s.tile, 16 * warp, 16 * n);
    __syncthreads();  // all warps have read K, before V is written there
    load(s.tile, x.V + first * kD, kD, j, N);
    arrive();
#pragma unroll
    for (int n = 0; n < kD / 16; ++n) r_v[n] = right(s.tile, 16 * warp, 16 * n);
    __syncthreads();  // all warps have read V, before Q is written there
    for (std::int64_t i = 0; i < N; i += kBr) {
      load(s.tile, x.Q + first * kD, kD, i, N);
      arrive();
      // Four strips of 16 rows: those of the other warps, then this warp's own.
      Sums<2> r_s[kWarps];
      float m[kWarps][2], l[2];
#pragma unroll
      for (int n = 0; n < kWarps; ++n) {
        const int strip = 16 * ((warp + 1 + n) % kWarps);
#pragma unroll
        for (int k = 0; k < kD / 16; ++k) multiply(r_s[n], 0, left(s.tile, strip, 16 * k), r_k[k]);
        scale_and_mask(r_s[n], shape, i + strip, j + 16 * warp);
        for (int half = 0; half < 2; ++half) {
          m[n][half] = row_max(r_s[n], half);
          if (first_of_quad()) s.m[warp][strip + row_of(half)] = m[n][half];
        }
      }
      __syncthreads();  // all warps' maxima are there
      Sums<kD / 8> r_o;
#pragma unroll
      for (int n = 0; n < kWarps; ++n) {
        const int strip = 16 * ((warp + 1 + n) % kWarps);
        float others = -INFINITY;  // of row `lane` of the strip
        for (int w = 1; w < kWarps && lane < 16; ++w) others = fmaxf(others, s.m[(warp + w) % kWarps][strip + lane]);
        for (int half = 0; half < 2; ++half) {
          m[n][half] = fmaxf(m[n][half], __shfl_sync(~0u, others, row_of(half)));
          l[half] = row_exp(r_s[n], half, m[n][half]);
        }
        Block r_p[1];
        round_left(r_p, r_s[n]);
        r_o = {};
#pragma unroll
        for (int k = 0; k < kD / 16; ++k) multiply(r_o, k, r_p[0], r_v[k]);
        if (n == kWarps - 1) break;  // this warp's own rows stay
#pragma unroll
        for (int k = 0; k < kD / 8; ++k)
          s.o[warp][n][k][lane] = make_float4(r_o.x[k][0], r_o.x[k][1], r_o.x[k][2], r_o.x[k][3]);
        for (int half = 0; half < 2; ++half)
          if (first_of_quad()) s.l[warp][strip + row_of(half)] = l[half];
      }
      __syncthreads();  // all warps' parts of O and l are there
      float others = 0;
#pragma unroll
      for (int w = 1; w < kWarps; ++w) {
        const int other = (warp + w) % kWarps, n = kWarps - 1 - w;  // this warp is strip n of that one
        if (lane < 16) others += s.l[other][16 * warp + lane];
#pragma unroll
        for (int k = 0; k < kD / 8; ++k) {
          const float4 part = s.o[other][n][k][lane];
          r_o.x[k][0] += part.x, r_o.x[k][1] += part.y, r_o.x[k][2] += part.z, r_o.x[k][3] += part.w;
        }
      }
      for (int half = 0; half < 2; ++half) l[half] += __shfl_sync(~0u, others, row_of(half));
      take_into_rows(shape, g_o, g_m, g_l, i + 16 * warp, r_o, m[kWarps - 1], l);
    }
  }
}

}  // namespace

Status flash_v1_split_k(const Shape& shape, const Arrays& arrays, const Launch& where) {
  return ONEPASS_LAUNCH_RUNG(flash_v1_keys, Shared, shape.heads);
}
Grid flash_v1_split_k_grid(const Shape& shape) {
  return {shape.heads, ONEPASS_SHARED_BYTES(Shared)};
}

}  // namespace onepass::cuda::ladder
