// GPU rung 4: FlashAttention v2 (Dao 2023, algorithm 1).
//
// A thread block has 64 query rows, a warp 16 of them with their Q, O, m and l in registers; K and V pass by. The
// blocks of a head need nothing of each other, and neither do the warps of a block, beyond the tiles that they share.
#include "cuda/ladder/warp.cuh"

namespace onepass::cuda::ladder {
namespace {

template <int kD>
struct Shared {
  Tile<kD> q, k, v;
};

template <int kD>
__global__ void __launch_bounds__(kThreads, 2) flash_v2_rows(Shape shape, Arrays x) {
  extern __shared__ __align__(128) char s_bytes[];
  auto& s = *reinterpret_cast<Shared<kD>*>(s_bytes);
  const std::int64_t N = shape.N, first = blockIdx.x / shape.Tr() * N;  // the head's first row
  const std::int64_t i = blockIdx.x % shape.Tr() * kBr, row = i + 16 * warp_number();
  const std::int64_t end = shape.causal ? min_of(N, i + kBr) : N;  // no row of the block sees a key from here on
  load(s.q, x.Q + first * kD, kD, i, N);
  arrive();
  Block r_q[kD / 16];
  load_left(r_q, s.q, 16 * warp_number());
  Sums<kD / 8> r_o;
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {};
  for (std::int64_t j = 0; j < end; j += kBc) {
    load(s.k, x.K + first * kD, kD, j, N);
    load(s.v, x.V + first * kD, kD, j, N);
    arrive();
    Sums<8> r_s;
    product_abt(r_s, r_q, s.k);
    scale_and_mask(r_s, shape, row, j);
    for (int half = 0; half < 2; ++half) {
      const float m_new = fmaxf(m[half], row_max(r_s, half)), alpha = __expf(m[half] - reference(m_new));
      m[half] = m_new;
      l[half] = alpha * l[half] + row_exp(r_s, half, m_new);
      row_scale(r_o, half, alpha);
    }
    Block r_p[4];
    round_left(r_p, r_s);
    product_ab(r_o, r_p, s.v);
    __syncthreads();  // all warps have read the tiles, before the next ones are written there
  }
  for (int half = 0; half < 2; ++half) {
    row_scale(r_o, half, l[half] > 0 ? 1 / l[half] : 0);
    const std::int64_t r = row + row_of(half);
    if (first_of_quad() && r < N) x.L[first + r] = m[half] + logf(l[half]);
  }
  store_rows(x.O + first * kD, kD, row, N, r_o);
}

}  // namespace

Status flash_v2(const Shape& shape, const Arrays& arrays, const Launch& where) {
  return ONEPASS_LAUNCH_RUNG(flash_v2_rows, Shared, shape.heads * shape.Tr());
}
Grid flash_v2_grid(const Shape& shape) {
  return {shape.heads * shape.Tr(), ONEPASS_SHARED_BYTES(Shared)};
}

}  // namespace onepass::cuda::ladder
