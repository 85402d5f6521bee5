// The arithmetic of matrix instructions: exact up to one rounding, or as tensor cores were observed to do it.
// Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores" (2021): products are exact; they and the
// sum so far are aligned to the largest exponent among them, cut off a few bits below float32's last, and added; the
// result is cut off to float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <immintrin.h>

#include <bit>
#include <cstdint>

namespace onepass::emulator {

enum class Adding : std::uint8_t {
  rounded,  // exact sum, rounded to the nearest
  cut_off,  // as tensor cores do
};
/// What mma does from here on.
inline Adding adding = Adding::rounded;
/// Bits below float32's last that an addition keeps. With 2, and all products of an instruction in one addition, the
/// kernels err as they were measured to on an H200.
inline constexpr int kExtraBits = 2;

/// Two 16-bit elements.
template <class T>
void widen(std::uint32_t pair, float& low, float& high);
template <>
inline void widen<__nv_bfloat16>(std::uint32_t pair, float& low, float& high) {
  low = std::bit_cast<float>(pair << 16);
  high = std::bit_cast<float>(pair & 0xffff0000u);
}
template <>
inline void widen<__half>(std::uint32_t pair, float& low, float& high) {
  low = _cvtsh_ss(static_cast<std::uint16_t>(pair));
  high = _cvtsh_ss(static_cast<std::uint16_t>(pair >> 16));
}

/// c (16, 8) += a (16, kK) b (kK, 8). kK: 8 or 16.
template <int kK>
struct Product {
  float a[16][kK], b[kK][8], c[16][8];

  void add();
};

}  // namespace onepass::emulator
