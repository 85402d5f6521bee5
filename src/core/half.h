// float16 and bfloat16 as bit patterns, converted with round to nearest even. Scalar; kernels have vector forms.
#pragma once

#include <cstdint>

#include "core/base.h"

namespace onepass {

ONEPASS_INLINE float bits_to_float(std::uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
ONEPASS_INLINE std::uint32_t float_to_bits(float x) {
  return __builtin_bit_cast(std::uint32_t, x);
}

ONEPASS_INLINE float bf16_to_float(std::uint16_t bits) {
  return bits_to_float(std::uint32_t{bits} << 16);
}

ONEPASS_INLINE std::uint16_t float_to_bf16(float x) {
  const std::uint32_t bits = float_to_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);  // NaN stays NaN
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

ONEPASS_INLINE float f16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return bits_to_float(sign | ((magnitude << 13) + 0x38000000u));
  // Subnormal: magnitude * 2^-24, exact in float.
  return bits_to_float(float_to_bits(static_cast<float>(magnitude) * 0x1p-24f) | sign);
}

ONEPASS_INLINE std::uint16_t float_to_f16(float x) {
  const std::uint32_t bits = float_to_bits(x);
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and up round to infinity
  if (magnitude < 0x38800000u) {  // subnormal in float16: adding 0.5 puts the result's unit at bit 0
    return static_cast<std::uint16_t>(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u));
  }
  return static_cast<std::uint16_t>(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13));
}

/// Element `index` of an array of `dtype`, as a double (exact) or a float.
ONEPASS_INLINE double load_double(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::f64: return static_cast<const double*>(data)[index];
    case DType::f32: return static_cast<const float*>(data)[index];
    case DType::f16: return f16_to_float(static_cast<const std::uint16_t*>(data)[index]);
    case DType::bf16: return bf16_to_float(static_cast<const std::uint16_t*>(data)[index]);
  }
  return 0;
}
ONEPASS_INLINE float load_float(const void* data, DType dtype, std::int64_t index) {
  return static_cast<float>(load_double(data, dtype, index));
}
/// Stores a float, rounded to `dtype`.
ONEPASS_INLINE void store_float(void* data, DType dtype, std::int64_t index, float x) {
  switch (dtype) {
    case DType::f64: static_cast<double*>(data)[index] = x; return;
    case DType::f32: static_cast<float*>(data)[index] = x; return;
    case DType::f16: static_cast<std::uint16_t*>(data)[index] = float_to_f16(x); return;
    case DType::bf16: static_cast<std::uint16_t*>(data)[index] = float_to_bf16(x); return;
  }
}

}  // namespace onepass
