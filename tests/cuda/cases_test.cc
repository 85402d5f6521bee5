// Inputs that broke other libraries, on every CUDA row that serves them: closed forms, limits of grids and offsets.
#include <cmath>

#include "cuda/cuda_kit.h"

namespace onepass {
namespace {

using namespace cuda_kit;

template <class F>
void fill(Array& array, F&& value) {
  array.each([&](const Index& i, std::int64_t at) { array.set(at, value(i)); });
  array.seal();
}

/// Runs every row that serves the case and hands it to `look`.
template <class Look>
void run_every(Case& c, Look&& look) {
  for (const Kernel* kernel : kernels_for(c)) {
    c.reset();
    const OnDevice call(*kernel, c);
    const Status ran = call.status().ok() ? call.run() : call.status();
    ASSERT_TRUE(ran.ok()) << kernel->name << ": " << ran.text();
    const Status fetched = call.fetch();
    ASSERT_TRUE(fetched.ok()) << kernel->name << ": " << fetched.text();
    look(*kernel);
  }
}
double at(const Array& array, std::int64_t b, std::int64_t row, std::int64_t head = 0, std::int64_t d = 0) {
  return array.get(array.offset({b, row, head, d}));
}
constexpr DType kTypes[] = {DType::bf16, DType::f16, DType::f32};

TEST(CudaCases, C01CausalOfUnequalLengths) {
  ONEPASS_NEEDS_GPU();
  struct Row {
    std::int64_t seq_q, seq_k;
    Align align;
    std::vector<double> right;
  };
  const Row rows[] = {{1, 8, Align::bottom_right, {4.5}},
                      {2, 5, Align::bottom_right, {2.5, 3}},
                      {5, 2, Align::bottom_right, {0, 0, 0, 1, 1.5}},
                      {1, 8, Align::top_left, {1}},
                      {2, 5, Align::top_left, {1, 1.5}},
                      {5, 2, Align::top_left, {1, 1.5, 1.5, 1.5, 1.5}}};
  for (const Row& row : rows) {
    for (const DType dtype : kTypes) {
      CaseSpec spec = sized(Pass::forward, dtype, row.seq_q, row.seq_k, 16);
      spec.causal = true;
      spec.align = row.align;
      Case c(spec);
      fill(c.q, [](const Index&) { return 0; });
      fill(c.v, [](const Index& i) { return static_cast<double>(i[1] + 1); });
      run_every(c, [&](const Kernel& kernel) {
        for (std::int64_t i = 0; i < row.seq_q; ++i) {
          EXPECT_NEAR(at(c.out, 0, i), row.right[static_cast<std::size_t>(i)], 0.01) << kernel.name << " row " << i;
        }
      });
    }
  }
}

TEST(CudaCases, C02C08DiagonalsThatCrossTiles) {
  ONEPASS_NEEDS_GPU();
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const DType dtype : kTypes) {
      for (const std::int64_t more : {1, 63, 64, 65, 127, 128, 129}) {
        CaseSpec spec = sized(pass, dtype, 130 + more, 130, 64);
        spec.heads_q = spec.heads_kv = 2;
        spec.causal = true;
        expect_everywhere(spec);
        spec.window_left = 16;
        expect_everywhere(spec);
      }
    }
  }
}

TEST(CudaCases, C07C50Windows) {
  ONEPASS_NEEDS_GPU();
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const std::int64_t left : {0, 1, 4, 15, 64, 128, 255, 1000}) {
      for (const std::int64_t right : {-1, 0, 3}) {
        for (const std::int64_t seq : {64, 65, 128, 129, 257}) {
          CaseSpec spec = sized(pass, DType::bf16, seq, seq, 64);
          spec.window_left = left;
          spec.window_right = right;
          expect_everywhere(spec);
        }
      }
    }
  }
}

TEST(CudaCases, C06C28NothingToSee) {
  ONEPASS_NEEDS_GPU();
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const DType dtype : kTypes) {
      for (const bool causal : {false, true}) {
        CaseSpec spec = sized(pass, dtype, 5, 0, 64);
        spec.causal = causal;
        expect_everywhere(spec);
        std::swap(spec.seq_q, spec.seq_k);
        expect_everywhere(spec);
        spec = sized(pass, dtype, 3, 1, 64);
        spec.causal = causal;
        expect_everywhere(spec);
      }
    }
  }
}

TEST(CudaCases, C05LeftPadding) {
  ONEPASS_NEEDS_GPU();
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    CaseSpec spec = sized(pass, DType::bf16, 33, 33, 128);
    spec.batch = 2;
    spec.heads_q = spec.heads_kv = 32;
    spec.causal = true;
    spec.k_start = {0, 27};
    spec.q_position = {0, -27};
    expect_everywhere(spec);
  }
}

/// C10: NaN in visible data reaches the rows that depend on it, and no others.
TEST(CudaCases, C10NanQueries) {
  ONEPASS_NEEDS_GPU();
  for (const DType dtype : kTypes) {
    for (const bool every : {true, false}) {
      CaseSpec spec = sized(Pass::forward, dtype, 80, 300, 64);
      spec.heads_q = spec.heads_kv = 4;
      Case c(spec);
      c.q.each([&](const Index& i, std::int64_t at) {
        if (every || (i[1] == 17 && i[2] == 2)) c.q.set(at, NAN);
      });
      c.q.seal();
      run_every(c, [&](const Kernel& kernel) {
        for (std::int64_t row = 0; row < 80; ++row) {
          for (std::int64_t head = 0; head < 4; ++head) {
            const bool nan = every || (row == 17 && head == 2);
            EXPECT_EQ(std::isnan(c.lse.get(c.lse.offset({0, head, row, 0}))), nan) << kernel.name << " row " << row;
            for (std::int64_t d = 0; d < 64; ++d) {
              ASSERT_EQ(std::isnan(at(c.out, 0, row, head, d)), nan) << kernel.name << " row " << row;
            }
          }
        }
      });
    }
  }
}

/// C30: every column of every head_dim, by one-hot values.
TEST(CudaCases, C30EveryColumn) {
  ONEPASS_NEEDS_GPU();
  for (const DType dtype : kTypes) {
    for (std::int64_t dim = 8; dim <= 256; dim += 8) {
      Case c(sized(Pass::forward, dtype, 4, dim, dim));
      fill(c.q, [](const Index&) { return 0; });
      fill(c.v, [&](const Index& i) { return i[1] == i[3] ? static_cast<double>(dim) : 0; });
      run_every(c, [&](const Kernel& kernel) {
        for (std::int64_t d = 0; d < dim; ++d) ASSERT_NEAR(at(c.out, 0, 3, 0, d), 1, 0.01) << kernel.name << " " << dim;
      });
    }
  }
}

TEST(CudaCases, C11C12LargeDots) {
  ONEPASS_NEEDS_GPU();
  for (const std::int64_t keys : {1, 2}) {
    for (const std::int64_t queries : {1, 5}) {
      Case c(sized(Pass::forward, DType::bf16, queries, keys, 128));
      fill(c.q, [](const Index&) { return 64; });
      fill(c.k, [](const Index&) { return -64; });
      fill(c.v, [](const Index&) { return 1; });
      run_every(c, [&](const Kernel& kernel) {
        for (std::int64_t i = 0; i < queries; ++i) {
          EXPECT_EQ(at(c.out, 0, i), 1) << kernel.name;
          EXPECT_NEAR(c.lse.get(c.lse.offset({0, 0, i, 0})), -46340.95 + std::log(static_cast<double>(keys)), 0.02);
        }
      });
    }
  }
  Case c(sized(Pass::forward, DType::f16, 3, 4096, 128));
  fill(c.q, [](const Index&) { return 0; });
  fill(c.v, [](const Index&) { return 60000; });
  run_every(c, [&](const Kernel& kernel) { EXPECT_EQ(at(c.out, 0, 1), 60000) << kernel.name; });
}

TEST(CudaCases, C13LongRowsOfOnes) {
  ONEPASS_NEEDS_GPU();
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Case c(sized(Pass::forward, dtype, 16, 170000, 128));
    fill(c.v, [](const Index&) { return 1; });
    run_every(c, [&](const Kernel& kernel) {
      for (std::int64_t i = 0; i < 16; ++i) {
        for (std::int64_t d = 0; d < 128; ++d) ASSERT_NEAR(at(c.out, 0, i, 0, d), 1, 0.004) << kernel.name;
      }
    });
  }
}

TEST(CudaCases, C14OneKeyGivesExactZeros) {
  ONEPASS_NEEDS_GPU();
  for (const DType dtype : kTypes) {
    CaseSpec spec = sized(Pass::backward, dtype, 1, 1, 16);
    Case c(spec);
    run_every(c, [&](const Kernel& kernel) {
      for (std::int64_t d = 0; d < 16; ++d) {
        EXPECT_NEAR(at(c.grad_q, 0, 0, 0, d), 0, 1e-5) << kernel.name;
        EXPECT_NEAR(at(c.grad_k, 0, 0, 0, d), 0, 1e-5) << kernel.name;
        // Rounded to 16 bits P is 1; in float32 it is exp(0), from a score and an LSE that were rounded apart.
        const double grad = at(c.grad_out, 0, 0, 0, d), off = dtype == DType::f32 ? 2 * check::ulp(dtype, grad) : 0;
        EXPECT_NEAR(at(c.grad_v, 0, 0, 0, d), grad, off) << kernel.name;
      }
    });
  }
}

TEST(CudaCases, C16OddLengthsAndDims) {
  ONEPASS_NEEDS_GPU();
  for (const DType dtype : kTypes) {
    for (const std::int64_t seq : {1, 2, 97, 113, 127, 129, 203, 257}) {
      for (const std::int64_t dim : {32, 40, 64, 128}) {
        CaseSpec spec = sized(Pass::backward, dtype, seq, seq, dim);
        spec.causal = seq % 2 == 1;
        expect_everywhere(spec);
      }
    }
  }
}

TEST(CudaCases, C31C34UnequalDimsAndSharedHeads) {
  ONEPASS_NEEDS_GPU();
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const auto& [dim, dim_v] : {std::pair{64, 128}, {128, 64}, {192, 128}, {96, 32}}) {
      CaseSpec spec = sized(pass, DType::bf16, 129, 769, dim);
      spec.head_dim_v = dim_v;
      spec.heads_q = 8;
      spec.heads_kv = 2;
      expect_everywhere(spec);
    }
    CaseSpec spec = sized(pass, DType::f16, 65, 129, 64);
    spec.batch = 2;
    spec.heads_q = spec.heads_kv = 4;
    spec.layout_k.broadcast[2] = spec.layout_v.broadcast[2] = true;
    expect_everywhere(spec);
    spec.layout_k.broadcast[2] = spec.layout_v.broadcast[2] = false;
    expect_everywhere(spec);
    spec.layout_q.order = spec.layout_k.order = spec.layout_v.order = {0, 2, 1};  // (batch, heads, seq, dim)
    expect_everywhere(spec);
  }
}

/// C36, C38: tokens outside every sequence, sequences without tokens.
TEST(CudaCases, C36C38PackedSequences) {
  ONEPASS_NEEDS_GPU();
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const DType dtype : kTypes) {
      CaseSpec spec = sized(pass, dtype, 512, 512, 64);
      spec.batch = 3;
      spec.heads_q = spec.heads_kv = 2;
      spec.cu_seqlens_q = spec.cu_seqlens_k = {0, 144, 432, 944};
      spec.total_q = spec.total_k = 946;
      expect_everywhere(spec);
      spec.causal = true;
      spec.batch = 8;
      spec.cu_seqlens_q = {0, 1, 1, 2, 130, 130, 131, 300, 301};
      spec.cu_seqlens_k = {0, 0, 5, 6, 6, 200, 201, 500, 501};
      spec.total_q = 310;
      spec.total_k = 501;
      expect_everywhere(spec);
    }
  }
}

}  // namespace
}  // namespace onepass
