// core/half.h against double arithmetic: every bit pattern, and every rounding boundary between neighbours.
#include "core/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace onepass {
namespace {

struct Format {
  const char* name;
  int exponent_bits, fraction_bits;
  float (*widen)(std::uint16_t);
  std::uint16_t (*round)(float);
};

const Format kF16Format = {"f16", 5, 10, [](std::uint16_t x) { return f16_to_float(x); },
                           [](float x) { return float_to_f16(x); }};
const Format kBf16Format = {"bf16", 8, 7, [](std::uint16_t x) { return bf16_to_float(x); },
                            [](float x) { return float_to_bf16(x); }};

/// What the bits mean, from the definition of the format.
double meaning(const Format& format, std::uint16_t bits) {
  const int fraction_size = 1 << format.fraction_bits, bias = (1 << (format.exponent_bits - 1)) - 1;
  const int fraction = bits & (fraction_size - 1), exponent = (bits & 0x7fff) >> format.fraction_bits;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == (1 << format.exponent_bits) - 1) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - format.fraction_bits);
  return sign * std::ldexp(fraction_size + fraction, exponent - bias - format.fraction_bits);
}

class Half : public testing::TestWithParam<Format> {};

TEST_P(Half, EveryPatternWidensExactly) {
  const Format& format = GetParam();
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    const double expected = meaning(format, pattern);
    const float got = format.widen(pattern);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << bits;
      ASSERT_TRUE(std::isnan(format.widen(format.round(got)))) << bits;
    } else {
      ASSERT_EQ(got, expected) << bits;
      ASSERT_EQ(std::signbit(got), (bits & 0x8000) != 0) << bits;
      ASSERT_EQ(format.round(got), pattern) << bits;
    }
  }
}

TEST_P(Half, EveryBoundaryRoundsToNearestEven) {
  const Format& format = GetParam();
  const std::uint32_t infinity = ((1u << format.exponent_bits) - 1) << format.fraction_bits;
  for (std::uint32_t bits = 0; bits < infinity; ++bits) {
    const auto low = static_cast<std::uint16_t>(bits), high = static_cast<std::uint16_t>(bits + 1);
    const double a = meaning(format, low);
    // Above the largest number the next one would be a power of two.
    const double b =
        high == infinity ? 2 * a - meaning(format, static_cast<std::uint16_t>(bits - 1)) : meaning(format, high);
    const auto middle = static_cast<float>((a + b) / 2);
    ASSERT_EQ(static_cast<double>(middle), (a + b) / 2) << bits;
    for (const float sign : {1.0f, -1.0f}) {
      const std::uint16_t sign_bit = sign < 0 ? 0x8000 : 0;
      ASSERT_EQ(format.round(sign * middle), ((bits & 1) == 0 ? low : high) | sign_bit) << bits;
      ASSERT_EQ(format.round(sign * std::nextafter(middle, 0.0f)), low | sign_bit) << bits;
      ASSERT_EQ(format.round(sign * std::nextafter(middle, HUGE_VALF)), high | sign_bit) << bits;
    }
  }
}

TEST_P(Half, ExtremesOfFloat) {
  const Format& format = GetParam();
  const float largest = std::numeric_limits<float>::max(), least = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(format.widen(format.round(largest)), HUGE_VALF);
  EXPECT_EQ(format.widen(format.round(-largest)), -HUGE_VALF);
  EXPECT_EQ(format.round(least), 0);
  EXPECT_EQ(format.round(-least), 0x8000);
  EXPECT_EQ(format.round(-0.0f), 0x8000);
  // NaNs whose payload lies below the format's fraction stay NaN.
  for (const std::uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0x7fc00000u}) {
    EXPECT_TRUE(std::isnan(format.widen(format.round(bits_to_float(bits)))));
  }
}

TEST_P(Half, LoadAndStoreAgree) {
  const DType dtype = GetParam().exponent_bits == 5 ? DType::f16 : DType::bf16;
  std::uint16_t array[3] = {1, 2, 3};
  store_float(array, dtype, 1, 1.5f);
  EXPECT_EQ(array[1], GetParam().round(1.5f));
  EXPECT_EQ(load_float(array, dtype, 1), 1.5f);
  EXPECT_EQ(load_double(array, dtype, 1), 1.5);
  EXPECT_EQ(array[0], 1);
  EXPECT_EQ(array[2], 3);
}

INSTANTIATE_TEST_SUITE_P(Formats, Half, testing::Values(kF16Format, kBf16Format),
                         [](const testing::TestParamInfo<Format>& format) { return format.param.name; });

TEST(Storage, FloatAndDouble) {
  float f[2] = {};
  double d[2] = {};
  store_float(f, DType::f32, 1, 0.1f);
  store_float(d, DType::f64, 1, 0.1f);
  EXPECT_EQ(load_float(f, DType::f32, 1), 0.1f);
  EXPECT_EQ(load_double(d, DType::f64, 1), static_cast<double>(0.1f));
  EXPECT_EQ(dtype_size(DType::f64), 8);
}

}  // namespace
}  // namespace onepass
