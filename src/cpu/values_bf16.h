// Elements of V that pair dot products get wrong. NaN and Inf reach rows that do not see them (0 * NaN inside a
// product), and the hardware takes subnormals for zeros, in results too. Both are rare: such an element is packed as 0
// and added by itself, in float32, to the rows that see it.
#pragma once

#include "core/mask.h"
#include "cpu/pack_bf16.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Magnitudes below 2^-100, whose products with a weight might be flushed, but not 0.
inline constexpr std::uint16_t kTinyEnd = 27 << 7;
inline constexpr std::uint16_t kNotFinite = 0x7f80;

ONEPASS_INLINE __mmask32 special_values(__m512i x) {
  const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
  return _mm512_cmp_epu16_mask(_mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)), _mm512_set1_epi16(kTinyEnd - 1),
                               _MM_CMPINT_LT) |
         _mm512_cmp_epu16_mask(magnitude, _mm512_set1_epi16(kNotFinite), _MM_CMPINT_NLT);
}

/// Observes V while it is packed.
struct SpecialScan {
  __m512i largest = _mm512_setzero_si512(), smallest = _mm512_set1_epi16(-1);  // magnitudes; the second less 1

  ONEPASS_INLINE void operator()(__m512i x) {
    const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
    largest = _mm512_max_epu16(largest, magnitude);
    smallest = _mm512_min_epu16(smallest, _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)));  // of 0: 0xffff
  }
  ONEPASS_INLINE bool found() const {
    return (_mm512_cmp_epu16_mask(smallest, _mm512_set1_epi16(kTinyEnd - 1), _MM_CMPINT_LT) |
            _mm512_cmp_epu16_mask(largest, _mm512_set1_epi16(kNotFinite), _MM_CMPINT_NLT)) != 0;
  }
};

/// A copy [rows][out_stride] with zeros for the special elements.
inline void copy_without_special(const Bf16* v, std::int64_t stride, std::int64_t rows, std::int64_t columns, Bf16* out,
                                 std::int64_t out_stride) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; c += 32) {
      const __m512i x = load_row32(v + r * stride + c, columns - c);
      store_row32(out + r * out_stride + c, columns - c, _mm512_maskz_mov_epi16(~special_values(x), x));
    }
  }
}

/// O^T[columns][64] += V^T P^T over the special elements of V's rows, which are the keys j0, j0 + 1, ... of the
/// sequence and the keys p_begin, ... of the packed weights; lane = query row i0 + lane.
__attribute__((noinline)) inline void add_special_values(const Bf16* v, std::int64_t stride, std::int64_t rows,
                                                         std::int64_t columns, const Bf16* p, std::int64_t p_begin,
                                                         PairLayout layout, const Sequence& sequence, std::int64_t i0,
                                                         std::int64_t j0, float* out) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t at = p_begin + r;
    const Bf16* weights = p + at / 32 * layout.pair_group + at / 2 % 16 * layout.row + at % 2;
    const Interval seeing = sequence.rows_seeing(j0 + r, j0 + r + 1);
    const std::int64_t first = max_of<std::int64_t>(seeing.begin - i0, 0),
                       last = min_of<std::int64_t>(seeing.end - i0, kWidth);
    for (std::int64_t c = 0; c < columns; ++c) {
      const Bf16 bits = v[r * stride + c];
      const std::uint16_t magnitude = bits & 0x7fff;
      if (magnitude == 0 || (magnitude >= kTinyEnd && magnitude < kNotFinite)) continue;
      const float x = bf16_to_float(bits);
      for (std::int64_t lane = first; lane < last; ++lane) {
        out[c * kWidth + lane] += bf16_to_float(weights[lane / 16 * layout.lane_group + lane % 16 * 2]) * x;
      }
    }
  }
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
