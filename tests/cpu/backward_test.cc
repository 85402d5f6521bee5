// The float32-arithmetic backward on every instruction set of this machine, against the float64 reference.
#include "cpu/backward_kit.h"

namespace onepass {
namespace {

using namespace backward_kit;

TEST(Backward, RandomCases) {
  check::Sweep sweep;
  sweep.limits.pass = Pass::backward;
  sweep.first_seed = kit::first_seed();
  sweep.cases = kit::scaled(300);
  sweep.threads = {1, 2, 3, 8};
  kit::expect_sweep(backward_kernels(), sweep);
}

TEST(Backward, RandomPlainCases) {
  check::Sweep sweep;
  sweep.limits.pass = Pass::backward;
  sweep.limits.plain = true;
  sweep.first_seed = kit::first_seed() + 1000000;
  sweep.cases = kit::scaled(200);
  sweep.threads = {1, 2, 8};
  kit::expect_sweep(backward_kernels(), sweep);
}

/// Scores all equal and near -46340, where lse has steps of 1/256; and other seeds and dimensions.
TEST(Backward, SeedsOnceBeyondTheBound) {
  for (const unsigned dtypes : {kF32, kF32 | kF16 | kBf16}) {
    check::Sweep sweep;
    sweep.limits.pass = Pass::backward;
    sweep.limits.dtypes = dtypes;
    sweep.first_seed = 70155;
    sweep.cases = 10;
    kit::expect_sweep(backward_kernels(), sweep);
  }
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    CaseSpec spec = spec_of(95, 95, 1, 8 + 7 * static_cast<std::int64_t>(seed));
    spec.seed = seed;
    spec.dtype = static_cast<DType>(seed % 2);
    spec.values = check::Values::equal;
    spec.causal = seed % 3 == 0;
    expect_right(spec);
  }
}

TEST(Backward, EveryLengthAgainstTheTiles) {
  for (std::int64_t seq = 1; seq <= 300; ++seq) {
    CaseSpec spec = spec_of(seq, seq % 2 == 0 ? seq : 301 - seq, 1, 24);
    spec.seed = static_cast<std::uint64_t>(seq);
    spec.dtype = static_cast<DType>(seq % 3);
    spec.causal = seq % 4 < 2;
    if (seq % 5 == 0) spec.window_left = seq / 3;
    expect_right(spec, {1, 2});
  }
}

TEST(Backward, EveryHeadDim) {
  for (std::int64_t dim = 1; dim <= 264; ++dim) {
    CaseSpec spec = spec_of(7, 19, 1, dim);
    spec.dtype = static_cast<DType>(dim % 3);
    spec.head_dim_v = dim % 5 == 0 ? 265 - dim : dim;
    expect_right(spec);
  }
  for (const std::int64_t dim : {320, 512, 1023, 1024}) {
    CaseSpec spec = spec_of(70, 100, 1, dim);
    spec.head_dim_v = dim == 512 ? 576 : dim;
    expect_right(spec, {1, 2});
  }
  for (const std::int64_t dim : {0, 3}) {
    CaseSpec spec = spec_of(70, 100, 2, dim);
    spec.scale = 0.5;
    spec.head_dim_v = 3 - dim;
    spec.grad_lse = true;
    expect_right(spec);
  }
}

TEST(Backward, SeveralKeyBlocks) {
  // With one thread a block is of up to 384 keys, with more threads smaller.
  for (const bool causal : {false, true}) {
    CaseSpec spec = spec_of(500, 1000, 2, 40);
    spec.heads_q = 4;
    spec.causal = causal;
    expect_right(spec, {1, 2, 3, 8});
    spec.dtype = DType::f16;
    spec.window_left = 450;
    spec.head_dim_v = 33;
    expect_right(spec, {1, 3});
  }
}

TEST(Backward, WindowsAroundTheTiles) {
  for (const std::int64_t window : {0, 1, 63, 64, 95, 96, 128, 255}) {
    for (const std::int64_t seq : {64, 65, 129, 200}) {
      CaseSpec spec = spec_of(seq, seq, 1, 16);
      spec.causal = window % 2 == 0;
      spec.window_left = window;
      spec.window_right = window % 3 == 0 ? -1 : window / 2;
      expect_right(spec, {1, 2});
    }
  }
}

TEST(Backward, OneKeyHasNoGradientOfScores) {
  for (const std::int64_t dim : {1, 5, 40, 96, 103, 256}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      CaseSpec spec = spec_of(70, 1, 2, dim);
      spec.dtype = dtype;
      for (const Kernel* kernel : backward_kernels()) kit::expect_no_gradient_of_scores(*kernel, spec);
    }
  }
}

TEST(Backward, MoreQueriesThanKeys) {
  for (const std::int64_t excess : {1, 63, 64, 65, 127, 128, 129}) {
    CaseSpec spec = spec_of(130 + excess, 130, 2, 64);
    spec.causal = true;
    expect_right(spec);
    spec.window_left = 16;
    expect_right(spec);
  }
}

}  // namespace
}  // namespace onepass
