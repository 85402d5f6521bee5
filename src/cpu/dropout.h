// Dropout on a tile of weights: the counters of core/dropout.h, one query row a lane.
#pragma once

#include "core/dropout.h"
#include "cpu/vec.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

struct WideProduct {
  UintVec high, low;
};

/// The 64-bit products of 32-bit lanes with one number.
ONEPASS_INLINE WideProduct multiply_wide(UintVec a, std::uint32_t b) {
#if defined(__AVX512F__)
  const __m512i x = (__m512i)a, y = _mm512_set1_epi64(b);
  const __m512i even = _mm512_mul_epu32(x, y), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), y);
  return {(UintVec)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd),
          (UintVec)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32))};
#elif defined(__AVX2__)
  const __m256i x = (__m256i)a, y = _mm256_set1_epi64x(b);
  const __m256i even = _mm256_mul_epu32(x, y), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), y);
  return {(UintVec)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa),
          (UintVec)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa)};
#else
  WideProduct product;
  for (int i = 0; i < kLanes; ++i) {
    const std::uint64_t wide = std::uint64_t{a[i]} * b;
    product.high[i] = static_cast<std::uint32_t>(wide >> 32);
    product.low[i] = static_cast<std::uint32_t>(wide);
  }
  return product;
#endif
}

/// philox() of core/dropout.h for kLanes values of the second counter.
ONEPASS_INLINE void philox(UintVec (&word)[4], std::uint64_t seed, std::uint32_t c0, UintVec c1, std::uint32_t c2,
                           std::uint32_t c3) {
  std::uint32_t key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
  word[0] = c0 + UintVec{};
  word[1] = c1;
  word[2] = c2 + UintVec{};
  word[3] = c3 + UintVec{};
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const WideProduct product0 = multiply_wide(word[0], kPhiloxMultiplier0);
    const WideProduct product1 = multiply_wide(word[2], kPhiloxMultiplier1);
    word[0] = product1.high ^ word[1] ^ key0;
    word[1] = product1.low;
    word[2] = product0.high ^ word[3] ^ key1;
    word[3] = product0.low;
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
}

/// p[key][lane] times the factor of key `first` + key and query row `row`: 0, or the keep scale. The keys are at most
/// the eight of one counter, `step` floats apart.
ONEPASS_INLINE void drop_keys(const UintVec (&word)[4], const DropoutSpec& spec, float* p, std::int64_t step,
                              std::int64_t first, std::int64_t keys) {
  for (std::int64_t j = 0; j < keys; ++j) {
    const std::int64_t lane = (first + j) & 7;
    const UintVec draw = (word[lane >> 1] >> static_cast<std::uint32_t>(16 * (lane & 1))) & 0xffffu;
    float* at = p + j * step;
    // 16 bits compare as signed numbers; the threshold may be 65536.
    const IntVec keep = reinterpret_cast<IntVec>(draw) >= static_cast<std::int32_t>(spec.threshold);
    store(at, load(at) * select(keep, broadcast(spec.keep_scale), Vec{}));
  }
}

/// Multiplies a tile p[key][kWidth] by dropout's factors; keys [j0, j0 + keys), rows from i0, `step` floats between
/// keys.
inline void drop_tile(const DropoutSpec& spec, std::uint64_t seed, std::uint32_t offset, std::int64_t batch_head,
                      float* p, std::int64_t keys, std::int64_t i0, std::int64_t j0, std::int64_t step) {
  for (int v = 0; v < kVectors; ++v) {
    const UintVec row = reinterpret_cast<UintVec>(lane_index()) + static_cast<std::uint32_t>(i0 + v * kLanes);
    for (std::int64_t j = 0; j < keys;) {
      const std::int64_t key = j0 + j, count = min_of(8 - (key & 7), keys - j);
      UintVec word[4];
      philox(word, seed, static_cast<std::uint32_t>(key >> 3), row, static_cast<std::uint32_t>(batch_head), offset);
      drop_keys(word, spec, p + j * step + v * kLanes, step, key, count);
      j += count;
    }
  }
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
