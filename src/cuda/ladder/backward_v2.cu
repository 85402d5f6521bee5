// GPU rung 5: the backward of FlashAttention v2 (Dao 2023, algorithm 2).
//
// A thread block has 64 keys with their dK and dV in registers; Q and dO pass by, and each block adds its part of dQ to
// float32 sums in global memory, in no fixed order. S, dP and dQ are split by rows among the warps, dV and dK by keys:
// P and dS change sides through shared memory.
#include "cuda/ladder/warp.cuh"

namespace onepass::cuda::ladder {
namespace {

template <int kD>
struct Shared {
  Tile<kD> k, v, q, d_o;
  Tile<kBc> p, ds;
};

/// D = rowsum(dO O) and dQ's sums = 0, eight rows a warp.
template <int kD>
__global__ void __launch_bounds__(kThreads) backward_v2_sums(Shape shape, Arrays x) {
  const std::int64_t rows = shape.heads * shape.N, row = 8 * (kWarps * std::int64_t{blockIdx.x} + warp_number());
  const int lane = lane_number();
  float mine = 0;  // of row `lane` of the eight
  for (int n = 0; n < 8 && row + n < rows; ++n) {
    float sum = 0;
    for (std::int64_t c = (row + n) * kD + 2 * lane; c < (row + n + 1) * kD; c += 64) {
      const float2 o = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(x.O + c));
      const float2 d_o = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(x.dO + c));
      sum += o.x * d_o.x + o.y * d_o.y;
      *reinterpret_cast<float2*>(x.dQ_sum + c) = {};
    }
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == n) mine = sum;
  }
  if (lane < 8 && row + lane < rows) x.D[row + lane] = mine;
}

/// 8 bytes of one row at a time: the quad's four pairs fill a sector of L2.
__device__ void add(float* g, float a, float b) {
#if __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float2*>(g), make_float2(a, b));
#else
  atomicAdd(g, a);
  atomicAdd(g + 1, b);
#endif
}
__device__ void put(Tile<kBc>& s_tile, const Block (&a)[4]) {  // the warp's 16 rows
  for (int k = 0; k < 4; ++k) {
    for (int n = 0; n < 4; ++n) {
      Bf16* pair = s_tile.chunk(16 * warp_number() + row_of(n % 2), 2 * k + n / 2) + 2 * place_in_quad();
      *reinterpret_cast<std::uint32_t*>(pair) = a[k].x[n];
    }
  }
}
/// c (the warp's 16 keys x kD) += A^T B over 64 rows.
template <int kD>
__device__ void product_atb(Sums<kD / 8>& c, const Tile<kBc>& s_a, const Tile<kD>& s_b) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const Block a = left_transposed(s_a, 16 * k, 16 * warp_number());
#pragma unroll
    for (int n = 0; n < kD / 16; ++n) multiply(c, n, a, right(s_b, 16 * k, 16 * n));
  }
}

template <int kD>
__global__ void __launch_bounds__(kThreads) backward_v2_keys(Shape shape, Arrays x) {
  extern __shared__ __align__(128) char s_bytes[];
  auto& s = *reinterpret_cast<Shared<kD>*>(s_bytes);
  const std::int64_t N = shape.N, first = blockIdx.x / shape.Tc() * N;  // the head's first row
  const std::int64_t j = blockIdx.x % shape.Tc() * kBc;
  const int strip = 16 * warp_number();
  const float scale = rsqrtf(static_cast<float>(kD));
  load(s.k, x.K + first * kD, kD, j, N);
  load(s.v, x.V + first * kD, kD, j, N);
  Sums<kD / 8> r_dk, r_dv;
  for (std::int64_t i = shape.causal ? j : 0; i < N; i += kBr) {  // rows before i see none of the keys
    load(s.q, x.Q + first * kD, kD, i, N);
    load(s.d_o, x.dO + first * kD, kD, i, N);
    arrive();
    Block r_p[4], r_ds[4];
    Sums<8> r_s, r_dp;
    product_abt(r_s, s.q, strip, s.k);
    scale_and_mask(r_s, shape, i + strip, j);
    product_abt(r_dp, s.d_o, strip, s.v);
    for (int half = 0; half < 2; ++half) {
      const std::int64_t r = i + strip + row_of(half);
      const float L = r < N ? __ldcg(x.L + first + r) : 0, D = r < N ? __ldcg(x.D + first + r) : 0;
      row_exp(r_s, half, L);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) r_dp.x[n][e] = scale * r_s.x[n][e] * (r_dp.x[n][e] - D);
      }
    }
    round_left(r_p, r_s);
    round_left(r_ds, r_dp);
    put(s.p, r_p);
    put(s.ds, r_ds);
    __syncthreads();  // P and dS of all warps are there
    product_atb(r_dv, s.p, s.d_o);
    product_atb(r_dk, s.ds, s.q);
    float* g_dq = x.dQ_sum + (first + i + strip) * kD;
#pragma unroll
    for (int n = 0; n < kD / 16; ++n) {  // dQ += dS K, 16 columns at a time
      Sums<2> r_dq;
#pragma unroll
      for (int k = 0; k < 4; ++k) multiply(r_dq, 0, r_ds[k], right(s.k, 16 * k, 16 * n));
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int r = row_of(c % 2);
        float* g = g_dq + r * kD + 16 * n + c / 2 * 8 + 2 * place_in_quad();
        if (i + strip + r < N) add(g, r_dq.x[c / 2][c % 2 * 2], r_dq.x[c / 2][c % 2 * 2 + 1]);
      }
    }
    __syncthreads();  // all warps have read Q, dO, P and dS, before the next ones are written there
  }
  store_rows(x.dK + first * kD, kD, j + strip, N, r_dk);
  store_rows(x.dV + first * kD, kD, j + strip, N, r_dv);
}

/// dQ, rounded: four numbers a thread.
__global__ void __launch_bounds__(kThreads) backward_v2_round(Shape shape, Arrays x) {
  const std::int64_t n = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (4 * n >= shape.heads * shape.N * shape.d) return;
  const float4 sum = reinterpret_cast<const float4*>(x.dQ_sum)[n];
  __stcg(reinterpret_cast<uint2*>(x.dQ) + n, make_uint2(ptx::pack<Bf16>(sum.x, sum.y), ptx::pack<Bf16>(sum.z, sum.w)));
}

}  // namespace

Status backward_v2(const Shape& shape, const Arrays& arrays, const Launch& where) {
  const std::int64_t rows = shape.heads * shape.N;
  const auto sums = shape.d == 64 ? backward_v2_sums<64> : backward_v2_sums<128>;
  ONEPASS_RETURN_IF_ERROR(launch(sums, ceil_div(rows, 8 * kWarps), kThreads, 0, where, shape, arrays));
  ONEPASS_RETURN_IF_ERROR(ONEPASS_LAUNCH_RUNG(backward_v2_keys, Shared, shape.heads * shape.Tc()));
  return launch(backward_v2_round, ceil_div(rows * shape.d, 4 * kThreads), kThreads, 0, where, shape, arrays);
}
Grid backward_v2_grid(const Shape& shape) {
  return {shape.heads * shape.Tc(), ONEPASS_SHARED_BYTES(Shared)};
}

}  // namespace onepass::cuda::ladder
