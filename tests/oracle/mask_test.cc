// core/mask.h against the contract's words, key by key, and against the oracle's own intervals.
#include "core/mask.h"

#include <gtest/gtest.h>

#include "check/random.h"
#include "check/spec.h"
#include "oracle/rows.h"

namespace onepass {
namespace {

using check::Random;

/// A random problem of one or two items with every kind of mask, and the arrays it points into.
struct Shape {
  std::vector<std::int32_t> cu_q, cu_k, q_length, k_start, k_length, q_position;
  Problem problem;

  explicit Shape(Random& random) {
    Problem& p = problem;
    p.batch = random.between(1, 2);
    p.seq_q = random.between(0, 24);
    p.seq_k = random.between(0, 24);
    p.total_q = p.seq_q;
    p.total_k = p.seq_k;
    const auto fill = [&](std::vector<std::int32_t>& list, std::int64_t lo, std::int64_t hi, double chance) {
      if (!random.chance(chance)) return static_cast<const std::int32_t*>(nullptr);
      for (int b = 0; b < 2; ++b) list.push_back(static_cast<std::int32_t>(random.between(lo, hi)));
      return static_cast<const std::int32_t*>(list.data());
    };
    MaskSpec& mask = p.mask;
    if (random.chance(0.3)) {
      mask.varlen = true;
      cu_q = {0};
      cu_k = {0};
      for (std::int64_t b = 0; b < p.batch; ++b) {
        cu_q.push_back(cu_q.back() + static_cast<std::int32_t>(random.between(0, p.seq_q)));
        cu_k.push_back(cu_k.back() + static_cast<std::int32_t>(random.between(0, p.seq_k)));
      }
      p.total_q = cu_q.back() + random.between(0, 3);
      p.total_k = cu_k.back() + random.between(0, 3);
      mask.cu_seqlens_q = cu_q.data();
      mask.cu_seqlens_k = cu_k.data();
    }
    // Out-of-range values too: they are clamped.
    mask.q_length = fill(q_length, -2, p.seq_q + 2, 0.4);
    mask.k_start = fill(k_start, -2, p.seq_k + 2, 0.3);
    mask.k_length = fill(k_length, -2, p.seq_k + 2, 0.4);
    mask.q_position = fill(q_position, -p.seq_q, p.seq_k + 4, 0.3);
    mask.causal = random.chance(0.5);
    mask.align = random.chance(0.5) ? Align::top_left : Align::bottom_right;
    if (random.chance(0.4)) mask.window_left = random.chance(0.1) ? INT64_MAX : random.between(0, 30);
    if (random.chance(0.4)) mask.window_right = random.chance(0.1) ? INT64_MAX : random.between(0, 30);
  }
};

/// The contract, for one query row and key.
bool sees(const MaskSpec& mask, const Sequence& s, std::int64_t b, std::int64_t i, std::int64_t j) {
  std::int64_t p = i;
  if (mask.q_position != nullptr) {
    p += mask.q_position[b];
  } else if (mask.align == Align::bottom_right) {
    p += s.k_length - s.q_length;
  }
  if (j < 0 || j >= s.k_length) return false;
  if (mask.causal && j > p) return false;
  if (mask.window_left >= 0 && p - j > mask.window_left) return false;
  return mask.window_right < 0 || j - p <= mask.window_right;
}

TEST(Mask, EveryRowAndKey) {
  Random random(1);
  for (int n = 0; n < 3000; ++n) {
    const Shape shape(random);
    const Problem& p = shape.problem;
    for (std::int64_t b = 0; b < p.batch; ++b) {
      const Sequence s = p.sequence(b);
      const oracle::Item item = oracle::item_at(p, b);
      ASSERT_EQ(s.q_row, item.q_row) << n;
      ASSERT_EQ(s.q_length, item.q_length) << n;
      ASSERT_EQ(s.k_row, item.k_row) << n;
      ASSERT_EQ(s.k_length, item.k_length) << n;
      ASSERT_EQ(s.k_start, item.k_start) << n;
      ASSERT_EQ(s.position, item.q_position) << n;
      ASSERT_GE(s.q_length, 0);
      ASSERT_GE(s.k_length, 0);
      ASSERT_LE(s.q_row + s.q_length, p.total_q);
      ASSERT_LE(s.k_row + s.k_length, p.total_k);
      for (std::int64_t i = 0; i < s.q_length; ++i) {
        const Interval seen = s.visible(i);
        const oracle::Keys keys = oracle::visible_keys(p.mask, item, i);
        ASSERT_EQ(seen.size(), keys.hi - keys.lo) << n;
        if (seen.size() > 0) {
          ASSERT_EQ(seen.begin, keys.lo) << n;
        }
        for (std::int64_t j = 0; j < s.k_length; ++j) {
          ASSERT_EQ(j >= seen.begin && j < seen.end, sees(p.mask, s, b, i, j)) << n << " row " << i << " key " << j;
        }
      }
    }
  }
}

TEST(Mask, BlocksOfRowsAndKeys) {
  Random random(2);
  for (int n = 0; n < 3000; ++n) {
    const Shape shape(random);
    const Sequence s = shape.problem.sequence(0);
    const auto in = [](const Interval& x, std::int64_t j) { return j >= x.begin && j < x.end; };
    for (int block = 0; block < 6 && s.q_length > 0; ++block) {
      const std::int64_t i0 = random.between(0, s.q_length - 1), i1 = random.between(i0 + 1, s.q_length);
      const Interval any = s.visible_to_any(i0, i1), all = s.visible_to_all(i0, i1);
      ASSERT_GE(any.end, any.begin);
      ASSERT_GE(all.end, all.begin);
      std::int64_t seen_by_any = 0;
      for (std::int64_t j = 0; j < s.k_length; ++j) {
        int rows = 0;
        for (std::int64_t i = i0; i < i1; ++i) rows += in(s.visible(i), j) ? 1 : 0;
        seen_by_any += rows > 0 ? 1 : 0;
        if (rows > 0) {
          ASSERT_TRUE(in(any, j)) << n;
        }
        ASSERT_EQ(in(all, j), rows == i1 - i0) << n << " rows " << i0 << "-" << i1 << " key " << j;
      }
      // A window that is not empty leaves no key in between unseen.
      if (s.hi_shift > s.lo_shift) {
        ASSERT_EQ(any.size(), seen_by_any) << n << " rows " << i0 << "-" << i1;
      }
    }
    for (int block = 0; block < 6 && s.k_length > 0; ++block) {
      const std::int64_t j0 = random.between(0, s.k_length - 1), j1 = random.between(j0 + 1, s.k_length);
      const Interval rows = s.rows_seeing(j0, j1);
      ASSERT_GE(rows.begin, 0);
      ASSERT_LE(rows.end, s.q_length);
      for (std::int64_t i = 0; i < s.q_length; ++i) {
        const Interval seen = s.visible(i);
        const bool sees_one = std::max(seen.begin, j0) < std::min(seen.end, j1);
        ASSERT_EQ(in(rows, i), sees_one) << n << " keys " << j0 << "-" << j1 << " row " << i;
      }
    }
  }
}

/// Lengths and positions at the ends of int32, sizes beyond it: nothing overflows.
TEST(Mask, ExtremeValues) {
  const std::int64_t huge = std::int64_t{1} << 40;
  for (const std::int32_t value : {INT32_MIN, -1, 0, INT32_MAX}) {
    for (const std::int64_t window : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{INT64_MAX}}) {
      Problem p;
      p.batch = 1;
      p.seq_q = p.total_q = huge;
      p.seq_k = p.total_k = huge;
      p.mask.causal = true;
      p.mask.window_left = window;
      p.mask.window_right = window;
      p.mask.q_position = &value;
      const Sequence s = p.sequence(0);
      const oracle::Item item = oracle::item_at(p, 0);
      for (const std::int64_t i : {std::int64_t{0}, huge / 2, huge - 1}) {
        const oracle::Keys keys = oracle::visible_keys(p.mask, item, i);
        EXPECT_EQ(s.visible(i).size(), keys.hi - keys.lo);
        EXPECT_EQ(keys.hi - keys.lo,
                  std::max<std::int64_t>(
                      0, std::min(i + value, huge - 1) - (window == 0 ? std::max<std::int64_t>(i + value, 0) : 0) + 1));
      }
    }
  }
}

}  // namespace
}  // namespace onepass
