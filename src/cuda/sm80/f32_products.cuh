// Products of float32 matrices on tensor cores that take TF32. An operand x becomes big + small, both of TF32's 11
// bits: big is x to the nearest, small what is left, all but its last bit at times. A product is small*big + big*small
// + big*big; small*small is below float32's rounding. The tensor core truncates what it adds, always towards zero, so
// no chain of products is long: each begins at zero, small and big products apart, and is added in float32, rounded to
// the nearest. After Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores" (2022).
#pragma once

#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm80/f32_rows.cuh"

namespace onepass::cuda::sm80 {

__device__ __forceinline__ void split(std::uint32_t x, std::uint32_t& big, std::uint32_t& small) {
  big = (x + 0x1000u) & 0xffffe000u;  // ties away from zero
  small = __float_as_uint(__uint_as_float(x) - __uint_as_float(big));
}

/// What the tensor core drops of `small`.
__device__ __forceinline__ std::uint32_t last_bit(std::uint32_t small) {
  return __float_as_uint(__uint_as_float(small) - __uint_as_float(small & 0xffffe000u));
}

/// A 16x8 operand A, as mma_16x8x8_tf32 takes it.
struct SplitA {
  std::uint32_t big[4], small[4];

  __device__ __forceinline__ void set(const std::uint32_t (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) split(x[i], big[i], small[i]);
  }
  /// From a 16x8 result whose columns become the contraction: column 2 t takes the place of t, 2 t + 1 that of t + 4.
  __device__ __forceinline__ void set_result(const float (&x)[4]) {
    split(__float_as_uint(x[0]), big[0], small[0]);
    split(__float_as_uint(x[2]), big[1], small[1]);
    split(__float_as_uint(x[1]), big[2], small[2]);
    split(__float_as_uint(x[3]), big[3], small[3]);
  }
};
/// An 8x8 operand B.
struct SplitB {
  std::uint32_t big[2], small[2];

  __device__ __forceinline__ void set(std::uint32_t x0, std::uint32_t x1) {
    split(x0, big[0], small[0]);
    split(x1, big[1], small[1]);
  }
};

/// A chain of products, 16x8.
struct Chain {
  float big[4] = {}, small[4] = {};

  __device__ __forceinline__ void add(const SplitA& a, const SplitB& b) {
    ptx::mma_16x8x8_tf32(small, a.small, b.big[0], b.big[1]);
    ptx::mma_16x8x8_tf32(small, a.big, b.small[0], b.small[1]);
    ptx::mma_16x8x8_tf32(big, a.big, b.big[0], b.big[1]);
  }
  __device__ __forceinline__ float sum(int i) const { return big[i] + small[i]; }
};

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

template <int kM, int kN>
__device__ __forceinline__ void set_zero(float (&x)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][n][e] = 0;
    }
  }
}

/// s (16 kM, 8 kN) = A B^T, both tiles with kCols columns in shared memory, of which the first `lines` times 32 are not
/// all zero. Scores are exponents: an error of one is a relative error of its weight. So here each single big product
/// is added in float32; only the small ones form chains. kWhole: with the last bit of the operands too, which the
/// small parts leave out, in two more products.
template <int kM, int kN, int kCols, bool kWhole>
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
        std::uint32_t x[4];
        ptx::ldmatrix_x4(x, Tile::advance(b_lane, 8 * n, 2 * step));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          SplitB b;
          b.set(x[2 * i], x[2 * i + 1]);
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            float big[4] = {};
            ptx::mma_16x8x8_tf32(big, a[m].big, b.big[0], b.big[1]);
            ptx::mma_16x8x8_tf32(small[m][n + i], a[m].small, b.big[0], b.big[1]);
            ptx::mma_16x8x8_tf32(small[m][n + i], a[m].big, b.small[0], b.small[1]);
            if constexpr (kWhole) {
              std::uint32_t a_last[4];
#pragma unroll
              for (int e = 0; e < 4; ++e) a_last[e] = last_bit(a[m].small[e]);
              ptx::mma_16x8x8_tf32(small[m][n + i], a_last, b.big[0], b.big[1]);
              ptx::mma_16x8x8_tf32(small[m][n + i], a[m].big, last_bit(b.small[0]), last_bit(b.small[1]));
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) s[m][n + i][e] += big[e];
          }
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][n][e] += small[m][n][e];
    }
  }
}

/// 16 kGroups columns of A B: chains of one product for each of the steps of eight rows of B. load_a(step, a) gives
/// A's part of a step.
template <int kM, int kSteps, int kCols, int kGroups, class LoadA>
__device__ __forceinline__ void multiply_groups(Chain (&chain)[kM][2 * kGroups], std::uint32_t b_lane, LoadA&& load_a) {
  using Tile = F32Tile<kCols>;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    SplitA a[kM];
    load_a(step, a);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const std::uint32_t address = Tile::advance(b_lane, 8 * step, 4 * group);
      std::uint32_t low[2], high[2];
      ptx::load_shared(address, low);
      ptx::load_shared(F32Lanes<kCols>::next_row(address), high);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        SplitB b;
        b.set(low[n], high[n]);
#pragma unroll
        for (int m = 0; m < kM; ++m) chain[m][2 * group + n].add(a[m], b);
      }
    }
  }
}

/// sum (16 kM, kCols) = factor sum + A B, A (16 kM, 8 kSteps) in registers, B (8 kSteps, kCols) a tile. Columns as
/// F32Lanes::across_b has them: element [m][2 j + n][2 h + i] is row 16 m + 8 h + g, column 16 j + 4 t + 2 i + n.
/// kGroups of 16 columns at once, 1 or 2. Groups from column `columns` on are left alone; the branch also keeps the
/// compiler from having more chains under way than there are registers for.
template <int kM, int kSteps, int kCols, int kGroups, class Factor>
__device__ __forceinline__ void multiply_across(float (&sum)[kM][kCols / 8][4], const SplitA (&a)[kSteps][kM],
                                                std::uint32_t b_lane, int columns, Factor&& factor) {
#pragma unroll
  for (int j = 0; j < kCols / 16; j += kGroups) {
    if (16 * j >= columns) break;
    Chain chain[kM][2 * kGroups];
    multiply_groups<kM, kSteps, kCols, kGroups>(chain, F32Tile<kCols>::advance(b_lane, 0, 4 * j),
                                                [&](int step, SplitA(&r_a)[kM]) {
#pragma unroll
                                                  for (int m = 0; m < kM; ++m) r_a[m] = a[step][m];
                                                });
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

/// Visits a result in the order of multiply_across: visit(m, half, row, column, x) for a row, 16 m + 8 half + g, and
/// the four elements from `column` on.
template <int kM, int kCols, class Visit>
__device__ __forceinline__ void for_each_four(const float (&sum)[kM][kCols / 8][4], int lane, Visit&& visit) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kCols / 16; ++j) {
        const float4 x = {sum[m][2 * j][2 * half], sum[m][2 * j + 1][2 * half], sum[m][2 * j][2 * half + 1],
                          sum[m][2 * j + 1][2 * half + 1]};
        visit(m, half, 16 * m + 8 * half + lane / 4, 16 * j + lane % 4 * 4, x);
      }
    }
  }
}

}  // namespace onepass::cuda::sm80
