// In place of src/cuda/ptx/math.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <immintrin.h>

#include "cuda_language.h"

namespace onepass::ptx {

/// Denormal results are 0.
inline float exp2_approx(float x) {
  return x < -126.0f ? 0.0f : std::exp2(x);
}
inline float log2_approx(float x) {
  return std::log2(x);
}

inline std::uint32_t to_bf16(float x) {
  const std::uint32_t bits = __float_as_uint(x);
  return std::isnan(x) ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
template <class T>
std::uint32_t pack(float low, float high);
template <>
inline std::uint32_t pack<__nv_bfloat16>(float low, float high) {
  return to_bf16(low) | to_bf16(high) << 16;
}
template <>
inline std::uint32_t pack<__half>(float low, float high) {
  return static_cast<std::uint32_t>(_cvtss_sh(low, _MM_FROUND_TO_NEAREST_INT)) |
         static_cast<std::uint32_t>(_cvtss_sh(high, _MM_FROUND_TO_NEAREST_INT)) << 16;
}
inline std::uint32_t multiply_pair(std::uint32_t a, std::uint32_t b) {
  return pack<__nv_bfloat16>(__uint_as_float(a << 16) * __uint_as_float(b << 16),
                             __uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u));
}

}  // namespace onepass::ptx
