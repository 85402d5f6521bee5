// The decode on every instruction set of this machine.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "check/compare.h"
#include "check/sweep.h"
#include "kit/kit.h"

namespace onepass {
namespace {

using check::Array;
using check::Case;
using check::CaseSpec;
using check::Index;
using check::Values;

#if defined(ONEPASS_SANITIZED)
constexpr int kThin = 8;
#else
constexpr int kThin = 1;
#endif

std::vector<const Kernel*> decode_kernels() {
  std::vector<const Kernel*> list;
  for (const Kernel* kernel : check::runnable_kernels(Pass::decode)) {
    if (kernel->pass == Pass::decode) list.push_back(kernel);
  }
  return list;
}

CaseSpec sized(std::int64_t seq_q, std::int64_t seq_k, std::int64_t heads_q, std::int64_t heads_kv, std::int64_t dim) {
  CaseSpec spec;
  spec.pass = Pass::decode;
  spec.seq_q = seq_q;
  spec.seq_k = seq_k;
  spec.heads_q = heads_q;
  spec.heads_kv = heads_kv;
  spec.head_dim = spec.head_dim_v = dim;
  return spec;
}

/// Every kernel that serves the case, within the bound and with the same bits for every number of threads.
void expect_right(const CaseSpec& spec, const std::vector<int>& threads = {1, 2, 3, 8}) {
  Case c(spec);
  const check::Reference reference(c);
  ASSERT_TRUE(reference.status().ok()) << reference.status().text();
  for (const Kernel* kernel : decode_kernels()) {
    if (!check::serves(*kernel, c)) continue;
    std::uint64_t bits = 0;
    for (const int n : threads) {
      const check::Report report = check::check_kernel(*kernel, c, reference, n);
      EXPECT_TRUE(kit::passes(report));
      if (n != threads.front()) {
        EXPECT_EQ(report.bits, bits) << report.name;
      }
      bits = report.bits;
    }
  }
}
void expect_right_in_each_type(CaseSpec spec) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    spec.dtype = dtype;
    expect_right(spec);
  }
}

/// Exactly as large as asked for, followed by a guard.
class Workspace {
 public:
  explicit Workspace(std::size_t size) : size_(size), memory_(size / 64 + 3) {
    std::memset(memory_.data(), 0xff, memory_.size() * sizeof(Line));
  }
  Launch launch(int threads) { return {.workspace = memory_.data(), .workspace_size = size_, .threads = threads}; }
  bool intact() const {
    const auto* byte = reinterpret_cast<const unsigned char*>(memory_.data());
    for (std::size_t n = size_; n < memory_.size() * sizeof(Line); ++n) {
      if (byte[n] != 0xff) return false;
    }
    return true;
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::size_t size_;
  std::vector<Line> memory_;
};

/// Runs every kernel on operands that the test filled, then looks at the outputs.
template <class Look>
void run_each(Case& c, Look&& look) {
  for (const Kernel* kernel : decode_kernels()) {
    if (!check::serves(*kernel, c)) continue;
    SCOPED_TRACE(kernel->name);
    c.reset();
    Workspace workspace(kernel->workspace(c.problem(), 3));
    ASSERT_TRUE(kernel->forward(c.problem(), c.forward_operands(), workspace.launch(3)).ok());
    EXPECT_TRUE(workspace.intact());
    EXPECT_TRUE(c.faults().empty());
    look();
  }
}
template <class F>
void fill(Array& array, F&& value) {
  array.each([&](const Index& i, std::int64_t at) { array.set(at, value(i)); });
  array.seal();
}
double out(const Case& c, std::int64_t row, std::int64_t x = 0, std::int64_t head = 0, std::int64_t b = 0) {
  return c.out.get(c.out.offset({b, row, head, x}));
}
double lse(const Case& c, std::int64_t row, std::int64_t head = 0, std::int64_t b = 0) {
  return c.lse.get(c.lse.offset({b, head, row, 0}));
}

TEST(Decode, RandomCases) {
  check::Sweep sweep;
  sweep.limits.pass = Pass::decode;
  sweep.cases = kit::scaled(600) / kThin;
  sweep.first_seed = kit::first_seed();
  sweep.threads = {1, 2, 3, 8};
  kit::expect_sweep(decode_kernels(), sweep);
}

TEST(Decode, LargeHeadDims) {
  check::Sweep sweep;
  sweep.limits.pass = Pass::decode;
  sweep.limits.max_head_dim = 1024;
  sweep.limits.max_seq = 1500;
  sweep.limits.work = 2e7;
  sweep.cases = kit::scaled(60) / kThin;
  sweep.first_seed = kit::first_seed() + 100000;
  sweep.threads = {1, 3};
  kit::expect_sweep(decode_kernels(), sweep);
}

TEST(Decode, EveryHeadDim) {
  for (std::int64_t dim = 1; dim <= 264; dim += kThin) {
    CaseSpec spec = sized(2, 37, 3, 1, dim);
    spec.dtype = static_cast<DType>(dim % 3);
    if (dim % 5 == 0) spec.head_dim_v = 265 - dim;
    spec.causal = true;
    expect_right(spec, {1});
  }
  for (const std::int64_t dim : {320, 511, 512, 576, 1000, 1024}) {
    CaseSpec spec = sized(1, 300, 4, 2, dim);
    expect_right_in_each_type(spec);
  }
}

TEST(Decode, HeadDimZero) {
  for (const std::int64_t dim : {0, 8}) {
    CaseSpec spec = sized(3, 300, 2, 1, dim);
    spec.head_dim_v = 8 - dim;
    spec.scale = 1;
    expect_right_in_each_type(spec);
  }
}

TEST(Decode, EveryGroupAndRowCount) {
  for (std::int64_t group = 1; group <= 17; ++group) {
    for (std::int64_t seq_q = 1; seq_q <= 16; seq_q += group % 3 + 1) {
      CaseSpec spec = sized(seq_q, 300, 2 * group, 2, 16);
      spec.seed = static_cast<std::uint64_t>(group * 100 + seq_q);
      spec.dtype = static_cast<DType>((group + seq_q) % 3);
      spec.causal = seq_q % 2 == 0;
      if (seq_q % 3 == 0) spec.window_left = 10 * group;
      expect_right(spec, {1, 3});
    }
  }
  expect_right_in_each_type(sized(16, 600, 71, 1, 32));   // 1136 packed rows: 36 tasks, chunks of 36 tiles
  expect_right_in_each_type(sized(1, 5000, 40, 1, 8));    // 2 tasks of 20 rows
}

TEST(Decode, ChunkEdges) {
  for (const std::int64_t seq_k : {1, 2, 15, 16, 17, 31, 33, 255, 256, 257, 511, 512, 513, 1023, 1025, 2049}) {
    for (const std::int64_t window : {-1, 0, 1, 255, 256, 300}) {
      CaseSpec spec = sized(3, seq_k, 4, 2, 32);
      spec.seed = static_cast<std::uint64_t>(seq_k);
      spec.dtype = static_cast<DType>(seq_k % 3);
      spec.causal = true;
      spec.window_left = window;
      expect_right(spec, {1, 3});
    }
  }
}

TEST(Decode, Modifiers) {
  for (const bool causal : {false, true}) {
    CaseSpec spec = sized(5, 700, 6, 2, 40);
    spec.batch = 2;
    spec.causal = causal;
    spec.softcap = 5;
    expect_right_in_each_type(spec);
    spec.softcap = 0;
    spec.alibi = 2;
    expect_right_in_each_type(spec);
    spec.bias = true;
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
      spec.bias_dtype = dtype;
      spec.bias_extreme = dtype != DType::f16;
      expect_right_in_each_type(spec);
    }
    spec.sinks = true;
    spec.bias_broadcast = {true, false, true, false};
    expect_right_in_each_type(spec);
    spec.bias_broadcast = {false, true, false, true};
    spec.dropout_p = 0.4;
    expect_right_in_each_type(spec);
  }
}

TEST(Decode, DifficultValues) {
  for (const Values values : {Values::wide, Values::deep, Values::equal, Values::steep, Values::rising, Values::denormal,
                              Values::special}) {
    CaseSpec spec = sized(2, 1100, 4, 1, 64);
    spec.values = values;
    expect_right_in_each_type(spec);
    spec.causal = true;
    spec.window_left = 400;
    spec.sinks = true;
    expect_right_in_each_type(spec);
  }
}

// Empty sequences between others, lengths and starts that reach over chunks, rows outside all sequences.
TEST(Decode, Batches) {
  CaseSpec spec = sized(4, 900, 6, 3, 24);
  spec.batch = 6;
  spec.q_length = {4, 0, 1, 3, 4, 2};
  spec.k_length = {900, 100, 0, 257, 512, 1};
  spec.k_start = {0, 7, 300, 256, 300, 899};
  spec.causal = true;
  expect_right_in_each_type(spec);
  spec.q_position = {896, 3, 0, -2, 510, 900};
  expect_right_in_each_type(spec);

  CaseSpec packed = sized(5, 1300, 6, 3, 24);
  packed.batch = 5;
  packed.cu_seqlens_q = {0, 5, 5, 6, 9, 11};
  packed.cu_seqlens_k = {0, 1300, 1301, 1301, 1557, 2500};
  packed.total_q = 14;
  packed.total_k = 2600;
  expect_right_in_each_type(packed);
  packed.causal = true;
  packed.window_left = 270;
  packed.sinks = true;
  expect_right_in_each_type(packed);
}

TEST(Decode, Strides) {
  for (const std::array<int, 3> order : {std::array{0, 1, 2}, std::array{0, 2, 1}, std::array{2, 1, 0}}) {
    CaseSpec spec = sized(3, 520, 4, 2, 33);
    spec.batch = 2;
    spec.layout_k = {.order = order, .gap = {3, 1, 7}, .broadcast = {}, .start = 5};
    spec.layout_v = {.order = {2, 0, 1}, .gap = {0, 13, 2}, .broadcast = {}, .start = 1};
    spec.layout_q = spec.layout_out = spec.layout_k;
    spec.row_gap = 3;
    expect_right_in_each_type(spec);
    spec.layout_k.broadcast = {true, false, false};
    spec.layout_v.broadcast = {false, false, true};
    spec.out_f32 = true;
    expect_right_in_each_type(spec);
  }
}

TEST(Decode, NothingToDo) {
  for (int empty = 0; empty < 4; ++empty) {
    CaseSpec spec = sized(empty == 0 ? 0 : 2, empty == 1 ? 0 : 5, empty == 2 ? 0 : 4, empty == 2 ? 0 : 2, 16);
    spec.batch = empty == 3 ? 0 : 2;
    expect_right_in_each_type(spec);
    spec.sinks = true;
    expect_right_in_each_type(spec);
  }
}

// Row i of a decode sees the keys that row i of a prefill sees: V is one-hot, so the weights are read off.
TEST(Decode, WindowsShowExactlyTheirKeys) {
  constexpr std::int64_t kSeq = 16;
  for (const std::int64_t left : {0, 1, 4, 15, 16, 1000}) {
    for (const std::int64_t right : {0, -1, 3}) {
      for (std::int64_t length = 1; length <= kSeq; ++length) {
        for (const std::int64_t seq_q : {std::int64_t{1}, std::min<std::int64_t>(length, 5)}) {
          CaseSpec spec = sized(seq_q, length, 2, 1, kSeq);
          spec.window_left = left;
          spec.window_right = right;
          Case c(spec);
          fill(c.q, [](const Index&) { return 0.0; });
          fill(c.k, [](const Index&) { return 1.0; });
          fill(c.v, [](const Index& i) { return i[1] == i[3] ? 1.0 : 0.0; });
          run_each(c, [&] {
            for (std::int64_t i = 0; i < seq_q; ++i) {
              const std::int64_t p = i + length - seq_q, lo = std::max<std::int64_t>(0, p - left);
              const std::int64_t hi = right < 0 ? length : std::min(length, p + right + 1);
              for (std::int64_t j = 0; j < length; ++j) {
                const double expected = j >= lo && j < hi ? 1.0 / static_cast<double>(hi - lo) : 0.0;
                EXPECT_NEAR(out(c, i, j, 1), expected, 1e-6) << "row " << i << " of " << length << ", key " << j;
                if (expected == 0) {
                  EXPECT_EQ(out(c, i, j, 1), 0);
                }
              }
            }
          });
        }
      }
    }
  }
}

// NaN and Inf in keys that a row does not see, in K or V, leave the bits that zeros leave.
TEST(Decode, InvisibleKeysNeverMatter) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const bool window : {false, true}) {
      CaseSpec spec = sized(6, 300, 6, 1, 20);
      spec.dtype = dtype;
      spec.causal = true;
      if (window) spec.window_left = 40;
      Case plain(spec);
      std::vector<std::vector<double>> clean;
      const auto outputs = [&](const Case& c, std::int64_t row) {
        std::vector<double> all;
        for (std::int64_t head = 0; head < 6; ++head) {
          for (std::int64_t x = 0; x < 20; ++x) all.push_back(out(c, row, x, head));
          all.push_back(lse(c, row, head));
        }
        return all;
      };
      run_each(plain, [&] {
        for (std::int64_t row = 0; row < 6; ++row) clean.push_back(outputs(plain, row));
      });
      for (const double bad : {NAN, INFINITY}) {
        for (const bool in_v : {false, true}) {
          Case c(spec);
          Array& bad_tensor = in_v ? c.v : c.k;
          // Row 0 sees keys up to 294, row 5, with the window, from 259.
          for (const std::int64_t key : {std::int64_t{297}, std::int64_t{255}}) {
            for (std::int64_t x = 0; x < 20; ++x) bad_tensor.set(bad_tensor.offset({0, key, 0, x}), bad);
          }
          bad_tensor.seal();
          std::size_t at = 0;
          run_each(c, [&] {
            for (std::int64_t row = 0; row < 6; ++row, ++at) {
              const bool sees = row + 294 >= 297 || !window || row + 294 - 40 <= 255;
              if (!sees) {
                EXPECT_EQ(outputs(c, row), clean[at]) << "row " << row;
              }
            }
          });
        }
      }
    }
  }
}

// Scores far below zero, one key and two; then any number of equal keys.
TEST(Decode, VeryNegativeScores) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::int64_t seq_k : {1, 2, 300}) {
      for (const std::int64_t seq_q : {1, 5}) {
        for (const bool packed : {false, true}) {
          CaseSpec spec = sized(seq_q, seq_k, 3, 1, 128);
          spec.dtype = dtype;
          if (packed) {
            spec.cu_seqlens_q = {0, static_cast<std::int32_t>(seq_q)};
            spec.cu_seqlens_k = {0, static_cast<std::int32_t>(seq_k)};
            spec.total_q = seq_q;
            spec.total_k = seq_k;
          }
          Case c(spec);
          fill(c.q, [](const Index&) { return 64.0; });
          fill(c.k, [](const Index&) { return -64.0; });
          fill(c.v, [](const Index&) { return 1.0; });
          run_each(c, [&] {
            for (std::int64_t i = 0; i < seq_q; ++i) {
              EXPECT_EQ(out(c, i), 1);
              EXPECT_NEAR(lse(c, i), -524288 / std::sqrt(128.0) + std::log(seq_k), 0.008);
            }
          });
        }
      }
    }
  }
}

TEST(Decode, VeryLongSequences) {
  for (const std::int64_t seq_k : {1, 7, 100, 170000 / kThin}) {
    for (const std::int64_t seq_q : {1, 16}) {
      CaseSpec spec = sized(seq_q, seq_k, 1, 1, 128);
      spec.dtype = DType::bf16;
      Case c(spec);
      fill(c.v, [](const Index&) { return 1.0; });
      run_each(c, [&] {
        for (std::int64_t i = 0; i < seq_q; ++i) {
          for (std::int64_t x = 0; x < 128; ++x) EXPECT_EQ(out(c, i, x), 1);
        }
      });
    }
  }
}

TEST(Decode, RowsThatSeeNothing) {
  CaseSpec spec = sized(16, 5, 4, 2, 16);
  spec.causal = true;  // the first 11 rows
  for (const bool sinks : {false, true}) {
    spec.sinks = sinks;
    Case c(spec);
    fill(c.v, [](const Index&) { return 1.0; });
    run_each(c, [&] {
      for (std::int64_t i = 0; i < 11; ++i) {
        EXPECT_EQ(out(c, i), 0);
        EXPECT_EQ(lse(c, i, 3), sinks ? c.sinks.get(c.sinks.offset({0, 0, 0, 3})) : -HUGE_VAL);
      }
      if (!sinks) {
        EXPECT_NEAR(out(c, 11), 1, 1e-6);
      }
    });
  }
}

// Whatever the length arrays hold, nothing outside the operands is touched: lengths past the end, negative, falling.
TEST(Decode, AnyContentOfTheLengths) {
  CaseSpec spec = sized(2, 600, 2, 1, 8);
  spec.batch = 4;
  CaseSpec packed_spec = spec;
  packed_spec.cu_seqlens_q = {0, 2, 4, 6, 8};
  packed_spec.cu_seqlens_k = {0, 600, 1200, 1800, 2400};
  packed_spec.total_q = 8;
  packed_spec.total_k = 2400;
  Case padded(spec), packed(packed_spec);
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max(), kBad[] = {-1, 0, 601, kMost, -kMost, 5};
  for (int n = 0; n < 30; ++n) {
    std::int32_t list[3][5];
    for (int k = 0; k < 15; ++k) list[k / 5][k % 5] = kBad[(n * 7 + k * 5 + n / 6 * k) % 6];
    for (Case* c : {&padded, &packed}) {
      Problem problem = c->problem();
      if (c == &packed) {
        if (n % 2 == 0) {
          for (int b = 0; b < 5; ++b) list[1][b] = b % 2 * 2400;  // overlapping, 4800 keys in all
        }
        problem.mask.cu_seqlens_q = list[0];
        problem.mask.cu_seqlens_k = list[1];
      } else {
        problem.mask.k_length = list[0];
        problem.mask.k_start = list[1];
        problem.mask.q_length = list[2];
      }
      for (const Kernel* kernel : decode_kernels()) {
        if (!check::serves(*kernel, *c)) continue;
        c->reset();
        Workspace workspace(kernel->workspace(problem, 2));
        ASSERT_TRUE(kernel->forward(problem, c->forward_operands(), workspace.launch(1)).ok());
        EXPECT_TRUE(workspace.intact());
        EXPECT_TRUE(c->faults().empty());
      }
    }
  }
}

TEST(Decode, WorkspaceIsLinear) {
  for (const Kernel* kernel : decode_kernels()) {
    Problem p;
    p.dtype = DType::bf16;
    p.batch = 1;
    p.heads_q = 64;
    p.heads_kv = 64;
    p.head_dim = p.head_dim_v = 512;
    p.seq_q = 1;
    p.mask.varlen = true;
    // One sequence of 32768 keys beside a thousand of 1 costs what they hold, not the longest times their number.
    p.batch = 1001;
    p.total_q = 1001;
    p.seq_k = 32768;
    p.total_k = 33768;
    const double bytes = static_cast<double>(kernel->workspace(p, 2));
    EXPECT_LT(bytes, 64.0 * (33768 / 256 + 1001) * 4 * (512 + 2) * 4 + 1e6) << kernel->name;

    // Partial results stay below half a byte for each element of V, and the largest sizes have a plan.
    Problem q = p;
    q.mask.varlen = false;
    q.batch = 1;
    q.total_q = q.seq_q = 16;
    q.heads_q = 128;
    q.heads_kv = 1;
    q.head_dim_v = 512;
    for (const std::int64_t seq_k : {std::int64_t{1} << 16, std::int64_t{1} << 20, std::int64_t{1} << 24}) {
      q.seq_k = q.total_k = seq_k;
      EXPECT_LT(static_cast<double>(kernel->workspace(q, 2)), 0.6 * 512 * static_cast<double>(seq_k) + 5e6 + 2048 * 4 * 514) << kernel->name;
    }
  }
}

}  // namespace
}  // namespace onepass
