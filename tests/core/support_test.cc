#include "core/support.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "core/work.h"

namespace onepass {
namespace {

Problem small() {
  Problem p;
  p.batch = 2;
  p.seq_q = p.total_q = 5;
  p.seq_k = p.total_k = 7;
  p.heads_q = 4;
  p.heads_kv = 2;
  p.head_dim = p.head_dim_v = 8;
  return p;
}

void expect_refused(const Status& status, const char* part) {
  EXPECT_EQ(status.code(), ONEPASS_INVALID_ARGUMENT) << status.text();
  EXPECT_NE(status.text().find(part), std::string::npos) << status.text();
  EXPECT_EQ(status.text().find('\n'), std::string::npos);
}

TEST(Support, SizesAndHeads) {
  EXPECT_TRUE(check_problem(small()).ok());
  for (std::int64_t Problem::*size : {&Problem::batch, &Problem::seq_q, &Problem::seq_k, &Problem::heads_q,
                                      &Problem::heads_kv, &Problem::head_dim, &Problem::head_dim_v}) {
    Problem p = small();
    p.*size = -3;
    expect_refused(check_problem(p), "-3");
  }
  Problem p = small();
  p.heads_q = 5;
  expect_refused(check_problem(p), "nearest: 4 query heads");
  p.heads_kv = 0;
  expect_refused(check_problem(p), "multiple");
  p.heads_q = 0;
  EXPECT_TRUE(check_problem(p).ok());
  p.heads_kv = 3;  // no query head at all: nothing to compute
  EXPECT_TRUE(check_problem(p).ok());
}

TEST(Support, ScoresAndWindows) {
  const double inf = std::numeric_limits<double>::infinity();
  Problem p = small();
  p.score.scale = inf;
  expect_refused(check_problem(p), "scale");
  p = small();
  p.score.scale = 0;
  EXPECT_TRUE(check_problem(p).ok());
  for (const double cap : {-1.0, inf, std::numeric_limits<double>::quiet_NaN()}) {
    p = small();
    p.score.softcap = cap;
    expect_refused(check_problem(p), "softcap");
  }
  p = small();
  p.mask.window_left = -2;
  expect_refused(check_problem(p), "(-2, -1)");
}

TEST(Support, CumulativeLengths) {
  Problem p = small();
  p.mask.varlen = true;
  p.total_q = 9;
  p.total_k = 12;
  std::vector<std::int32_t> q{0, 4, 9}, k{0, 7, 12};
  p.mask.cu_seqlens_q = q.data();
  p.mask.cu_seqlens_k = k.data();
  EXPECT_TRUE(check_lengths(p).ok());
  q = {1, 4, 9};
  expect_refused(check_lengths(p), "start at 0");
  q = {0, 4, 3};
  expect_refused(check_lengths(p), "must not decrease");
  q = {0, 5, 10};
  expect_refused(check_lengths(p), "10 of 9");
  q = {0, 6, 9};
  expect_refused(check_lengths(p), "declared maximum 5");
  q = {0, 0, 0};
  EXPECT_TRUE(check_lengths(p).ok());
  q = {0, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()};
  EXPECT_FALSE(check_lengths(p).ok());
}

TEST(Support, PaddedLengths) {
  Problem p = small();
  std::vector<std::int32_t> start{0, 3}, length{7, 4}, q_length{5, 0}, position{-2, 100};
  p.mask.k_start = start.data();
  p.mask.k_length = length.data();
  p.mask.q_length = q_length.data();
  p.mask.q_position = position.data();  // any value is a position
  EXPECT_TRUE(check_lengths(p).ok());
  length[1] = 5;
  expect_refused(check_lengths(p), "k_length[1] must be between 0 and 4: got 5");
  length[1] = 4;
  q_length[0] = 6;
  expect_refused(check_lengths(p), "q_length[0]");
  q_length[0] = -1;
  expect_refused(check_lengths(p), "q_length[0]");
  q_length[0] = 1;
  start[0] = 8;
  expect_refused(check_lengths(p), "k_start[0]");
}

TEST(Support, OutputsHaveTheirOwnBytes) {
  const Problem p = small();
  std::vector<float> memory(10000);
  const auto tensor = [&](std::int64_t at, std::int64_t rows, std::int64_t heads) {
    return Tensor{memory.data() + at, DType::f32, rows * heads * 8, heads * 8, 8};
  };
  ForwardOperands f{
      tensor(0, 5, 4), tensor(1000, 7, 2), tensor(2000, 7, 2), tensor(3000, 5, 4), {memory.data() + 4000, 20, 5}};
  EXPECT_TRUE(check_operands(p, f).ok());
  f.out = tensor(16, 5, 4);
  expect_refused(check_operands(p, f), "out overlaps the input q");
  f.out = tensor(3000, 5, 4);
  f.lse.data = memory.data() + 3100;
  expect_refused(check_operands(p, f), "lse overlaps the output out");
  f.lse = {};
  f.out.stride_head = 0;
  expect_refused(check_operands(p, f), "must not overlap");
  f.k.stride_head = 0;  // an input may broadcast
  f.out.stride_head = 8;
  EXPECT_TRUE(check_operands(p, f).ok());
  // The workspace, and inputs that are not operands, have bytes of their own too.
  expect_refused(check_operands(p, f, {memory.data() + 3000, 64}), "workspace overlaps the output out");
  expect_refused(check_operands(p, f, {memory.data() + 990, 64}), "workspace overlaps the input k");
  EXPECT_TRUE(check_operands(p, f, {memory.data() + 5000, 64}).ok());
  Problem with_lengths = p;
  with_lengths.mask.q_position = reinterpret_cast<const std::int32_t*>(memory.data() + 3008);
  expect_refused(check_operands(with_lengths, f), "out overlaps the input q_position");
  // Caches that grow are outputs, those that do not may be shared and broadcast.
  f.k.stride_head = 8;
  Append append{"k_cache", "v_cache", tensor(5000, 1, 2), tensor(6000, 1, 2), 1, nullptr};
  EXPECT_TRUE(check_operands(p, f, {}, append).ok());
  f.q = f.k;
  expect_refused(check_operands(p, f, {}, append), "k_cache overlaps the input q");
  f.q = tensor(0, 5, 4);
  append.cache_seqlens = reinterpret_cast<const std::int32_t*>(memory.data() + 2000);
  expect_refused(check_operands(p, f, {}, append), "v_cache overlaps the input cache_seqlens");
  append.k_new = append.v_new = {};
  EXPECT_TRUE(check_operands(p, f, {}, append).ok());
}

TEST(Support, PlansStayBelowTwoToThe63) {
  // Each of these made a workspace size wrap around.
  const std::int64_t large = std::int64_t{1} << 59;
  for (const bool varlen : {false, true}) {
    Problem p = small();
    p.mask.varlen = varlen;
    p.batch = large;
    expect_refused(check_problem(p), "split it");
    p = small();
    p.mask.varlen = varlen;
    p.seq_q = p.total_q = large;
    expect_refused(check_problem(p), "the problem is too large: 2 items of 576460752303423488 queries");
    p = small();
    p.mask.varlen = varlen;
    p.seq_k = p.total_k = large;
    expect_refused(check_problem(p), "split it");
    p = small();
    p.heads_q = p.heads_kv = large;
    expect_refused(check_problem(p), "split it");
  }
  Problem p = small();  // a million sequences with nothing declared about their lengths
  p.mask.varlen = true;
  p.batch = 1 << 20;
  p.total_q = p.total_k = 1 << 26;
  p.seq_q = p.seq_k = INT32_MAX;
  p.heads_q = p.heads_kv = 128;
  p.head_dim = p.head_dim_v = 256;
  EXPECT_TRUE(check_problem(p).ok()) << check_problem(p).text();
}

TEST(Support, ScoresStayInFloat32) {
  Problem p = small();
  for (const double scale : {0.0, -1.0, 1e-300, 1e30, -1e30}) {
    p.score.scale = scale;
    EXPECT_TRUE(check_problem(p).ok()) << scale;
  }
  for (const double scale : {1.1e30, -3.4e38, 1e300}) {
    p.score.scale = scale;
    expect_refused(check_problem(p), "scale must be between -1e+30 and 1e+30");
  }
  p.score.scale = 1;
  for (const double softcap : {0.0, 1.2e-38, 1.0, 3.4e38}) {
    p.score.softcap = softcap;
    EXPECT_TRUE(check_problem(p).ok()) << softcap;
  }
  for (const double softcap : {1e-300, 1e-40, 3.5e38, 1e300, -1e-300}) {
    p.score.softcap = softcap;
    expect_refused(check_problem(p), "softcap must be 0 (none) or between");
  }
}

TEST(Work, VisiblePairsAgreeWithCounting) {
  for (const std::int64_t seq_q : {0, 1, 5, 33}) {
    for (const std::int64_t seq_k : {0, 1, 7, 40}) {
      for (const std::int64_t left : {-1, 0, 3, 100}) {
        for (const std::int64_t right : {-1, 0, 2, 100}) {
          for (const bool causal : {false, true}) {
            for (const Align align : {Align::bottom_right, Align::top_left}) {
              Problem p = small();
              p.seq_q = p.total_q = seq_q;
              p.seq_k = p.total_k = seq_k;
              p.mask.window_left = left;
              p.mask.window_right = right;
              p.mask.causal = causal;
              p.mask.align = align;
              double counted = 0;
              for (std::int64_t i = 0; i < seq_q; ++i) counted += static_cast<double>(p.sequence(0).visible(i).size());
              EXPECT_EQ(visible_pairs(p), 2 * counted);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace onepass
