// Small helpers of the closed-form tests on the oracle.
#pragma once

#include <gtest/gtest.h>

#include <cmath>

#include "kit/kit.h"
#include "oracle/oracle.h"

namespace onepass::cases {

using check::Array;
using check::Case;
using check::CaseSpec;
using check::Index;

inline CaseSpec sized(std::int64_t seq_q, std::int64_t seq_k, std::int64_t dim) {
  return kit::sized(DType::f64, seq_q, seq_k, dim);
}

template <class F>
void fill(Array& array, F&& value) {
  array.each([&](const Index& i, std::int64_t at) { array.set(at, value(i)); });
}
inline void run(Case& c) {
  ASSERT_TRUE(oracle::forward(c.problem(), c.forward_operands()).ok());
}
inline double out(const Case& c, std::int64_t row, std::int64_t x = 0, std::int64_t head = 0, std::int64_t b = 0) {
  return c.out.get(c.out.offset({b, row, head, x}));
}
inline double lse(const Case& c, std::int64_t row, std::int64_t head = 0, std::int64_t b = 0) {
  return c.lse.get(c.lse.offset({b, head, row, 0}));
}
inline void expect_empty(const Case& c, std::int64_t row) {
  EXPECT_EQ(lse(c, row), -HUGE_VAL) << row;
  for (std::int64_t x = 0; x < c.spec().head_dim_v; ++x) EXPECT_EQ(out(c, row, x), 0) << row;
}
inline void expect_same_rows(const Case& a, std::int64_t row_a, const Case& b, std::int64_t row_b, double tolerance) {
  EXPECT_NEAR(lse(a, row_a), lse(b, row_b), tolerance + 1e-6);
  for (std::int64_t x = 0; x < a.spec().head_dim_v; ++x) {
    EXPECT_NEAR(out(a, row_a, x), out(b, row_b, x), tolerance) << row_a;
  }
}

}  // namespace onepass::cases
