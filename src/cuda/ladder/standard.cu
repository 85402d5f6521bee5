// GPU rung 1: standard attention, three kernels with S and P in global memory.
//
// A thread block has 64 query rows and lets K, then V, pass by in tiles. What is written between the kernels and read
// by the next one is N x N: 4N^2 numbers of it.
#include "cuda/ladder/warp.cuh"

namespace onepass::cuda::ladder {
namespace {

template <int kD>
struct ScoresShared {
  Tile<kD> q, k;
};
template <int kD>
struct ValuesShared {
  Tile<kBc> p;
  Tile<kD> v;
};

template <int kD>
__global__ void __launch_bounds__(kThreads) standard_scores(Shape shape, Arrays x) {  // S = mask(scale Q K^T)
  extern __shared__ __align__(128) char s_bytes[];
  auto& s = *reinterpret_cast<ScoresShared<kD>*>(s_bytes);
  const std::int64_t head = blockIdx.x / shape.Tr(), i = blockIdx.x % shape.Tr() * kBr, N = shape.N;
  const std::int64_t row = i + 16 * warp_number();
  Bf16* g_s = x.S + head * N * shape.pitch();
  load(s.q, x.Q + head * N * kD, kD, i, N);
  for (std::int64_t j = 0; j < N; j += kBc) {
    load(s.k, x.K + head * N * kD, kD, j, N);
    arrive();
    Sums<8> r_s;
    product_abt(r_s, s.q, 16 * warp_number(), s.k);
    scale_and_mask(r_s, shape, row, j);
    store_rows(g_s + j, shape.pitch(), row, N, r_s);
    __syncthreads();  // all warps have read s.k, before the next tile is written there
  }
}

/// P = softmax(S), a warp a row; the row stays in shared memory, each lane's chunks its own.
__global__ void __launch_bounds__(32) standard_softmax(Shape shape, Arrays x) {
  extern __shared__ uint4 s_row[];
  const std::int64_t chunks = shape.pitch() / 8;
  const auto* g_s = reinterpret_cast<const uint4*>(x.S) + blockIdx.x * chunks;
  auto* g_p = reinterpret_cast<uint4*>(x.P) + blockIdx.x * chunks;
  const auto all = [](float value, auto op) {
    for (int step = 1; step < 32; step *= 2) value = op(value, __shfl_xor_sync(~0u, value, step));
    return value;
  };
  float m = -INFINITY, l = 0;
  for (std::int64_t n = threadIdx.x; n < chunks; n += 32) {
    s_row[n] = __ldcg(g_s + n);
    const auto* eight = reinterpret_cast<const Bf16*>(s_row + n);
    for (int e = 0; e < 8; ++e) m = fmaxf(m, __bfloat162float(eight[e]));
  }
  m = all(m, [](float a, float b) { return fmaxf(a, b); });
  for (std::int64_t n = threadIdx.x; n < chunks; n += 32) {
    const auto* eight = reinterpret_cast<const Bf16*>(s_row + n);
    for (int e = 0; e < 8; ++e) l += __expf(__bfloat162float(eight[e]) - m);
  }
  l = all(l, [](float a, float b) { return a + b; });
  for (std::int64_t n = threadIdx.x; n < chunks; n += 32) {
    const auto* eight = reinterpret_cast<const Bf16*>(s_row + n);
    float p[8];
    for (int e = 0; e < 8; ++e) p[e] = __expf(__bfloat162float(eight[e]) - m) / l;
    __stcg(g_p + n, make_uint4(ptx::pack<Bf16>(p[0], p[1]), ptx::pack<Bf16>(p[2], p[3]), ptx::pack<Bf16>(p[4], p[5]),
                               ptx::pack<Bf16>(p[6], p[7])));
  }
}

template <int kD>
__global__ void __launch_bounds__(kThreads) standard_values(Shape shape, Arrays x) {  // O = P V
  extern __shared__ __align__(128) char s_bytes[];
  auto& s = *reinterpret_cast<ValuesShared<kD>*>(s_bytes);
  const std::int64_t head = blockIdx.x / shape.Tr(), i = blockIdx.x % shape.Tr() * kBr, N = shape.N;
  Sums<kD / 8> r_o;
  for (std::int64_t j = 0; j < N; j += kBc) {
    load(s.p, x.P + head * N * shape.pitch() + j, shape.pitch(), i, N);
    load(s.v, x.V + head * N * kD, kD, j, N);
    arrive();
    Block r_p[4];
    load_left(r_p, s.p, 16 * warp_number());
    product_ab(r_o, r_p, s.v);
    __syncthreads();  // all warps have read both tiles, before the next ones are written there
  }
  store_rows(x.O + head * N * kD, kD, i + 16 * warp_number(), N, r_o);
}

}  // namespace

Status standard(const Shape& shape, const Arrays& arrays, const Launch& where) {
  const std::int64_t blocks = shape.heads * shape.Tr();
  ONEPASS_RETURN_IF_ERROR(ONEPASS_LAUNCH_RUNG(standard_scores, ScoresShared, blocks));
  ONEPASS_RETURN_IF_ERROR(launch(standard_softmax, shape.heads * shape.N, 32, 2 * shape.pitch(), where, shape, arrays));
  return ONEPASS_LAUNCH_RUNG(standard_values, ValuesShared, blocks);
}
Grid standard_grid(const Shape& shape) {
  return {shape.heads * shape.Tr(), ONEPASS_SHARED_BYTES(ScoresShared)};
}

}  // namespace onepass::cuda::ladder
