// Dropout's random numbers: the published known answers, the layout of the lanes, the statistics.
#include "core/dropout.h"

#include <gtest/gtest.h>

#include <cmath>

#include "check/case.h"
#include "oracle/oracle.h"

namespace onepass {
namespace {

/// Random123's kat_vectors, philox4x32 with 7 rounds.
TEST(Philox, KnownAnswers) {
  struct Answer {
    std::uint32_t counter[4], key[2], expected[4];
  };
  const Answer answers[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
      {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
       {0xffffffff, 0xffffffff},
       {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
  };
  for (const Answer& a : answers) {
    const std::uint64_t seed = a.key[0] | std::uint64_t{a.key[1]} << 32;
    const PhiloxBlock block = philox(seed, a.counter[0], a.counter[1], a.counter[2], a.counter[3]);
    for (int n = 0; n < 4; ++n) EXPECT_EQ(block.word[n], a.expected[n]);
  }
}

TEST(Dropout, CounterAndLanes) {
  const std::uint64_t seed = 0x123456789abcdef0u;
  const PhiloxBlock block = dropout_block(seed, 7, 5, 3, 8 * 11 + 2);
  const PhiloxBlock expected = philox(seed, 11, 3, 5, 7);
  for (int lane = 0; lane < 8; ++lane) {
    const std::uint32_t word = expected.word[lane / 2];
    EXPECT_EQ(dropout_lane(block, 8 * 11 + lane), lane % 2 == 0 ? word & 0xffff : word >> 16);
  }
}

TEST(Dropout, LanesAreUniformAndUncorrelated) {
  constexpr int kRows = 256, kKeys = 256;
  const auto lane = [](std::int64_t head, std::int64_t i, std::int64_t j) {
    return dropout_lane(dropout_block(42, 0, head, i, j), j) / 65536.0 - 0.5;
  };
  double sum = 0, square = 0, next_key = 0, next_row = 0, next_head = 0;
  int bins[16] = {};
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kKeys; ++j) {
      const double x = lane(0, i, j);
      sum += x;
      square += x * x;
      next_key += x * lane(0, i, j + 1);
      next_row += x * lane(0, i + 1, j);
      next_head += x * lane(1, i, j);
      ++bins[static_cast<int>((x + 0.5) * 16)];
    }
  }
  // Standard deviations: of the mean sqrt(1/12/n), of a correlation 1/12/sqrt(n). Five of them.
  const double n = kRows * kKeys;
  EXPECT_LT(std::abs(sum / n), 5 * std::sqrt(1 / 12.0 / n));
  EXPECT_NEAR(square / n, 1 / 12.0, 0.002);
  for (const double correlation : {next_key, next_row, next_head}) {
    EXPECT_LT(std::abs(correlation / n), 5 / 12.0 / std::sqrt(n));
  }
  double chi_square = 0;
  for (const int count : bins) chi_square += (count - n / 16) * (count - n / 16) / (n / 16);
  EXPECT_LT(chi_square, 45);  // 15 degrees of freedom
}

/// With Q = 0 and V = one-hot of the key, out is the row of kept weights: keep rate, scale, zeros elsewhere.
TEST(Dropout, KeepsTheStatedShare) {
  for (const double p : {0.0, 0.1, 0.5, 0.9, 1.0}) {
    check::CaseSpec spec;
    spec.dtype = DType::f64;
    spec.batch = 2;
    spec.heads_q = spec.heads_kv = 2;
    spec.seq_q = 64;
    spec.seq_k = 64;
    spec.head_dim = 1;
    spec.head_dim_v = 64;
    spec.dropout_p = p;
    spec.dropout_seed = 9;
    check::Case c(spec);
    c.q.each([&](const check::Index&, std::int64_t at) { c.q.set(at, 0); });
    c.v.each([&](const check::Index& i, std::int64_t at) { c.v.set(at, i[1] == i[3] ? 1 : 0); });
    ASSERT_TRUE(oracle::forward(c.problem(), c.forward_operands()).ok());
    const double keep = 1 - std::lround(65536 * p) / 65536.0;
    int kept = 0;
    c.out.each([&](const check::Index& i, std::int64_t at) {
      const std::int64_t batch_head = i[0] * 2 + i[2];
      const std::uint32_t lane = dropout_lane(dropout_block(9, 0, batch_head, i[1], i[3]), i[3]);
      const bool expected = lane >= static_cast<std::uint32_t>(std::lround(65536 * p));
      kept += expected ? 1 : 0;
      ASSERT_NEAR(c.out.get(at), expected ? 1 / (64 * keep) : 0, 1e-14);
    });
    const double n = static_cast<double>(c.out.count());
    EXPECT_NEAR(kept / n, keep, 5 * std::sqrt(keep * (1 - keep) / n) + 1e-12) << p;
    EXPECT_NEAR(c.lse.get(0), std::log(64.0), 1e-6);  // undropped
  }
}

TEST(Dropout, StateReplacesSeedAndOffset) {
  check::CaseSpec spec;
  spec.dropout_p = 0.5;
  spec.dropout_seed = 0xfedcba9876543210u;
  spec.dropout_offset = 0x89abcdefu;
  check::Case given(spec);
  spec.dropout_state = true;
  check::Case stored(spec);
  spec.dropout_offset += 1;
  check::Case other(spec);
  for (check::Case* c : {&given, &stored, &other}) {
    ASSERT_TRUE(oracle::forward(c->problem(), c->forward_operands()).ok());
  }
  EXPECT_EQ(given.out.bits(), stored.out.bits());
  EXPECT_NE(given.out.bits(), other.out.bits());
}

}  // namespace
}  // namespace onepass
