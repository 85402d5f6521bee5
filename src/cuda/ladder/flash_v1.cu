// GPU rung 2: FlashAttention v1 (Dao et al. 2022, algorithm 1), a thread block a head.
//
// The outer loop is over K and V, so one block does a whole head: O, m and l of every row are read, rescaled and
// written back for each key tile. Here the warps share the rows of a tile; the next rung shares the keys, as v1 did.
#include "cuda/ladder/warp.cuh"

namespace onepass::cuda::ladder {
namespace {

template <int kD>
struct Shared {
  Tile<kD> q, k, v;
};

template <int kD>
__global__ void __launch_bounds__(kThreads) flash_v1_rows(Shape shape, Arrays x) {
  extern __shared__ __align__(128) char s_bytes[];
  auto& s = *reinterpret_cast<Shared<kD>*>(s_bytes);
  const std::int64_t N = shape.N, first = blockIdx.x * N;  // the head's first row
  Bf16* g_o = x.O + first * kD;
  float *g_m = x.m + first, *g_l = x.l + first;
  clear_rows(shape, g_o, g_m, g_l);
  for (std::int64_t j = 0; j < N; j += kBc) {
    load(s.k, x.K + first * kD, kD, j, N);
    load(s.v, x.V + first * kD, kD, j, N);
    for (std::int64_t i = 0; i < N; i += kBr) {
      load(s.q, x.Q + first * kD, kD, i, N);
      arrive();  // the first time, the cleared rows are there too
      const std::int64_t row = i + 16 * warp_number();
      Block r_p[4];
      Sums<8> r_s;
      product_abt(r_s, s.q, 16 * warp_number(), s.k);
      scale_and_mask(r_s, shape, row, j);
      float m[2], l[2];
      for (int half = 0; half < 2; ++half) {
        m[half] = row_max(r_s, half);
        l[half] = row_exp(r_s, half, m[half]);
      }
      round_left(r_p, r_s);
      Sums<kD / 8> r_o;
      product_ab(r_o, r_p, s.v);
      take_into_rows(shape, g_o, g_m, g_l, row, r_o, m, l);
      __syncthreads();  // all warps have read the tiles, before the next ones are written there
    }
  }
}

}  // namespace

Status flash_v1(const Shape& shape, const Arrays& arrays, const Launch& where) {
  return ONEPASS_LAUNCH_RUNG(flash_v1_rows, Shared, shape.heads);
}
Grid flash_v1_grid(const Shape& shape) {
  return {shape.heads, ONEPASS_SHARED_BYTES(Shared)};
}

}  // namespace onepass::cuda::ladder
