// What every other file of the library may use: dtypes, status, small helpers. No allocation, no globals.
#pragma once

#include <cstddef>
#include <cstdint>

#include "onepass/onepass.h"

#if defined(__CUDACC__)
#define ONEPASS_INLINE __host__ __device__ __forceinline__
#else
// always_inline: these helpers are compiled into files with different instruction sets; an out-of-line copy of one
// of them could be picked by the linker for all.
#define ONEPASS_INLINE inline __attribute__((always_inline))
#endif

namespace onepass {

enum class DType : std::uint8_t { f32, f16, bf16, f64 };
inline constexpr int kDTypeCount = 4;

ONEPASS_INLINE constexpr std::int64_t dtype_size(DType t) {
  return t == DType::f64 ? 8 : t == DType::f32 ? 4 : 2;
}
ONEPASS_INLINE constexpr const char* dtype_name(DType t) {
  return t == DType::f32 ? "f32" : t == DType::f16 ? "f16" : t == DType::bf16 ? "bf16" : "f64";
}

template <class T>
ONEPASS_INLINE constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
ONEPASS_INLINE constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}
template <class T>
ONEPASS_INLINE constexpr T clamp_to(T x, T lo, T hi) {
  return x < lo ? lo : hi < x ? hi : x;
}
ONEPASS_INLINE constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}
ONEPASS_INLINE constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) {
  return ceil_div(a, b) * b;
}

}  // namespace onepass
