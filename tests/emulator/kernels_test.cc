// The sm_80 kernels on the emulator against the float64 reference: in random orders, with copies as late as they may
// be, with sums rounded and as tensor cores cut them off.
#include <algorithm>
#include <cmath>
#include <utility>

#include "cuda/host/device.h"
#include "emulator/row_test.h"

namespace onepass {
namespace {

using check::Case;
using check::CaseSpec;
using check::Reference;

std::vector<const Kernel*> all_rows() {
  std::vector<const Kernel*> list;
  for (const Kernel& kernel : emulator::rows()) {
    if (std::string_view(kernel.arch) != "sm90") list.push_back(&kernel);  // hopper_test.cc
  }
  return list;
}

class EmulatedKernel : public emulator::RowTest {
 protected:
  static CaseSpec sized(std::int64_t seq_q, std::int64_t seq_k) { return kit::sized(*GetParam(), seq_q, seq_k); }
  static void expect_right(const CaseSpec& spec) {
    Case c(spec);
    EXPECT_TRUE(kit::passes(check::check_kernel(*GetParam(), c, 1, emulator::forward_rows())));
  }
  static void expect_random_cases(int cases, std::uint64_t first) {
    check::Sweep sweep;
    sweep.limits = kit::cuda_limits(*GetParam());
    sweep.limits.max_seq = 200;
    sweep.limits.work = 4e5;
    sweep.first_seed = kit::first_seed() + first;
    sweep.cases = kit::scaled(cases);
    sweep.forwards = emulator::forward_rows();
    kit::expect_sweep({GetParam()}, sweep);
  }
};
INSTANTIATE_TEST_SUITE_P(Rows, EmulatedKernel, testing::ValuesIn(all_rows()),
                         [](const auto& row) { return std::string(row.param->name); });

TEST_P(EmulatedKernel, RandomCases) {
  expect_random_cases(20, 0);
}

/// With the shared memory of 8.0, for rows that take larger tiles where there is more.
TEST_P(EmulatedKernel, RandomCasesInLessSharedMemory) {
  const int from = GetParam()->pass == Pass::forward ? 128 : 256;
  if (GetParam()->max_head_dim < from) GTEST_SKIP() << "one form everywhere";
  struct Former {
    std::int64_t bytes = emulator::shared_bytes;
    ~Former() { emulator::shared_bytes = bytes; }
  } former;
  emulator::shared_bytes = 164 * 1024;
  expect_random_cases(16, 20'000);
}

TEST_P(EmulatedKernel, RandomCasesWithSumsCutOff) {
  emulator::adding = emulator::Adding::cut_off;
  expect_random_cases(16, 10'000);
}

TEST_P(EmulatedKernel, LengthsAroundTheTiles) {
  const Tiles tiles = GetParam()->tiles();
  for (const std::int64_t tile : {tiles.block_q, tiles.block_k}) {
    for (const std::int64_t n : {tile - 1, tile, tile + 1, 2 * tile, 2 * tile + 1}) {
      CaseSpec spec = sized(n, 2 * tile + 3 - n % 3);
      if (n % 2 == 0) std::swap(spec.seq_q, spec.seq_k);
      spec.causal = n % 4 < 2;
      spec.head_dim = spec.head_dim_v = min_of<std::int64_t>(spec.head_dim, 64);
      expect_right(spec);
    }
  }
}

TEST_P(EmulatedKernel, AdversarialScores) {
  using check::Values;
  for (const Values values :
       {Values::wide, Values::deep, Values::equal, Values::steep, Values::rising, Values::denormal, Values::tiny}) {
    CaseSpec spec = sized(70, 150);
    if (values == Values::tiny && spec.dtype == DType::f32) continue;  // docs/cuda.md
    spec.values = values;
    spec.causal = values != Values::deep;
    expect_right(spec);
  }
}

/// One key so far above the first block that references do not fit, and one above that at the far edge of a window,
/// where references follow the maxima again: all sums are small then, whatever has overflowed before.
TEST_P(EmulatedKernel, OutgrownReferencesGrowLater) {
  const Kernel& kernel = *GetParam();
  if (kernel.pass == Pass::backward) GTEST_SKIP() << "of the forward";
  CaseSpec spec = sized(40, 277);
  spec.causal = true, spec.window_left = 200;
  Case c(spec);
  c.q.each([&](const check::Index&, std::int64_t at) { c.q.set(at, std::abs(c.q.get(at)) + 1); });
  const double by = 8 / std::sqrt(static_cast<double>(spec.head_dim));
  c.k.each([&](const check::Index& i, std::int64_t at) {
    if (i[1] == 150) c.k.set(at, 2 * by);
    if (i[1] == 78) c.k.set(at, 5 * by);  // row 39 sees keys from 76 on
  });
  for (check::Array* array : {&c.q, &c.k}) array->seal();
  EXPECT_TRUE(kit::passes(check::check_kernel(kernel, c)));
}

/// Calls without rows or without keys still write what there is to write; nobody clears counters of turns then.
TEST_P(EmulatedKernel, NoRowsOrNoKeys) {
  for (const auto& [seq_q, seq_k] : {std::pair{0, 65}, {65, 0}}) {
    for (const bool packed : {false, true}) {
      CaseSpec spec = sized(seq_q, seq_k);
      if (packed) {
        spec.cu_seqlens_q = {0, seq_q}, spec.cu_seqlens_k = {0, seq_k};
        spec.total_q = seq_q + 2, spec.total_k = seq_k + 2;
      }
      spec.deterministic = spec.pass == Pass::backward ? 1 : -1;
      expect_right(spec);
    }
  }
}

/// Blocks that take turns: the same bits whatever the order of blocks and warps.
TEST_P(EmulatedKernel, BitsStayTheSame) {
  CaseSpec spec = sized(100, 280);
  spec.heads_q = 2;
  spec.causal = true;
  spec.head_dim = spec.head_dim_v = min_of<std::int64_t>(spec.head_dim, 64);
  spec.deterministic = spec.pass == Pass::backward ? 1 : -1;
  Case c(spec);
  const Reference reference(c);
  std::uint64_t first = 0;
  for (int seed = 0; seed < kit::scaled(3); ++seed) {
    emulator::set_seed(kit::first_seed() + static_cast<std::uint64_t>(seed));
    const check::Report report = check::check_kernel(*GetParam(), c, reference);
    EXPECT_TRUE(kit::passes(report));
    if (seed == 0) first = report.bits;
    EXPECT_EQ(report.bits, first) << "seed " << seed;
  }
}

/// Tensor cores cut off their running sum, a score near -10,000 is off by a few units in its last place, and an exact
/// LSE is not: on an H200 dV of this case had 2.6 times the bound, as here. With LSE of the device's own forward the
/// two errors cancel.
TEST(EmulatedScores, NearMinusTenThousandInFloat16) {
  check::Limits limits;
  limits.pass = Pass::backward;
  limits.dtypes = kF16;
  limits.max_head_dim = 128;
  limits.cuda = true;
  Case c(check::random_spec(4, limits));
  ASSERT_EQ(c.spec().values, check::Values::deep);
  const Reference reference(c);
  const auto is_row = [](const Kernel& row) { return std::string_view(row.name) == "bwd_sm80_d128_f16"; };
  const Kernel& kernel = *std::find_if(emulator::rows().begin(), emulator::rows().end(), is_row);
  emulator::set_seed(0);
  EXPECT_TRUE(kit::passes(check::check_kernel(kernel, c, reference)));
  emulator::adding = emulator::Adding::cut_off;
  const check::Report elsewhere = check::check_kernel(kernel, c, reference);
  const check::Report own = check::check_kernel(kernel, c, reference, 1, emulator::forward_rows());
  emulator::adding = emulator::Adding::rounded;
  EXPECT_NEAR(elsewhere.worst_bound_ratio(), 2.6, 0.1) << elsewhere.text(true);
  EXPECT_TRUE(kit::passes(own));
}

/// dS of a row that sees one key: dP and D are summed alike, however sums are cut off. Not in float32, where D is a
/// plain sum, and dP as near to it as that.
TEST_P(EmulatedKernel, OneKeyHasNoGradientOfScores) {
  if (GetParam()->pass == Pass::forward || GetParam()->dtypes == kF32) return;
  emulator::adding = emulator::Adding::cut_off;
  kit::expect_no_gradient_of_scores(*GetParam(), sized(40, 1));
}

}  // namespace
}  // namespace onepass
