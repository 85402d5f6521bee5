#include "emulator/machine/tensor_core.h"

#include <cmath>

namespace onepass::emulator {
namespace {

/// x cut off to float32.
float cut_to_float(double x) {
  const auto nearest = static_cast<float>(x);
  return std::abs(static_cast<double>(nearest)) > std::abs(x) ? std::nextafter(nearest, 0.0f) : nearest;
}

/// 2 to the exponent of x > 0, normal.
double power_below(double x) {
  return std::bit_cast<double>(std::bit_cast<std::uint64_t>(x) & 0x7ff0000000000000u);
}

// Eight elements of a row of c side by side, so that the compiler makes vectors of them.
template <int kK>
void add_rounded(const float (&a)[kK], const float (&b)[kK][8], float (&c)[8]) {
  double sum[8];
  for (int j = 0; j < 8; ++j) sum[j] = static_cast<double>(c[j]);
  for (int k = 0; k < kK; ++k) {
    for (int j = 0; j < 8; ++j) sum[j] += static_cast<double>(a[k]) * static_cast<double>(b[k][j]);
  }
  for (int j = 0; j < 8; ++j) c[j] = static_cast<float>(sum[j]);
}

template <int kK>
void add_cut_off(const float (&a)[kK], const float (&b)[kK][8], float (&c)[8]) {
  double terms[kK + 1][8], largest[8] = {}, check[8] = {}, units[8] = {}, unit[8], per_unit[8];
  for (int j = 0; j < 8; ++j) terms[kK][j] = static_cast<double>(c[j]);
  for (int k = 0; k < kK; ++k) {
    for (int j = 0; j < 8; ++j) terms[k][j] = static_cast<double>(a[k]) * static_cast<double>(b[k][j]);
  }
  for (const auto& term : terms) {
    for (int j = 0; j < 8; ++j) {
      const double size = std::abs(term[j]);
      largest[j] = largest[j] < size ? size : largest[j];
      check[j] += term[j];
    }
  }
  // One unit: the last bit that is kept beside the largest.
  for (int j = 0; j < 8; ++j) {
    unit[j] = power_below(largest[j]) * (0x1p-23 / (1 << kExtraBits));
    per_unit[j] = 1 / unit[j];
  }
  for (const auto& term : terms) {
    for (int j = 0; j < 8; ++j) units[j] += std::trunc(term[j] * per_unit[j]);
  }
  for (int j = 0; j < 8; ++j) {
    const bool plain = largest[j] > 0 && std::isfinite(check[j]);
    c[j] = plain ? cut_to_float(units[j] * unit[j]) : static_cast<float>(check[j]);
  }
}

}  // namespace

template <int kK>
void Product<kK>::add() {
  for (int i = 0; i < 16; ++i) {
    if (adding == Adding::rounded) {
      add_rounded(a[i], b, c[i]);
    } else {
      add_cut_off(a[i], b, c[i]);
    }
  }
}

template struct Product<8>;
template struct Product<16>;

}  // namespace onepass::emulator
