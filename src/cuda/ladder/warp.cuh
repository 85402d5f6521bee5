// What the rungs are written in: tiles in shared memory, 16 x 16 blocks in a warp's registers, their products.
#pragma once

#include "cuda/device/quad.cuh"
#include "cuda/device/swizzle.cuh"
#include "cuda/host/launch.h"
#include "cuda/ladder/ladder.h"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"

namespace onepass::cuda::ladder {

// ---- Where a thread is ----

__device__ inline int warp_number() {
  return threadIdx.x / 32;
}
__device__ inline int lane_number() {
  return threadIdx.x % 32;
}
/// Of 16 rows a lane holds parts of row lane / 4 and of row lane / 4 + 8; the four lanes of a row are a quad.
__device__ inline int row_of(int half) {
  return lane_number() / 4 + 8 * half;
}
__device__ inline int place_in_quad() {
  return lane_number() % 4;
}
__device__ inline bool first_of_quad() {
  return place_in_quad() == 0;
}

/// m, or 0 where a row has seen nothing: -inf minus -inf is NaN.
__device__ inline float reference(float m) {
  return m == -INFINITY ? 0.0f : m;
}

// ---- Tiles in shared memory ----

/// 64 rows of kCols numbers, in chunks of 8 whose places in a row change from row to row: ldmatrix reads a chunk of 8
/// rows at once, and they are in different banks. (Gaps between the rows would do that too, but a row that begins in
/// the middle of a sector makes the copies ask L2 for half of the sectors twice.)
template <int kCols>
struct alignas(128) Tile {
  Bf16 x[64 * kCols];
  __device__ Bf16* chunk(int row, int n) { return x + SwizzledTile<kCols>::offset(row, n) / 2; }
  __device__ const Bf16* chunk(int row, int n) const { return x + SwizzledTile<kCols>::offset(row, n) / 2; }
};

/// Starts to copy rows [row, row + 64) of g (rows, pitch), columns [0, kCols), by all threads; zeros behind the last.
template <int kCols>
__device__ void load(Tile<kCols>& s_tile, const Bf16* g, std::int64_t pitch, std::int64_t row, std::int64_t rows) {
  constexpr int kChunks = kCols / 8;
  for (int n = threadIdx.x; n < 64 * kChunks; n += kThreads) {
    const int r = n / kChunks, c = n % kChunks;
    const bool there = row + r < rows;
    ptx::cp_async_16(ptx::shared_address(s_tile.chunk(r, c)), there ? g + (row + r) * pitch + 8 * c : g,
                     there ? 16 : 0);
  }
}
/// All copies of all threads are there.
__device__ inline void arrive() {
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
}

// ---- Operands: 16 x 16 blocks in registers ----

struct Block {
  std::uint32_t x[4];
};
/// What ldmatrix makes of the 16 x 16 block at (row, col) depends on where its four 8 x 8 corners go.
template <bool kAcross, bool kTransposed, int kCols>
__device__ Block load_block(const Tile<kCols>& s_tile, int row, int col) {
  const auto lane = block_rows<kCols, !kAcross>(ptx::shared_address(s_tile.x), lane_number());
  Block block;
  const std::uint32_t address = lane.at(row, col / 8);
  kTransposed ? ptx::ldmatrix_x4_trans(block.x, address) : ptx::ldmatrix_x4(block.x, address);
  return block;
}
/// As the left factor: the block, and its transpose.
template <int kCols>
__device__ Block left(const Tile<kCols>& s_tile, int row, int col) {
  return load_block<false, false>(s_tile, row, col);
}
template <int kCols>
__device__ Block left_transposed(const Tile<kCols>& s_tile, int row, int col) {
  return load_block<true, true>(s_tile, row, col);
}
/// As the right factor.
template <int kCols>
__device__ Block right(const Tile<kCols>& s_tile, int row, int col) {
  return load_block<false, true>(s_tile, row, col);
}
template <int kCols>
__device__ Block right_transposed(const Tile<kCols>& s_tile, int row, int col) {
  return load_block<true, false>(s_tile, row, col);
}

// ---- Sums: 16 rows of float32 in registers ----

/// 16 x 8 kN: x[n][2 half + e] is column 8 n + 2 (lane % 4) + e of row_of(half).
template <int kN>
struct Sums {
  float x[kN][4] = {};
};

/// Columns 16 n ... of c += a b.
template <int kN>
__device__ void multiply(Sums<kN>& c, int n, const Block& a, const Block& b) {
  ptx::mma_16x8x16<Bf16>(c.x[2 * n], a.x, b.x[0], b.x[1]);
  ptx::mma_16x8x16<Bf16>(c.x[2 * n + 1], a.x, b.x[2], b.x[3]);
}
/// S (16 x 64) += a (16 x 16 kK) B^T, B 64 rows.
template <int kK, int kCols>
__device__ void product_abt(Sums<8>& s, const Block (&a)[kK], const Tile<kCols>& s_b) {
#pragma unroll
  for (int k = 0; k < kK; ++k) {
#pragma unroll
    for (int n = 0; n < 4; ++n) multiply(s, n, a[k], right_transposed(s_b, 16 * n, 16 * k));
  }
}
/// The same, a's rows in a tile from `row` on.
template <int kCols>
__device__ void product_abt(Sums<8>& s, const Tile<kCols>& s_a, int row, const Tile<kCols>& s_b) {
#pragma unroll
  for (int k = 0; k < kCols / 16; ++k) {
    const Block a = left(s_a, row, 16 * k);
#pragma unroll
    for (int n = 0; n < 4; ++n) multiply(s, n, a, right_transposed(s_b, 16 * n, 16 * k));
  }
}
/// O (16 x kCols) += a (16 x 64) B, B 64 rows.
template <int kCols>
__device__ void product_ab(Sums<kCols / 8>& o, const Block (&a)[4], const Tile<kCols>& s_b) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int n = 0; n < kCols / 16; ++n) multiply(o, n, a[k], right(s_b, 16 * k, 16 * n));
  }
}
/// Rows [row, row + 16) of a tile as the left factor.
template <int kK, int kCols>
__device__ void load_left(Block (&a)[kK], const Tile<kCols>& s_tile, int row) {
#pragma unroll
  for (int k = 0; k < kK; ++k) a[k] = left(s_tile, row, 16 * k);
}
/// Sums rounded to the left factor of the next product: the places in registers are the same.
template <int kK>
__device__ void round_left(Block (&a)[kK], const Sums<2 * kK>& c) {
#pragma unroll
  for (int k = 0; k < kK; ++k) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float* pair = &c.x[2 * k + n / 2][n % 2 * 2];
      a[k].x[n] = ptx::pack<Bf16>(pair[0], pair[1]);
    }
  }
}

/// S = scale S, -inf where hidden; row 0 is query i, column 0 key j.
template <int kN>
__device__ void scale_and_mask(Sums<kN>& s, const Shape& shape, std::int64_t i, std::int64_t j) {
  const float scale = rsqrtf(static_cast<float>(shape.d));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int seen = static_cast<int>(clamp_to<std::int64_t>(shape.end(i + row_of(half)) - j, 0, 8 * kN));
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s.x[n][2 * half + e];
        x = 8 * n + 2 * place_in_quad() + e < seen ? scale * x : -INFINITY;
      }
    }
  }
}
/// The largest of a row.
template <int kN>
__device__ float row_max(const Sums<kN>& s, int half) {
  float m = -INFINITY;
#pragma unroll
  for (int n = 0; n < kN; ++n) m = fmaxf(m, fmaxf(s.x[n][2 * half], s.x[n][2 * half + 1]));
  return quad_max(m);
}
/// A row becomes exp(s - m); its sum.
template <int kN>
__device__ float row_exp(Sums<kN>& s, int half, float m) {
  float l = 0;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 2 * half; e < 2 * half + 2; ++e) l += s.x[n][e] = __expf(s.x[n][e] - reference(m));
  }
  return quad_sum(l);
}
/// A row times a factor.
template <int kN>
__device__ void row_scale(Sums<kN>& c, int half, float factor) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    c.x[n][2 * half] *= factor;
    c.x[n][2 * half + 1] *= factor;
  }
}

// ---- Sums to and from global memory ----

/// Transposes the 4 x 4 numbers of a quad: number i of lane t goes to number t of lane i.
__device__ inline void transpose_quad(std::uint32_t (&x)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool high = place_in_quad() & step;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n & step) continue;
      const std::uint32_t got = __shfl_xor_sync(~0u, high ? x[n] : x[n + step], step);
      (high ? x[n] : x[n + step]) = got;
    }
  }
}
/// Rounds and writes 16 rows from row `row` of g (rows, pitch) on. A lane's own pairs of columns would fill L2's
/// sectors of 32 bytes piece by piece; so the lanes of a quad trade, and each writes 16 bytes.
template <int kN>
__device__ void store_rows(Bf16* g, std::int64_t pitch, std::int64_t row, std::int64_t rows, const Sums<kN>& c) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t r = row + row_of(half);
#pragma unroll
    for (int n = 0; n < kN; n += 4) {
      std::uint32_t x[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k] = ptx::pack<Bf16>(c.x[n + k][2 * half], c.x[n + k][2 * half + 1]);
      transpose_quad(x);
      if (r < rows) {
        __stcg(reinterpret_cast<uint4*>(g + r * pitch + 8 * (n + place_in_quad())), make_uint4(x[0], x[1], x[2], x[3]));
      }
    }
  }
}
/// The way back, past L1; rows behind the last are 0.
template <int kN>
__device__ void load_rows(Sums<kN>& c, const Bf16* g, std::int64_t pitch, std::int64_t row, std::int64_t rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t r = row + row_of(half);
#pragma unroll
    for (int n = 0; n < kN; n += 4) {
      uint4 chunk = {};
      if (r < rows) chunk = __ldcg(reinterpret_cast<const uint4*>(g + r * pitch + 8 * (n + place_in_quad())));
      std::uint32_t x[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
      transpose_quad(x);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        c.x[n + k][2 * half] = __uint_as_float(x[k] << 16);
        c.x[n + k][2 * half + 1] = __uint_as_float(x[k] & 0xffff0000u);
      }
    }
  }
}

/// v1's step for a warp's 16 rows from row i of a head on: their O, m and l in global memory take in what one key tile
/// gave, P V = tile with the maxima m_tile and sums l_tile of row_of(0) and row_of(1).
template <int kN>
__device__ void take_into_rows(const Shape& shape, Bf16* g_o, float* g_m, float* g_l, std::int64_t i,
                               const Sums<kN>& tile, const float (&m_tile)[2], const float (&l_tile)[2]) {
  Sums<kN> r_o;
  load_rows(r_o, g_o, shape.d, i, shape.N);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t r = i + row_of(half);
    const bool mine = first_of_quad() && r < shape.N;
    const float m = __shfl_sync(~0u, mine ? __ldcg(g_m + r) : -INFINITY, 0, 4);
    const float l = __shfl_sync(~0u, mine ? __ldcg(g_l + r) : 0, 0, 4);
    const float m_new = fmaxf(m, m_tile[half]);
    const float old_part = l * __expf(m - reference(m_new)), new_part = __expf(m_tile[half] - reference(m_new));
    const float l_new = old_part + new_part * l_tile[half], inverse = l_new > 0 ? 1 / l_new : 0;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e)
        r_o.x[n][e] = inverse * (old_part * r_o.x[n][e] + new_part * tile.x[n][e]);
    }
    if (mine) g_m[r] = m_new, g_l[r] = l_new;
  }
  store_rows(g_o, shape.d, i, shape.N, r_o);
}
/// O = 0, m = -inf, l = 0 for a head, by all threads. A barrier must follow.
__device__ inline void clear_rows(const Shape& shape, Bf16* g_o, float* g_m, float* g_l) {
  for (std::int64_t n = threadIdx.x; n < shape.N * shape.d / 8; n += kThreads)
    __stcg(reinterpret_cast<uint4*>(g_o) + n, uint4{});
  for (std::int64_t n = threadIdx.x; n < shape.N; n += kThreads) g_m[n] = -INFINITY, g_l[n] = 0;
}

// ---- Host ----

/// Launches kernel<64> or kernel<128>.
#define ONEPASS_LAUNCH_RUNG(kernel, Shared, blocks)                                               \
  (shape.d == 64 ? launch(kernel<64>, blocks, kThreads, sizeof(Shared<64>), where, shape, arrays) \
                 : launch(kernel<128>, blocks, kThreads, sizeof(Shared<128>), where, shape, arrays))
#define ONEPASS_SHARED_BYTES(Shared) static_cast<std::int64_t>(shape.d == 64 ? sizeof(Shared<64>) : sizeof(Shared<128>))

}  // namespace onepass::cuda::ladder
