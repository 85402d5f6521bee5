// The decode kernels on hand-made cases: windows, hidden keys, long sequences, lengths of any content.
#include "cpu/decode_kit.h"

namespace onepass {
namespace {

using namespace decode_kit;

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
  for (const std::int64_t seq_k : {1, 7, 100, 170000}) {
    for (const std::int64_t seq_q : {1, 16}) {
      CaseSpec spec = sized(seq_q, seq_k, 1, 1, 128);
      spec.dtype = DType::bf16;
      if (!kit::chosen(spec)) continue;
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
      EXPECT_LT(static_cast<double>(kernel->workspace(q, 2)),
                0.6 * 512 * static_cast<double>(seq_k) + 5e6 + 2048 * 4 * 514)
          << kernel->name;
    }
  }
}

}  // namespace
}  // namespace onepass
