// Products of float32 matrices on tensor cores that take TF32. An operand x becomes big + small, both of TF32's 11
// bits: big is x to the nearest, small what is left, all but its last bit at times. A product is small*big + big*small
// + big*big; small*small is half a unit of its last place at most. Chains of products as in f32_parts.cuh. After Ootomo
// and Yokota, "Recovering single precision accuracy from Tensor Cores" (2022).
#pragma once

#include "cuda/sm80/f32_parts.cuh"

namespace onepass::cuda::sm80 {

__device__ __forceinline__ void split(std::uint32_t x, std::uint32_t& big, std::uint32_t& small) {
  big = (x + 0x1000u) & 0xffffe000u;  // ties away from zero
  small = __float_as_uint(__uint_as_float(x) - __uint_as_float(big));
}

/// Operand A of 16x8 products, set from registers as ldmatrix has them, slot t of eight in one, slot t + 4 in another;
/// or from a result, whose columns become the contraction: column 2t takes slot t, column 2t + 1 slot t + 4.
struct SplitA {
  std::uint32_t big[4], small[4];

  __device__ __forceinline__ void set(const std::uint32_t (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) split(x[i], big[i], small[i]);
  }
  __device__ __forceinline__ void set_result(const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) split(__float_as_uint(x[i % 2 * 2 + i / 2]), big[i], small[i]);
  }
};
struct SplitB {
  std::uint32_t big[2], small[2];

  __device__ __forceinline__ void set(std::uint32_t x0, std::uint32_t x1) {
    split(x0, big[0], small[0]);
    split(x1, big[1], small[1]);
  }
};

/// The products of the halves: that of the big ones is added to big, the others to small.
inline constexpr int kSplitProducts = 3;
__device__ __forceinline__ void add_product(int product, float (&big)[4], float (&small)[4], const SplitA& a,
                                            const SplitB& b) {
  if (product == 0) ptx::mma_16x8x8_tf32(big, a.big, b.big[0], b.big[1]);
  if (product == 1) ptx::mma_16x8x8_tf32(small, a.small, b.big[0], b.big[1]);
  if (product == 2) ptx::mma_16x8x8_tf32(small, a.big, b.small[0], b.small[1]);
}

/// Lane addresses in tiles of kCols columns.
template <int kCols>
struct F32Lanes {
  using Tile = F32Tile<kCols>;
  /// Operand A with the tile's rows as its rows: 16 rows of 8 columns a load.
  __device__ static std::uint32_t rows_a(int lane) { return Tile::offset(lane % 16, lane / 16); }
  /// Operand B with the tile's rows as its columns: 16 rows of 8 columns a load.
  __device__ static std::uint32_t rows_b(int lane) { return Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2); }
  /// Two operands B with the tile's rows as their rows, in the order of SplitA::set_result: 8 bytes of row 2 t of
  /// eight, and, at next_row, of row 2 t + 1. The operand n of two has the columns 2 g + n of 16.
  __device__ static std::uint32_t across_b(int lane) { return Tile::offset(lane % 4 * 2, lane / 8) + lane / 4 % 2 * 8; }
  __device__ static std::uint32_t next_row(std::uint32_t address) { return (address ^ 16u) + Tile::kPitch; }
};

/// s (16 kM, 8 kN) = A B^T, both tiles of kCols columns in shared memory, of which the first `lines` times 32 are not
/// all zero. Scores are exponents: an error of one is a relative error of its weight. So here each single big product
/// is added in float32; only the small ones form chains.
template <int kM, int kN, int kCols>
__device__ __forceinline__ void multiply_rows(float (&s)[kM][kN][4], std::uint32_t a_lane, std::uint32_t b_lane,
                                              int lines) {
  using Tile = F32Tile<kCols>;
  float small[kM][kN][4];
  set_zero(s);
  set_zero(small);
#pragma unroll 1
  for (int line = 0; line < lines; ++line, a_lane += 128, b_lane += 128) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      SplitA a[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        std::uint32_t x[4];
        ptx::ldmatrix_x4(x, Tile::advance(a_lane, 16 * m, 2 * step));
        a[m].set(x);
      }
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        SplitB b[2];
        std::uint32_t x[4];
        ptx::ldmatrix_x4(x, Tile::advance(b_lane, 8 * n, 2 * step));
#pragma unroll
        for (int i = 0; i < 2; ++i) b[i].set(x[2 * i], x[2 * i + 1]);
        // One product of each sum after the other: an instruction waits long for the sum of the one before.
        float big[kM][2][4];
        set_zero(big);
#pragma unroll
        for (int product = 0; product < kSplitProducts; ++product) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int m = 0; m < kM; ++m) add_product(product, big[m][i], small[m][n + i], a[m], b[i]);
          }
        }
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[m][n + i][e] += big[m][i][e];
          }
        }
      }
    }
  }
  add_sums(s, small);
}

/// sum (16 kM, kCols) = factor sum + A B, A (16 kM, 8 kSteps) in registers, B (8 kSteps, kCols) a tile. Columns as
/// F32Lanes::across_b has them, which is the order of multiply_across in f32_parts.cuh. kGroups of 16 columns at once.
/// Groups from column `columns` on are left alone; the branch also keeps the compiler from having more chains under way
/// than there are registers for.
template <int kM, int kSteps, int kCols, int kGroups, class Factor>
__device__ __forceinline__ void multiply_across(float (&sum)[kM][kCols / 8][4], const SplitA (&a)[kSteps][kM],
                                                std::uint32_t b_lane, int columns, Factor&& factor) {
  using Tile = F32Tile<kCols>;
#pragma unroll
  for (int j = 0; j < kCols / 16; j += kGroups) {
    if (16 * j >= columns) break;
    Chain chain[kM][2 * kGroups];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const std::uint32_t address = Tile::advance(b_lane, 8 * step, 4 * (j + group));
        std::uint32_t low[2], high[2];
        ptx::load_shared(address, low);
        ptx::load_shared(F32Lanes<kCols>::next_row(address), high);
        SplitB b[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) b[n].set(low[n], high[n]);
#pragma unroll
        for (int product = 0; product < kSplitProducts; ++product) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int m = 0; m < kM; ++m) {
              Chain& x = chain[m][2 * group + n];
              add_product(product, x.big, x.small, a[step][m], b[n]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * kGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = sum[m][2 * j + n][e];
          x = fmaf(x, factor(2 * m + e / 2), chain[m][n].sum(e));
        }
      }
    }
  }
}

}  // namespace onepass::cuda::sm80
