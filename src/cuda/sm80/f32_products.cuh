// Products of float32 matrices on tensor cores that take TF32. An operand x becomes big + small, both of TF32's 11
// bits: big is x to the nearest, small what is left, all but its last bit at times. A product is small*big + big*small
// + big*big; small*small is half a unit of its last place at most. The tensor core truncates what it adds, always
// towards zero, so no chain of products is long: each begins at zero, small and big products apart, and is added in
// float32, rounded to the nearest. After Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores"
// (2022).
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm80/f32_rows.cuh"

namespace onepass::cuda::sm80 {

__device__ __forceinline__ void split(std::uint32_t x, std::uint32_t& big, std::uint32_t& small) {
  big = (x + 0x1000u) & 0xffffe000u;  // ties away from zero
  small = __float_as_uint(__uint_as_float(x) - __uint_as_float(big));
}

/// Two float32, each exactly part 0 + part 1 + part 2, of bfloat16's 8 bits; x in the low halves.
__device__ __forceinline__ void split_pair(std::uint32_t x, std::uint32_t y, std::uint32_t (&part)[3]) {
  float r_x = __uint_as_float(x), r_y = __uint_as_float(y);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    part[i] = ptx::pack<__nv_bfloat16>(r_x, r_y);
    r_x -= __uint_as_float(part[i] << 16);
    r_y -= __uint_as_float(part[i] & 0xffff0000u);
  }
}

/// Operands in two parts, which leave out the last bit of 24 at times, or in three, which leave out nothing.
enum class Split { two, three };

/// Operands of 16x8 products over `kLoads` times eight, and the kProducts products of their parts: that of the largest
/// is added to big, the others to small. With either split they take as long. A and B are set from registers as
/// ldmatrix has them: slot t of eight in one, slot t + 4 in another. A can be set from a result too, whose columns
/// become the contraction: column 2t takes slot t, column 2t + 1 slot t + 4.
template <Split kSplit>
struct Operands;
template <>
struct Operands<Split::two> {
  static constexpr int kLoads = 1, kProducts = 3;
  struct A {
    std::uint32_t big[4], small[4];

    __device__ __forceinline__ void set(int, const std::uint32_t (&x)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) split(x[i], big[i], small[i]);
    }
    __device__ __forceinline__ void set_result(int, const float (&x)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) split(__float_as_uint(x[i % 2 * 2 + i / 2]), big[i], small[i]);
    }
  };
  struct B {
    std::uint32_t big[2], small[2];

    __device__ __forceinline__ void set(int, std::uint32_t x0, std::uint32_t x1) {
      split(x0, big[0], small[0]);
      split(x1, big[1], small[1]);
    }
  };
  __device__ __forceinline__ static void add(int product, float (&big)[4], float (&small)[4], const A& a, const B& b) {
    if (product == 0) ptx::mma_16x8x8_tf32(big, a.big, b.big[0], b.big[1]);
    if (product == 1) ptx::mma_16x8x8_tf32(small, a.small, b.big[0], b.big[1]);
    if (product == 2) ptx::mma_16x8x8_tf32(small, a.big, b.small[0], b.small[1]);
  }
};
/// All products but those below 2^-24. Slots t and t + 4 are a pair.
template <>
struct Operands<Split::three> {
  static constexpr int kLoads = 2, kProducts = 6;
  struct A {
    std::uint32_t part[3][4];

    __device__ __forceinline__ void set(int load, const std::uint32_t (&x)[4]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) set_pair(2 * load + i, x[i], x[i + 2]);
    }
    __device__ __forceinline__ void set_result(int load, const float (&x)[4]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) set_pair(2 * load + i, __float_as_uint(x[2 * i]), __float_as_uint(x[2 * i + 1]));
    }
    __device__ __forceinline__ void set_pair(int i, std::uint32_t x, std::uint32_t y) {
      std::uint32_t parts[3];
      split_pair(x, y, parts);
#pragma unroll
      for (int n = 0; n < 3; ++n) part[n][i] = parts[n];
    }
  };
  struct B {
    std::uint32_t part[2][3];

    __device__ __forceinline__ void set(int load, std::uint32_t x0, std::uint32_t x1) {
      split_pair(x0, x1, part[load]);
    }
  };
  __device__ __forceinline__ static void add(int product, float (&big)[4], float (&small)[4], const A& a, const B& b) {
    constexpr int kPartA[] = {0, 0, 1, 2, 0, 1}, kPartB[] = {0, 2, 1, 0, 1, 0};  // the smallest ones first
    const int part = kPartB[product];
    ptx::mma_16x8x16<__nv_bfloat16>(product == 0 ? big : small, a.part[kPartA[product]], b.part[0][part],
                                    b.part[1][part]);
  }
};

/// Sums of products, 16x8.
struct Chain {
  float big[4] = {}, small[4] = {};
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
  /// Two operands B with the tile's rows as their rows, in the order of A::set_result: 8 bytes of row 2 t of
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
/// is added in float32; only the small ones form chains.
template <int kM, int kN, int kCols, Split kSplit>
__device__ __forceinline__ void multiply_rows(float (&s)[kM][kN][4], std::uint32_t a_lane, std::uint32_t b_lane,
                                              int lines) {
  using Tile = F32Tile<kCols>;
  using Products = Operands<kSplit>;
  constexpr int kLoads = Products::kLoads;
  float small[kM][kN][4];
  set_zero(s);
  set_zero(small);
#pragma unroll 1
  for (int line = 0; line < lines; ++line, a_lane += 128, b_lane += 128) {
#pragma unroll(kSplit == Split::two ? 4 : 1)
    for (int step = 0; step < 4; step += kLoads) {
      typename Products::A a[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
          std::uint32_t x[4];
          ptx::ldmatrix_x4(x, Tile::advance(a_lane, 16 * m, 2 * (step + load)));
          a[m].set(load, x);
        }
      }
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        typename Products::B b[2];
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
          std::uint32_t x[4];
          ptx::ldmatrix_x4(x, Tile::advance(b_lane, 8 * n, 2 * (step + load)));
#pragma unroll
          for (int i = 0; i < 2; ++i) b[i].set(load, x[2 * i], x[2 * i + 1]);
        }
        const auto add_each = [&](int product, float(&big)[kM][2][4], auto&& sum) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int m = 0; m < kM; ++m) Products::add(product, big[m][i], sum(m, i), a[m], b[i]);
          }
        };
        // One product of each sum after the other: an instruction waits long for the sum of the one before.
        float big[kM][2][4];
        set_zero(big);
        if constexpr (kSplit == Split::two) {
#pragma unroll
          for (int product = 0; product < Products::kProducts; ++product)
            add_each(product, big, [&](int m, int i) -> float(&)[4] { return small[m][n + i]; });
#pragma unroll
          for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
              for (int e = 0; e < 4; ++e) s[m][n + i][e] += big[m][i][e];
            }
          }
        } else {
          // What the big sum cut off: the same products once more, less that sum.
          float rest[kM][2][4];
          const auto rest_of = [&](int m, int i) -> float(&)[4] { return rest[m][i]; };
          add_each(0, big, rest_of);
#pragma unroll
          for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
              for (int e = 0; e < 4; ++e) rest[m][i][e] = -big[m][i][e];
            }
          }
          add_each(0, rest, rest_of);
#pragma unroll
          for (int product = 1; product < Products::kProducts; ++product) add_each(product, big, rest_of);
#pragma unroll
          for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                s[m][n + i][e] += big[m][i][e];
                small[m][n + i][e] += rest[m][i][e];
              }
            }
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

/// 16 kGroups columns of A B: chains over the kSteps steps of eight rows of B. load_a(step, a) gives A's part of
/// kLoads steps.
template <int kM, int kSteps, int kCols, int kGroups, Split kSplit, class LoadA>
__device__ __forceinline__ void multiply_groups(Chain (&chain)[kM][2 * kGroups], std::uint32_t b_lane, LoadA&& load_a) {
  using Tile = F32Tile<kCols>;
  using Products = Operands<kSplit>;
  constexpr int kLoads = Products::kLoads;
  static_assert(kSteps % kLoads == 0);
#pragma unroll
  for (int step = 0; step < kSteps; step += kLoads) {
    typename Products::A a[kM];
    load_a(step, a);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      typename Products::B b[2];
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        const std::uint32_t address = Tile::advance(b_lane, 8 * (step + load), 4 * group);
        std::uint32_t low[2], high[2];
        ptx::load_shared(address, low);
        ptx::load_shared(F32Lanes<kCols>::next_row(address), high);
#pragma unroll
        for (int n = 0; n < 2; ++n) b[n].set(load, low[n], high[n]);
      }
#pragma unroll
      for (int product = 0; product < Products::kProducts; ++product) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            Chain& sum = chain[m][2 * group + n];
            Products::add(product, sum.big, sum.small, a[m], b[n]);
          }
        }
      }
    }
  }
}

/// sum (16 kM, kCols) = factor sum + A B, A (16 kM, 8 kSteps) in registers, B (8 kSteps, kCols) a tile. Columns as
/// F32Lanes::across_b has them: element [m][2 j + n][2 h + i] is row 16 m + 8 h + g, column 16 j + 4 t + 2 i + n.
/// kGroups of 16 columns at once, 1 or 2. Groups from column `columns` on are left alone; the branch also keeps the
/// compiler from having more chains under way than there are registers for.
template <int kM, int kSteps, int kCols, int kGroups, Split kSplit, class Factor>
__device__ __forceinline__ void multiply_across(
    float (&sum)[kM][kCols / 8][4], const typename Operands<kSplit>::A (&a)[kSteps / Operands<kSplit>::kLoads][kM],
    std::uint32_t b_lane, int columns, Factor&& factor) {
#pragma unroll
  for (int j = 0; j < kCols / 16; j += kGroups) {
    if (16 * j >= columns) break;
    Chain chain[kM][2 * kGroups];
    multiply_groups<kM, kSteps, kCols, kGroups, kSplit>(chain, F32Tile<kCols>::advance(b_lane, 0, 4 * j),
                                                        [&](int step, typename Operands<kSplit>::A(&r_a)[kM]) {
#pragma unroll
                                                          for (int m = 0; m < kM; ++m)
                                                            r_a[m] = a[step / Operands<kSplit>::kLoads][m];
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
