// Packing of bfloat16 rows into the operands of pair dot products (vdpbf16ps, AMX tiles). Everything is made of 16 x 16
// blocks of dwords: a dword is two bfloat16 whose products are added into one float32. Masked loads read nothing past
// a row's end; what pads a block is 0.
#pragma once

#include "cpu/vec.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

using Bf16 = std::uint16_t;

/// Where dword block (pair group g, lane group l) of a packed operand lies, in elements; its 16 rows are `row` apart.
struct PairLayout {
  std::int64_t row, lane_group, pair_group;
};
/// For dot products by broadcast: [pair][lanes][2].
ONEPASS_INLINE constexpr PairLayout flat_layout(std::int64_t lanes) {
  return {2 * lanes, 32, 32 * lanes};
}
/// AMX's B operand: 1 KB tiles [pair / 16][lane / 16][16][32].
ONEPASS_INLINE constexpr PairLayout tile_layout(std::int64_t lanes) {
  return {32, 512, 32 * lanes};
}

/// Transposes a 16 x 16 block of dwords.
ONEPASS_INLINE void transpose_dwords(const __m512i (&in)[16], __m512i (&out)[16]) {
  __m512i t[16], u[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    u[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    u[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  // u[4 g + i] holds column 4 x + i of rows 4 g ... 4 g + 3 in its 128-bit part x: gather the parts over g.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i even01 = _mm512_shuffle_i32x4(u[i], u[4 + i], 0x88),
                  odd01 = _mm512_shuffle_i32x4(u[i], u[4 + i], 0xdd);
    const __m512i even23 = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0x88);
    const __m512i odd23 = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0xdd);
    out[i] = _mm512_shuffle_i32x4(even01, even23, 0x88);
    out[4 + i] = _mm512_shuffle_i32x4(odd01, odd23, 0x88);
    out[8 + i] = _mm512_shuffle_i32x4(even01, even23, 0xdd);
    out[12 + i] = _mm512_shuffle_i32x4(odd01, odd23, 0xdd);
  }
}

/// lo[0], hi[0], lo[1], hi[1], ... of x = lo[16] | hi[16].
ONEPASS_INLINE __m512i interleave_halves(__m512i x) {
  const __m512i index = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(index, x);
}

/// Sixteen dwords: even[i] rounded to bfloat16 in the low half, odd[i] in the high one.
ONEPASS_INLINE __m512i round_to_pairs(Vec even, Vec odd) {
  return interleave_halves((__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
}

/// Elements [0, n) of a row, n <= 32 (or <= 16); 0 behind them.
ONEPASS_INLINE __m512i load_row32(const Bf16* p, std::int64_t n) {
  return n >= 32 ? _mm512_loadu_si512(p)
         : n > 0 ? _mm512_maskz_loadu_epi16(static_cast<__mmask32>((std::uint32_t{1} << n) - 1), p)
                 : _mm512_setzero_si512();
}
ONEPASS_INLINE __m256i load_row16(const Bf16* p, std::int64_t n) {
  return n >= 16 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
         : n > 0 ? _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p)
                 : _mm256_setzero_si256();
}

ONEPASS_INLINE void store_row32(Bf16* p, std::int64_t n, __m512i x) {
  if (n >= 32) {
    _mm512_storeu_si512(p, x);
  } else {
    _mm512_mask_storeu_epi16(p, static_cast<__mmask32>((std::uint32_t{1} << n) - 1), x);
  }
}

/// Block of dwords (row, column pair): 16 rows by 32 columns at p, of which rows x columns exist.
ONEPASS_INLINE void load_column_pairs(const Bf16* p, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                                      __m512i (&block)[16]) {
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) block[r] = r < rows ? load_row32(p + r * stride, columns) : _mm512_setzero_si512();
}
/// Block of dwords (row pair, column): 32 rows by 16 columns.
ONEPASS_INLINE void load_row_pairs(const Bf16* p, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                                   __m512i (&block)[16]) {
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) {
    const __m256i even = 2 * r < rows ? load_row16(p + 2 * r * stride, columns) : _mm256_setzero_si256();
    const __m256i odd = 2 * r + 1 < rows ? load_row16(p + (2 * r + 1) * stride, columns) : _mm256_setzero_si256();
    block[r] = interleave_halves(_mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1));
  }
}
ONEPASS_INLINE void store_block(Bf16* p, std::int64_t row, const __m512i (&block)[16]) {
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) _mm512_storeu_si512(p + r * row, block[r]);
}

/// out[padded_rows][pitch] = the rows at p, zeros where there is none.
inline void copy_rows_padded(const Bf16* p, std::int64_t stride, std::int64_t rows, std::int64_t padded_rows,
                             std::int64_t columns, Bf16* out, std::int64_t pitch) {
  for (std::int64_t r = 0; r < padded_rows; ++r) {
    for (std::int64_t c = 0; c < pitch; c += 32) {
      const __m512i x = r < rows ? load_row32(p + r * stride + c, columns - c) : _mm512_setzero_si512();
      store_row32(out + r * pitch + c, pitch - c, x);
    }
  }
}

/// Rows become lanes, column pairs are contracted (Q^T, dO^T, K^T): rows x columns at p, padded with zeros to
/// multiples of 16 (at least `lanes`) and 32.
inline void pack_lanes_of_rows(const Bf16* p, std::int64_t stride, std::int64_t rows, std::int64_t columns, Bf16* out,
                               PairLayout layout, std::int64_t lanes = 0) {
  for (std::int64_t c = 0; c < columns; c += 32) {
    for (std::int64_t r = 0; r < max_of(rows, lanes); r += 16) {
      __m512i in[16], transposed[16];
      load_column_pairs(p + r * stride + c, stride, rows - r, columns - c, in);
      transpose_dwords(in, transposed);
      store_block(out + c / 32 * layout.pair_group + r / 16 * layout.lane_group, layout.row, transposed);
    }
  }
}

/// Looks at packed elements on their way.
struct NoObserver {
  ONEPASS_INLINE void operator()(__m512i) {}
};

/// Columns become lanes, row pairs are contracted (V, Q, dO, K as right factors): padded to multiples of 32 and 16.
template <class Observer = NoObserver>
inline void pack_lanes_of_columns(const Bf16* p, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                                  Bf16* out, PairLayout layout, Observer&& observe = {}) {
  for (std::int64_t r = 0; r < rows; r += 32) {
    for (std::int64_t c = 0; c < columns; c += 16) {
      __m512i block[16];
      load_row_pairs(p + r * stride + c, stride, rows - r, columns - c, block);
#pragma GCC unroll 16
      for (int x = 0; x < 16; ++x) observe(block[x]);
      store_block(out + r / 32 * layout.pair_group + c / 16 * layout.lane_group, layout.row, block);
    }
  }
}

/// The transpose as AMX's A operand (V^T, K^T): 1 KB tiles [column / 16][row / 32][16 columns][32 rows], `strip`
/// elements from one 16 columns to the next; padded to multiples of 32 rows and 16 columns.
template <class Observer = NoObserver>
inline void pack_transposed_tiles(const Bf16* p, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                                  Bf16* out, std::int64_t strip, Observer&& observe = {}) {
  for (std::int64_t r = 0; r < rows; r += 32) {
    for (std::int64_t c = 0; c < columns; c += 16) {
      __m512i block[16], transposed[16];
      load_row_pairs(p + r * stride + c, stride, rows - r, columns - c, block);
#pragma GCC unroll 16
      for (int x = 0; x < 16; ++x) observe(block[x]);
      transpose_dwords(block, transposed);
      store_block(out + c / 16 * strip + r / 32 * 512, 32, transposed);
    }
  }
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
