// Inputs that broke other libraries' backward.
#include <atomic>
#include <thread>

#include "cpu/backward_kit.h"

namespace onepass {
namespace {

using namespace backward_kit;

TEST(Backward, FiftyRunsAgree) {  // C17 and C18, beside other work on the machine
  CaseSpec wide = spec_of(300, 128, 1, 128);
  wide.dtype = DType::f16;
  wide.batch = 6;
  wide.values = check::Values::wide;
  CaseSpec grouped = spec_of(400, 400, 2, 64);
  grouped.dtype = DType::bf16;
  grouped.heads_q = 8;
  grouped.causal = true;
  CaseSpec modified = spec_of(200, 300, 1, 32);
  modified.bias = modified.sinks = true;
  modified.bias_broadcast = {true, true, false, false};
  modified.dropout_p = 0.2;
  modified.window_left = 100;
  CaseSpec negative = spec_of(16, 96, 1, 123);  // keys that no row sees, in blocks with others or without
  negative.k_start = {40};
  negative.causal = true;
  negative.align = Align::top_left;
  negative.scale = -0.3;
  std::atomic<bool> stop{false};
  std::thread other([&] {
    for (volatile double x = 1; !stop.load(std::memory_order_relaxed);) x = x * 1.0000001;
  });
  for (const CaseSpec& spec : {wide, grouped, modified, negative}) {
    expect_right(spec);
    if (!kit::chosen(spec)) continue;
    Case c(spec);
    for (const Kernel* kernel : backward_kernels()) {
      run(*kernel, c, 1);
      const std::uint64_t bits = gradient_bits(c);
      for (int n = 0; n < (kernel == backward_kernels().front() ? 50 : 10); ++n) {
        run(*kernel, c, 1 + n % 5);
        EXPECT_EQ(gradient_bits(c), bits) << kernel->name << " " << check::describe(spec);
      }
    }
  }
  stop = true;
  other.join();
}

TEST(Backward, SoftcapOfLargeScores) {  // C20
  for (const double cap : {10.0, 0.5}) {
    CaseSpec spec = spec_of(1024, 1024, 1, 128);
    spec.softcap = cap;
    spec.scale = 3;
    expect_right(spec, {1, 2});
    spec.batch = 2;
    spec.cu_seqlens_q = spec.cu_seqlens_k = {0, 128, 345};
    spec.total_q = spec.total_k = 345;
    spec.seq_q = spec.seq_k = 217;
    spec.dtype = DType::bf16;
    expect_right(spec);
  }
}

TEST(Backward, Sinks) {  // C21
  for (const double sink : {-std::numeric_limits<double>::infinity(), 0.0, 5.0}) {
    for (const std::int64_t window : {-1, 4}) {
      CaseSpec spec = spec_of(33, 33, 2, 64);
      spec.heads_q = 6;
      spec.window_left = window;
      spec.grad_lse = true;
      spec.sinks = true;
      if (!kit::chosen(check::describe(spec) + std::to_string(sink), 1e6)) continue;
      Case c(spec);
      c.sinks.each([&](const Index&, std::int64_t at) { c.sinks.set(at, sink); });
      refresh(c);
      expect_right(c, {1, 2});
      if (std::isinf(sink)) {
        c.grad_sinks.each([&](const Index&, std::int64_t at) { EXPECT_EQ(c.grad_sinks.get(at), 0); });
      }
    }
  }
}

TEST(Backward, BiasGradientSumsWhatBroadcasts) {  // C22
  for (int mask = 0; mask < 16; ++mask) {
    CaseSpec spec = spec_of(128, 128, 4, 32);
    spec.batch = mask == 1 || mask == 14 ? 8 : 2;
    spec.dtype = DType::bf16;
    spec.bias = true;
    for (int axis = 0; axis < 4; ++axis) spec.bias_broadcast[static_cast<std::size_t>(axis)] = (mask >> axis & 1) != 0;
    expect_right(spec, {1, 2, 8});
  }
  CaseSpec spec = spec_of(130, 700, 1, 8);  // more columns than a block, keys that do not start at column 0
  spec.bias = true;
  spec.batch = 3;
  spec.k_start = {0, 77, 500};
  spec.k_length = {700, 300, 0};
  spec.q_length = {130, 1, 90};
  for (const auto& broadcast : {std::array<bool, 4>{true, true, false, false},
                                {false, true, true, true},
                                {true, true, true, true},
                                {true, false, true, false}}) {
    spec.bias_broadcast = broadcast;
    expect_right(spec, {1, 2, 8});
  }
}

TEST(Backward, EmptyProblems) {  // C28, C29
  for (int zero = 0; zero < 64; ++zero) {
    CaseSpec spec =
        spec_of((zero & 1) != 0 ? 0 : 5, (zero & 2) != 0 ? 0 : 7, (zero & 4) != 0 ? 0 : 2, (zero & 8) != 0 ? 0 : 4);
    spec.batch = (zero & 16) != 0 ? 0 : 2;
    spec.scale = 1;
    spec.causal = (zero & 32) != 0;
    expect_right(spec, {1, 2});
    spec.bias = spec.sinks = true;
    spec.bias_broadcast = {true, false, true, false};
    expect_right(spec);
  }
  for (const std::int64_t rows : {0, 6}) {  // packed, no sequence or only empty ones
    CaseSpec spec = spec_of(4, 4, 2, 8);
    spec.total_q = spec.total_k = rows;
    spec.batch = 0;
    spec.cu_seqlens_q = spec.cu_seqlens_k = {0};
    expect_right(spec);
    spec.batch = 3;
    spec.cu_seqlens_q = spec.cu_seqlens_k = {0, 0, 0, 0};
    expect_right(spec);
  }
}

TEST(Backward, OneAndTwoOfEverything) {  // C32
  expect_right(spec_of(1, 128, 1, 64));
  for (int n = 0; n < 16; ++n) {
    CaseSpec spec = spec_of(1 + (n & 1), 1 + (n >> 1 & 1), 1 + (n >> 2 & 1), 64);
    spec.batch = 1 + (n >> 3 & 1);
    expect_right(spec);
  }
}

TEST(Backward, RowsBehindTheLastSequence) {  // C36: gradients prefilled with NaN
  CaseSpec spec = spec_of(512, 512, 16, 64);
  spec.batch = 3;
  spec.cu_seqlens_q = spec.cu_seqlens_k = {0, 144, 432, 944};
  spec.total_q = spec.total_k = 946;
  spec.causal = true;
  expect_right(spec, {1, 2});
}

TEST(Backward, ManyTinySequences) {  // C24, C38
  CaseSpec spec = spec_of(2, 2, 1, 4);
  spec.batch = 70000;
  expect_right(spec, {2});
  spec.batch = 1;
  spec.heads_q = spec.heads_kv = 70000;
  expect_right(spec, {2});
  spec = spec_of(500, 500, 2, 8);
  spec.batch = 1001;
  spec.cu_seqlens_q = {0, 500};
  for (int n = 0; n < 1000; ++n) spec.cu_seqlens_q.push_back(501 + n);
  spec.cu_seqlens_k = spec.cu_seqlens_q;
  spec.total_q = spec.total_k = 1500;
  expect_right(spec, {1, 2});
}
}  // namespace
}  // namespace onepass
