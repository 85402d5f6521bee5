// The arithmetic of matrix instructions: exact up to one rounding, or as tensor cores were observed to do it.
// Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores" (2021): products are exact; they and the
// sum so far are aligned to the largest exponent among them, cut off a few bits below float32's last, and added; the
// result is cut off to float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>

namespace onepass::emulator {

enum class Adding : std::uint8_t {
  rounded,   // exact sum, rounded to the nearest
  cut_off,   // as tensor cores do
};
/// What mma does from here on.
inline Adding adding = Adding::rounded;
/// Bits below float32's last that an addition keeps.
inline constexpr int kExtraBits = 2;

/// Two 16-bit elements.
template <class T>
void widen(std::uint32_t pair, float* to);
template <>
inline void widen<__nv_bfloat16>(std::uint32_t pair, float* to) {
  to[0] = std::bit_cast<float>(pair << 16);
  to[1] = std::bit_cast<float>(pair & 0xffff0000u);
}
template <>
inline void widen<__half>(std::uint32_t pair, float* to) {
  to[0] = _cvtsh_ss(static_cast<std::uint16_t>(pair));
  to[1] = _cvtsh_ss(static_cast<std::uint16_t>(pair >> 16));
}

/// |x| cut off to float32.
inline float cut_to_float(double x) {
  const auto nearest = static_cast<float>(x);
  return std::abs(static_cast<double>(nearest)) > std::abs(x) ? std::nextafter(nearest, 0.0f) : nearest;
}

/// c (16, 8) += a (16, kK) b (8, kK)^T.
template <int kK>
struct Product {
  float a[16][kK], b[8][kK], c[16][8];

  void add() {
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 8; ++j) {
        double terms[kK];
        for (int k = 0; k < kK; ++k) terms[k] = static_cast<double>(a[i][k]) * static_cast<double>(b[j][k]);
        c[i][j] = adding == Adding::rounded ? sum_rounded(terms, c[i][j]) : sum_cut_off(terms, c[i][j]);
      }
    }
  }

 private:
  static float sum_rounded(const double (&terms)[kK], double sum) {
    for (int k = 0; k < kK; ++k) sum += terms[k];
    return static_cast<float>(sum);
  }
  static float sum_cut_off(const double (&terms)[kK], double sum) {
    double largest = std::abs(sum);
    for (int k = 0; k < kK; ++k) largest = std::fmax(largest, std::abs(terms[k]));
    double check = sum;
    for (int k = 0; k < kK; ++k) check += terms[k];
    if (largest == 0 || !std::isfinite(check)) return static_cast<float>(check);
    // One unit: the last bit that is kept beside the largest.
    const int exponent = static_cast<int>(std::bit_cast<std::uint64_t>(largest) >> 52) - 1023;
    const double unit = std::ldexp(1.0, exponent - 23 - kExtraBits), per_unit = 1 / unit;
    auto units = static_cast<std::int64_t>(sum * per_unit);
    for (int k = 0; k < kK; ++k) units += static_cast<std::int64_t>(terms[k] * per_unit);
    return cut_to_float(static_cast<double>(units) * unit);
  }
};

}  // namespace onepass::emulator
