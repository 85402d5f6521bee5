// Vectors of the instruction set this file is compiled for, on the compilers' vector extensions: + - * / and
// comparisons are the language's own. Only what the extensions lack is written with intrinsics.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/base.h"
#include "core/half.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16, kVectors = 4, kRows = 6;  // 24 accumulators, 4 + 1 operands of 32 registers
#elif defined(__AVX2__)
inline constexpr int kLanes = 8, kVectors = 2, kRows = 6;  // 12 accumulators, 2 + 1 operands of 16 registers
#else
inline constexpr int kLanes = 4, kVectors = 2, kRows = 6;
#endif

/// Width of a tile: the query rows that share one sweep, one per lane.
inline constexpr int kWidth = kLanes * kVectors;

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float VecUnaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef std::int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef std::uint32_t UintVec __attribute__((vector_size(kLanes * 4)));
typedef std::uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));
typedef std::uint16_t HalfVecUnaligned __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

inline constexpr float kInf = __builtin_inff();
inline constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

ONEPASS_INLINE Vec load(const float* p) {
  return *reinterpret_cast<const VecUnaligned*>(p);
}
ONEPASS_INLINE void store(float* p, Vec x) {
  *reinterpret_cast<VecUnaligned*>(p) = x;
}
ONEPASS_INLINE Vec broadcast(float x) {
  return x - Vec{};
}
ONEPASS_INLINE IntVec broadcast_int(std::int32_t x) {
  return x - IntVec{};
}
ONEPASS_INLINE Vec select(IntVec mask, Vec a, Vec b) {
  return mask ? a : b;
}
ONEPASS_INLINE Vec as_float(IntVec x) {
  return reinterpret_cast<Vec>(x);
}
ONEPASS_INLINE IntVec as_int(Vec x) {
  return reinterpret_cast<IntVec>(x);
}

/// The larger of two; b where one is NaN.
ONEPASS_INLINE Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

/// a * b + c, rounded once where the instruction set can. Nothing else is contracted: the compiler's choice might
/// differ between two loops that have to agree in every bit.
ONEPASS_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

/// c + x * (next + x * (...)), Horner's scheme; coefficients from the constant one up.
ONEPASS_INLINE Vec polynomial(Vec, float last) {
  return broadcast(last);
}
template <class... Rest>
ONEPASS_INLINE Vec polynomial(Vec x, float c, Rest... rest) {
  return multiply_add(polynomial(x, rest...), x, broadcast(c));
}

/// 0, 1, 2, ...
ONEPASS_INLINE IntVec lane_index() {
  IntVec index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  return index;
}

/// True if any lane of a comparison's result is set.
ONEPASS_INLINE bool any(IntVec mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  std::int32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= mask[i];
  return bits != 0;
#endif
}

ONEPASS_INLINE float sum_of(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(x);
#else
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
#endif
}

/// p 2^n, n in the low bits, p near 1; in two steps where the result may be subnormal.
ONEPASS_INLINE Vec scale_by_power(Vec p, IntVec n, IntVec subnormal) {
  const Vec scaled = as_float(as_int(p) + ((n + (subnormal & 64)) << 23));
  return scaled * select(subnormal, broadcast(0x1p-64f), broadcast(1));
}

/// 2^x for x <= 1 or so, subnormals too; 0 for x below -150 or -inf; NaN stays NaN.
/// Degree 6 minimax polynomials, 0.93 ulp. Degree 3 (kFast, 1.03e-4, exact at integers) is enough where the result is
/// rounded to bfloat16.
template <bool kFast = false>
ONEPASS_INLINE Vec exp2(Vec x) {
#if defined(__AVX512F__)
  const Vec f = _mm512_reduce_ps(x, 0x09);  // x - floor(x)
  const Vec p = kFast ? polynomial(f, 1.0f, 0.6954244f, 0.22630768f, 0.07826797f)
                      : polynomial(f, 1.0f, 0.693146984f, 0.240229836f, 0.055483343f, 0.00967883997f, 0.00124396898f,
                                   0.000217022697f);
  return _mm512_scalef_ps(p, x);
#else
  Vec t = x < -150.0f ? broadcast(-150.0f) : x;  // NaN compares false and stays
  t = t > 127.0f ? broadcast(127.0f) : t;
  const Vec rounded = t + 12582912.0f;  // 1.5 * 2^23: the integer nearest to t in the low bits
  const Vec f = t - (rounded - 12582912.0f);
  const Vec p =
      polynomial(f, 1.0f, 0.693147206f, 0.240226469f, 0.0555032877f, 0.00961848896f, 0.00133999356f, 0.000153458221f);
  const Vec result = scale_by_power(p, as_int(rounded), (x < -126.0f) & (x > -150.0f));
  return x <= -150.0f ? Vec{} : (x == x ? result : x);
#endif
}

/// e^x to about an ulp; 0 for x below -104 or -inf, NaN stays NaN. Cody and Waite's reduction: exp2
/// of x log2(e) would lose what the product's rounding loses, 5 ulp at x = -10.
ONEPASS_INLINE Vec exp(Vec x) {
  // Bounds: infinity minus infinity below would be NaN. NaN stays.
  const Vec t = max(broadcast(-105.0f), x);
#if defined(__AVX512F__)
  const Vec n = _mm512_roundscale_ps(t * kLog2e, 0x08);  // to nearest
#else
  const Vec bounded = t > 88.0f ? broadcast(88.0f) : t;
  const Vec magic =
      multiply_add(bounded, broadcast(kLog2e), broadcast(12582912.0f));  // 1.5 * 2^23: the integer in the low bits
  const Vec n = magic - 12582912.0f;
#endif
  // ln 2 in two parts, the first short enough for exact products.
  const Vec r = multiply_add(n, broadcast(2.12194440e-4f), multiply_add(n, broadcast(-0.693359375f), t));
  const Vec p = polynomial(r, 1.0f, 1.0f, 0.49999994f, 0.16666521f, 0.04166839f, 0.008368724f, 0.0013814584f);
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, n);
#else
  const Vec result = scale_by_power(p, as_int(magic), (x < -87.0f) & (x > -104.0f));
  return x <= -104.0f ? Vec{} : (x == x ? result : x);
#endif
}

/// Natural logarithm of a normal x to about an ulp; -inf at 0, infinity and NaN stay. Coefficients of Cephes' logf.
ONEPASS_INLINE Vec log(Vec x) {
  constexpr std::int32_t kSqrtHalf = 0x3f3504f3;  // x = f 2^e with f between sqrt(1/2) and sqrt(2)
  const IntVec bits = as_int(x) - kSqrtHalf;
  const Vec e = __builtin_convertvector(bits >> 23, Vec), f = as_float((bits & 0x7fffff) + kSqrtHalf) - 1.0f;
  const Vec p = polynomial(f, 0.333333312f, -0.24999994f, 0.200007148f, -0.166680574f, 0.142493233f, -0.124201408f,
                           0.116769987f, -0.115146103f, 0.0703768363f);
  const Vec z = f * f;
  const Vec small = multiply_add(z, broadcast(-0.5f), multiply_add(e, broadcast(-2.12194440e-4f), f * z * p));
  const Vec result = multiply_add(e, broadcast(0.693359375f), f + small);
  return x == 0.0f ? broadcast(-kInf) : (x < kInf ? result : x);
}

/// tanh: odd polynomial below 0.625 (coefficients of Cephes' tanhf), else 1 - 2 / (exp(2|x|) + 1).
ONEPASS_INLINE Vec tanh(Vec x) {
  const Vec z = x * x;
  const Vec small = multiply_add(
      x * z, polynomial(z, -0.333332819f, 0.133314422f, -0.0537397156f, 0.0206390888f, -0.00570498873f), x);
  const Vec magnitude = as_float(as_int(x) & 0x7fffffff);
  const Vec bounded = magnitude < 10.0f ? magnitude : broadcast(10.0f);  // tanh(10) rounds to 1
  const Vec large = 1.0f - 2.0f / (exp2(bounded * (2 * kLog2e)) + 1.0f);
  const Vec with_sign = as_float(as_int(large) | (as_int(x) & static_cast<std::int32_t>(0x80000000u)));
  return x == x ? (magnitude < 0.625f ? small : with_sign) : x;
}

// ---- storage types: kLanes elements at a time ----

struct StoreF32 {
  using Element = float;
  static constexpr DType kType = DType::f32;
};
struct StoreF16 {
  using Element = std::uint16_t;
  static constexpr DType kType = DType::f16;
};
struct StoreBf16 {
  using Element = std::uint16_t;
  static constexpr DType kType = DType::bf16;
};

ONEPASS_INLINE Vec bf16_to_vec(HalfVec x) {
  return as_float(reinterpret_cast<IntVec>(__builtin_convertvector(x, UintVec) << 16));
}
ONEPASS_INLINE HalfVec vec_to_bf16(Vec x) {
  const UintVec bits = reinterpret_cast<UintVec>(x);
  const UintVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const UintVec quiet = (bits >> 16) | 0x40u;
  return __builtin_convertvector(x == x ? rounded : quiet, HalfVec);
}

template <class Store>
ONEPASS_INLINE Vec load_as_float(const typename Store::Element* p) {
  if constexpr (Store::kType == DType::f32) {
    return load(p);
  } else if constexpr (Store::kType == DType::bf16) {
    return bf16_to_vec(*reinterpret_cast<const HalfVecUnaligned*>(p));
  } else {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    Vec x;
    for (int i = 0; i < kLanes; ++i) x[i] = f16_to_float(p[i]);
    return x;
#endif
  }
}

template <class Store>
ONEPASS_INLINE void store_from_float(typename Store::Element* p, Vec x) {
  if constexpr (Store::kType == DType::f32) {
    store(p, x);
  } else if constexpr (Store::kType == DType::bf16) {
    *reinterpret_cast<HalfVecUnaligned*>(p) = vec_to_bf16(x);
  } else {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_f16(x[i]);
#endif
  }
}

/// The first n < kLanes elements, 0 behind them; touches no byte past them.
template <class Store>
ONEPASS_INLINE Vec load_part(const typename Store::Element* p, std::int64_t n) {
  alignas(64) typename Store::Element buffer[kLanes] = {};
  for (std::int64_t i = 0; i < n; ++i) buffer[i] = p[i];
  return load_as_float<Store>(buffer);
}
template <class Store>
ONEPASS_INLINE void store_part(typename Store::Element* p, Vec x, std::int64_t n) {
  alignas(64) typename Store::Element buffer[kLanes];
  store_from_float<Store>(buffer, x);
  for (std::int64_t i = 0; i < n; ++i) p[i] = buffer[i];
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
