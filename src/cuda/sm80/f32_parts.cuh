// Products of float32 matrices on tensor cores that take bfloat16. An operand is the sum of three parts of eight bits,
// nothing left out, and lies in shared memory as three tiles of 16-bit elements: whoever writes it there splits it,
// once for all warps and products that read it. A product is six instructions, all but those below 2^-24 of it. The
// tensor core truncates what it adds, always towards zero, so no chain of products is long: each begins at zero, big
// and small products apart, and is added in float32, rounded to the nearest.
#pragma once

#include "cuda/device/sums.cuh"
#include "cuda/device/swizzle.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm80/f32_rows.cuh"

namespace onepass::cuda::sm80 {

/// Two float32, each exactly part 0 + part 1 + part 2, of bfloat16's 8 bits; x in the low halves.
__device__ __forceinline__ void split_pair(float x, float y, std::uint32_t (&part)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    part[i] = ptx::pack<__nv_bfloat16>(x, y);
    x -= __uint_as_float(part[i] << 16);
    y -= __uint_as_float(part[i] & 0xffff0000u);
  }
}

/// kRows rows of kCols float32 as three tiles of bfloat16, one for each part. Of each sixteen columns the even ones
/// come first: so a thread's results of two neighbouring products over the columns are four neighbouring columns.
template <int kRows, int kCols>
struct PartsTile {
  using Part = SwizzledTile<kCols>;
  static constexpr int kPartBytes = kRows * Part::kRowBytes, kBytes = 3 * kPartBytes;

  /// Splits elements [16 j, 16 j + 16) of a row of `dim` elements at g_row; store(byte, x) takes 16 bytes of the tile.
  /// `inside`: else all are zero, and nothing is read.
  template <class Store>
  __device__ __forceinline__ static void split(const float* g_row, int row, int j, bool inside, int dim, bool aligned,
                                               Store&& store) {
    std::uint32_t part[3][2][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float4 x = inside ? load_four(g_row, 16 * j + 4 * t, dim, aligned) : float4{0, 0, 0, 0};
      std::uint32_t even[3], odd[3];
      split_pair(x.x, x.z, even);
      split_pair(x.y, x.w, odd);
#pragma unroll
      for (int i = 0; i < 3; ++i) part[i][0][t] = even[i], part[i][1][t] = odd[i];
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const auto& x = part[i][n];
        store(i * kPartBytes + Part::offset(row, 2 * j + n), uint4{x[0], x[1], x[2], x[3]});
      }
    }
  }
};

/// Operand A of 16x16 products: ldmatrix's registers of each part.
struct PartsA {
  std::uint32_t part[3][4];

  /// Half of the contraction, 16x8, from a result: its columns become the contraction.
  __device__ __forceinline__ void set(int half, const float (&x)[4]) {
    set_pair(2 * half, x[0], x[1]);
    set_pair(2 * half + 1, x[2], x[3]);
  }
  /// From ldmatrix of a tile of float32 in which of each eight columns the even ones come first.
  __device__ __forceinline__ void set_columns(int half, const std::uint32_t (&x)[4]) {
    set_pair(2 * half, __uint_as_float(x[0]), __uint_as_float(x[2]));
    set_pair(2 * half + 1, __uint_as_float(x[1]), __uint_as_float(x[3]));
  }

 private:
  __device__ __forceinline__ void set_pair(int i, float x, float y) {
    std::uint32_t parts[3];
    split_pair(x, y, parts);
#pragma unroll
    for (int n = 0; n < 3; ++n) part[n][i] = parts[n];
  }
};
/// Operands B of two neighbouring 16x8 products: ldmatrix's registers of each part.
struct PartsB {
  std::uint32_t part[3][4];
};

/// The products of the parts of A and B's half n: that of the largest is added to big, the others, the smallest first,
/// to small.
inline constexpr int kPartProducts = 6;
__device__ __forceinline__ void add_product(int product, float (&big)[4], float (&small)[4], const PartsA& a,
                                            const PartsB& b, int n) {
  constexpr int kPartA[] = {0, 0, 1, 2, 0, 1}, kPartB[] = {0, 2, 1, 0, 1, 0};
  const std::uint32_t(&part)[4] = b.part[kPartB[product]];
  ptx::mma_16x8x16<__nv_bfloat16>(product == 0 ? big : small, a.part[kPartA[product]], part[2 * n], part[2 * n + 1]);
}

/// Sums of products, 16x8.
struct Chain {
  float big[4] = {}, small[4] = {};
  __device__ __forceinline__ float sum(int i) const { return big[i] + small[i]; }
};

/// Chunk of the 16 columns j of those that one of kWarps warps has, which share the columns of a tile: each has every
/// kWarps-th 32 of them.
template <int kWarps>
__device__ __forceinline__ constexpr int shared_chunk(int j) {
  return j / 2 * (4 * kWarps) + j % 2 * 2;
}

/// s (16 kM, 8 kN) = A B^T of tiles PartsTile<kRowsA, kCols> and PartsTile<kRowsB, kCols>, over `lines` times 32
/// columns as shared_chunk<kWarps> has them; a and b: block_rows of their first part. Scores are exponents: an error of
/// one is a relative error of its weight. So here each single big product is added in float32, and what it cut off as
/// well: the same product once more, less that sum. kAtOnce: of the steps of sixteen columns, 1 or 2.
template <int kM, int kN, int kRowsA, int kRowsB, int kCols, int kWarps, int kAtOnce>
__device__ __forceinline__ void multiply_rows(float (&s)[kM][kN][4], LaneRows<kCols> a, LaneRows<kCols> b, int lines) {
  static_assert(kN % 2 == 0);
  float small[kM][kN][4];
  set_zero(s);
  set_zero(small);
#pragma unroll 1
  for (int line = 0; line < lines; ++line) {
#pragma unroll kAtOnce
    for (int step = 0; step < 2; ++step) {
      PartsA r_a[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int i = 0; i < 3; ++i)
          ptx::ldmatrix_x4(r_a[m].part[i], a.at(16 * m, shared_chunk<kWarps>(2 * line + step)) +
                                               i * PartsTile<kRowsA, kCols>::kPartBytes);
      }
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        PartsB r_b;
#pragma unroll
        for (int i = 0; i < 3; ++i)
          ptx::ldmatrix_x4(r_b.part[i], b.at(8 * n, shared_chunk<kWarps>(2 * line + step)) +
                                            i * PartsTile<kRowsB, kCols>::kPartBytes);
        float big[kM][2][4], rest[kM][2][4];
        set_zero(big);
        const auto add = [&](int product, float(&largest)[kM][2][4]) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int m = 0; m < kM; ++m) add_product(product, largest[m][i], rest[m][i], r_a[m], r_b, i);
          }
        };
        const auto each = [&](auto&& visit) {
#pragma unroll
          for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
              for (int e = 0; e < 4; ++e) visit(m, i, e);
            }
          }
        };
        // One product of each sum after the other: an instruction waits long for the sum of the one before.
        add(0, big);
        each([&](int m, int i, int e) { rest[m][i][e] = -big[m][i][e]; });
        add(0, rest);
#pragma unroll
        for (int product = 1; product < kPartProducts; ++product) add(product, big);
        each([&](int m, int i, int e) {
          s[m][n + i][e] += big[m][i][e];
          small[m][n + i][e] += rest[m][i][e];
        });
      }
    }
  }
  add_sums(s, small);
}

/// Operands B of kGroups times 16 columns, the first of them `group` as shared_chunk<kWarps> has them, from sixteen
/// rows of a tile PartsTile<kRowsB, kCols>.
template <int kRowsB, int kCols, int kWarps, int kGroups>
__device__ __forceinline__ void load_across(PartsB (&r_b)[kGroups], LaneRows<kCols> b, int step, int group) {
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int i = 0; i < 3; ++i)
      ptx::ldmatrix_x4_trans(
          r_b[g].part[i], b.at(16 * step, shared_chunk<kWarps>(group + g)) + i * PartsTile<kRowsB, kCols>::kPartBytes);
  }
}
/// One step of the chains.
template <int kM, int kGroups>
__device__ __forceinline__ void add_products(Chain (&chain)[kM][2 * kGroups], const PartsA (&a)[kM],
                                             const PartsB (&b)[kGroups]) {
#pragma unroll
  for (int product = 0; product < kPartProducts; ++product) {
#pragma unroll
    for (int n = 0; n < 2 * kGroups; ++n) {
#pragma unroll
      for (int m = 0; m < kM; ++m) add_product(product, chain[m][n].big, chain[m][n].small, a[m], b[n / 2], n % 2);
    }
  }
}
/// 16 kGroups columns of A B: chains over the kSteps steps of sixteen rows of B. load_a(step, a) gives A's part of a
/// step.
template <int kM, int kSteps, int kRowsB, int kCols, int kGroups, class LoadA>
__device__ __forceinline__ void multiply_groups(Chain (&chain)[kM][2 * kGroups], LaneRows<kCols> b, LoadA&& load_a) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    PartsA r_a[kM];
    load_a(step, r_a);
    PartsB r_b[kGroups];
    load_across<kRowsB, kCols, 1, kGroups>(r_b, b, step, 0);
    add_products<kM, kGroups>(chain, r_a, r_b);
  }
}

/// sum (16 kM, kCols / kWarps) += A B, A (16 kM, 16 kSteps) in registers, B a tile as above. Element [m][2 j + n][2 h +
/// i] is row 16 m + 8 h + g, column 16 j + 4 t + 2 i + n. kGroups of 16 columns at once. Groups from column `columns`
/// on are left alone; the branch also keeps the compiler from having more chains under way than there are registers
/// for, so the next groups' operands are loaded here before the products of these.
template <int kM, int kSteps, int kRowsB, int kCols, int kWarps, int kGroups>
__device__ __forceinline__ void multiply_across(float (&sum)[kM][kCols / kWarps / 8][4], const PartsA (&a)[kSteps][kM],
                                                LaneRows<kCols> b, int columns) {
  constexpr int kAll = kCols / kWarps / 16;
  PartsB next[kSteps][kGroups];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) load_across<kRowsB, kCols, kWarps, kGroups>(next[step], b, step, 0);
#pragma unroll
  for (int j = 0; j < kAll; j += kGroups) {
    if (16 * j >= columns) break;
    Chain chain[kM][2 * kGroups];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      PartsB now[kGroups];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) now[group] = next[step][group];
      if (j + kGroups < kAll) load_across<kRowsB, kCols, kWarps, kGroups>(next[step], b, step, j + kGroups);
      add_products<kM, kGroups>(chain, a[step], now);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * kGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[m][2 * j + n][e] += chain[m][n].sum(e);
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
