// The sm_90 kernels on the emulator, against the float64 reference: random cases, adversarial scores, hundreds of
// orders in which warps, copies and products may run.
#include "emulator/machine/machine.h"
#include "emulator/machine/tensor_core.h"
#include "emulator/rows.h"
#include "kit/kit.h"

namespace onepass {
namespace {

using check::Case;
using check::CaseSpec;
using check::Reference;

class HopperRow : public testing::TestWithParam<const Kernel*> {
 protected:
  void SetUp() override {
    if (!__builtin_cpu_supports("avx2")) GTEST_SKIP() << "compiled for AVX2, which this machine has not";
  }
  void TearDown() override { emulator::adding = emulator::Adding::rounded; }
};

std::vector<const Kernel*> hopper_rows() {
  std::vector<const Kernel*> list;
  for (const Kernel& kernel : emulator::rows()) {
    if (std::string_view(kernel.arch) == "sm90") list.push_back(&kernel);
  }
  return list;
}
INSTANTIATE_TEST_SUITE_P(Rows, HopperRow, testing::ValuesIn(hopper_rows()),
                         [](const auto& row) { return std::string(row.param->name); });

check::Limits limits_of(const Kernel& kernel) {
  check::Limits limits;
  limits.pass = kernel.pass;
  limits.dtypes = kernel.dtypes;
  limits.max_head_dim = kernel.max_head_dim;
  limits.max_seq = 300;
  limits.work = 1e6;
  limits.cuda = true;
  return limits;
}

CaseSpec sized(const Kernel& kernel, std::int64_t seq_q, std::int64_t seq_k) {
  CaseSpec spec;
  spec.pass = kernel.pass;
  for (int n = 0; n < kDTypeCount; ++n) {
    if ((kernel.dtypes >> n & 1u) != 0) spec.dtype = static_cast<DType>(n);
  }
  spec.seq_q = seq_q;
  spec.seq_k = seq_k;
  spec.head_dim = kernel.max_head_dim;
  spec.head_dim_v = kernel.max_head_dim_v;
  return spec;
}

/// The case with head_dim and head_dim_v of this row, as the draw has them modulo the bucket's last panel.
void fit(CaseSpec& spec, const Kernel& kernel) {
  const auto last_panel = [](std::int64_t dim, std::int64_t most) {
    const std::int64_t first = (most - 1) / 64 * 64;
    return first + 8 + round_up(dim, 8) % (most - first);
  };
  spec.head_dim = last_panel(spec.head_dim, kernel.max_head_dim);
  spec.head_dim_v = last_panel(spec.head_dim_v, kernel.max_head_dim_v);
  for (check::Layout* layout : {&spec.layout_q, &spec.layout_k, &spec.layout_v, &spec.layout_out}) {
    for (int& gap : layout->gap) gap = gap / 8 * 8;
    layout->start = layout->start / 8 * 8;
  }
  spec.out_f32 = false;
  spec.deterministic = -1;
}

/// Runs `count` of the drawn cases that the row serves.
void run_random(const Kernel& kernel, int count) {
  std::uint64_t seed = kit::first_seed();
  for (int done = 0; done < count; ++seed) {
    CaseSpec spec = check::random_spec(seed, limits_of(kernel));
    fit(spec, kernel);
    Case c(spec);
    if (!check::serves(kernel, c)) continue;
    emulator::set_seed(seed);
    EXPECT_TRUE(kit::passes(check::check_kernel(kernel, c)));
    ++done;
  }
}

TEST_P(HopperRow, RandomCases) {
  run_random(*GetParam(), kit::scaled(12));
}

TEST_P(HopperRow, AdversarialScores) {
  const Kernel& kernel = *GetParam();
  using check::Values;
  for (const Values values :
       {Values::wide, Values::deep, Values::equal, Values::steep, Values::rising, Values::denormal}) {
    for (const bool causal : {false, true}) {
      CaseSpec spec = sized(kernel, 130, 277);
      spec.values = values;
      spec.causal = causal;
      Case c(spec);
      emulator::set_seed(kit::first_seed() + static_cast<std::uint64_t>(values));
      EXPECT_TRUE(kit::passes(check::check_kernel(kernel, c)));
    }
  }
}

/// One key far above the rest, in every place of a block: references are outgrown, rows computed again.
TEST_P(HopperRow, OneKeyFarAboveTheRest) {
  const Kernel& kernel = *GetParam();
  if (kernel.pass == Pass::backward) return;
  const std::int64_t keys = 3 * kernel.tiles().block_k + 3, step = kernel.tiles().block_k / 3;
  for (std::int64_t jump = 0; jump < keys; jump += step) {
    CaseSpec spec = sized(kernel, 130, keys);
    spec.heads_q = spec.heads_kv = jump == 0 ? 16 : 1;  // lists of rows fill up
    Case c(spec);
    c.q.each([&](const check::Index&, std::int64_t at) { c.q.set(at, std::abs(c.q.get(at)) + 1); });
    c.k.each([&](const check::Index& i, std::int64_t at) {
      if (i[1] == jump) c.k.set(at, 16);
    });
    for (check::Array* array : {&c.q, &c.k}) array->seal();
    emulator::set_seed(kit::first_seed() + static_cast<std::uint64_t>(jump));
    EXPECT_TRUE(kit::passes(check::check_kernel(kernel, c))) << "key " << jump;
  }
}

/// Rows of thousands of keys, for which head_dim 64 has tiles of its own, and a block's tiles by the dozen.
TEST_P(HopperRow, LongRowsAndManyTiles) {
  const Kernel& kernel = *GetParam();
  CaseSpec wide = sized(kernel, 200, 2100), many = sized(kernel, 150, 150);
  many.heads_q = 24;
  many.heads_kv = 12;
  for (CaseSpec* spec : {&wide, &many}) {
    for (const bool causal : {false, true}) {
      spec->causal = causal;
      Case c(*spec);
      emulator::set_seed(kit::first_seed());
      EXPECT_TRUE(kit::passes(check::check_kernel(kernel, c)));
    }
  }
}

/// In whatever order warps, copies and products run, every bit of the result is the same, but for dQ, whose parts are
/// added as they come.
TEST_P(HopperRow, EveryOrderGivesTheSameBits) {
  const Kernel& kernel = *GetParam();
  CaseSpec plain = sized(kernel, 190, 300), packed = sized(kernel, 200, 180);
  plain.heads_q = 4;
  plain.heads_kv = 2;
  plain.causal = true;
  packed.cu_seqlens_q = {0, 70, 70, 270, 290};
  packed.cu_seqlens_k = {0, 130, 140, 320, 325};
  packed.batch = 4;
  packed.total_q = 300;
  packed.total_k = 330;
  packed.window_left = 90;
  for (const CaseSpec& spec : {plain, packed}) {
    Case c(spec);
    const Reference reference(c);
    std::uint64_t first = 0;
    for (int n = 0; n < kit::scaled(6); ++n) {
      emulator::set_seed(kit::first_seed() + static_cast<std::uint64_t>(n));
      EXPECT_TRUE(kit::passes(check::check_kernel(kernel, c, reference))) << "order " << n;
      std::uint64_t bits = 0;
      for (const check::Array* array : {&c.out, &c.lse, &c.grad_k, &c.grad_v}) {
        if (*array) bits = bits * 0x9E3779B97F4A7C15u + array->bits();
      }
      if (n == 0) first = bits;
      EXPECT_EQ(bits, first) << "order " << n;
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace onepass
