#include "core/layout.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace onepass {
namespace {

char* address(std::int64_t offset) {
  return reinterpret_cast<char*>(std::uintptr_t{1} << 20) + offset;
}

/// Every byte of the tensor, by brute force; `twice` is set if one is named twice.
std::set<std::uintptr_t> bytes_of(const char* base, std::int64_t row, const std::int64_t (&size)[3],
                                  const std::int64_t (&stride)[3], bool* twice) {
  std::set<std::uintptr_t> bytes;
  *twice = false;
  for (std::int64_t a = 0; a < size[0]; ++a) {
    for (std::int64_t b = 0; b < size[1]; ++b) {
      for (std::int64_t c = 0; c < size[2]; ++c) {
        for (std::int64_t x = 0; x < row * 2; ++x) {
          const auto at = reinterpret_cast<std::uintptr_t>(base) +
                          static_cast<std::uintptr_t>((a * stride[0] + b * stride[1] + c * stride[2]) * 2 + x);
          *twice |= !bytes.insert(at).second;
        }
      }
    }
  }
  return bytes;
}

TEST(Layout, AgreesWithBruteForce) {
  std::mt19937_64 random(7);
  const auto pick = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n)); };
  int overlapping = 0, apart = 0, self = 0;
  for (int round = 0; round < 4000; ++round) {
    std::int64_t size[2][3], stride[2][3], row[2];
    Layout layout[2];
    std::set<std::uintptr_t> bytes[2];
    for (int t = 0; t < 2; ++t) {
      row[t] = 1 + pick(4);
      for (int k = 0; k < 3; ++k) {
        size[t][k] = 1 + pick(3);
        stride[t][k] = pick(4) * pick(6);
      }
      char* base = address(2 * pick(40));
      layout[t] = make_layout(base, DType::f16, row[t], {size[t][0], size[t][1], size[t][2]},
                              {stride[t][0], stride[t][1], stride[t][2]});
      bool twice;
      bytes[t] = bytes_of(base, row[t], size[t], stride[t], &twice);
      // Not nested and yet disjoint layouts may be called self-overlapping; the reverse never.
      if (twice) {
        ++self;
        EXPECT_TRUE(overlaps_itself(layout[t]));
      }
      EXPECT_EQ(layout[t].end() - 1, *bytes[t].rbegin());
    }
    bool shared = false;
    for (const auto byte : bytes[0]) shared |= bytes[1].count(byte) != 0;
    (shared ? overlapping : apart)++;
    // Sorted row starts decide exactly when rows do not overlap within one tensor.
    if (shared) {
      EXPECT_TRUE(overlap(layout[0], layout[1]));
    }
    if (!shared && !overlaps_itself(layout[0]) && !overlaps_itself(layout[1])) {
      EXPECT_FALSE(overlap(layout[0], layout[1]));
    }
  }
  EXPECT_GT(overlapping, 500);
  EXPECT_GT(apart, 500);
  EXPECT_GT(self, 500);
}

TEST(Layout, LargeInterleavedTensorsAreApart) {
  // Packed (batch, seq, 3, heads, dim) and (batch, seq, heads, 3, dim), far more rows than the bounded search takes.
  const std::int64_t b = 8, s = 4096, h = 16, d = 64;
  for (int slot = 1; slot < 3; ++slot) {
    const Layout a = make_layout(address(0), DType::bf16, d, {b, s, h}, {s * 3 * h * d, 3 * h * d, d});
    const Layout c = make_layout(address(2 * slot * h * d), DType::bf16, d, {b, s, h}, {s * 3 * h * d, 3 * h * d, d});
    EXPECT_FALSE(overlap(a, c));
    const Layout e = make_layout(address(0), DType::bf16, d, {b, s, h}, {s * 3 * h * d, 3 * h * d, 3 * d});
    const Layout f = make_layout(address(2 * slot * d), DType::bf16, d, {b, s, h}, {s * 3 * h * d, 3 * h * d, 3 * d});
    EXPECT_FALSE(overlap(e, f));
    EXPECT_FALSE(overlap(f, e));
  }
  const Layout whole = make_layout(address(0), DType::bf16, d, {b, s, h}, {s * h * d, h * d, d});
  const Layout shifted = make_layout(address(2), DType::bf16, d, {b, s, h}, {s * h * d, h * d, d});
  EXPECT_TRUE(overlap(whole, shifted));
  EXPECT_FALSE(overlaps_itself(whole));
}

TEST(Layout, EmptyTensorsTouchNothing) {
  const Layout empty = make_layout(address(0), DType::f32, 0, {4, 4, 4}, {16, 4, 1});
  const Layout none = make_layout(address(0), DType::f32, 8, {4, 0, 4}, {0, 0, 0});
  const Layout full = make_layout(address(0), DType::f32, 8, {4, 4, 4}, {128, 32, 8});
  EXPECT_FALSE(overlap(empty, full));
  EXPECT_FALSE(overlap(full, none));
  EXPECT_FALSE(overlaps_itself(none));
  EXPECT_EQ(none.begin(), none.end());
}

}  // namespace
}  // namespace onepass
