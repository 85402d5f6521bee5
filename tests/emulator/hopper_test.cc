// The sm_90 kernels on the emulator, against the float64 reference: random cases, adversarial scores, hundreds of
// orders in which warps, copies and products may run.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "emulator/row_test.h"

namespace onepass {
namespace {

using check::Case;
using check::CaseSpec;
using check::Reference;
using kit::sized;

class HopperRow : public emulator::RowTest {};

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
  check::Limits limits = kit::cuda_limits(kernel);
  limits.max_seq = 300;
  limits.work = 1e6;
  return limits;
}

void expect_right(const Kernel& kernel, const CaseSpec& spec, std::uint64_t order) {
  Case c(spec);
  emulator::set_seed(order);
  EXPECT_TRUE(kit::passes(check::check_kernel(kernel, c, 1, emulator::forward_rows())));
}

/// Runs `count` of the drawn cases that the row serves.
void run_random(const Kernel& kernel, int count) {
  std::uint64_t seed = kit::first_seed();
  for (int done = 0; done < count; ++seed) {
    const CaseSpec spec = check::random_spec(seed, limits_of(kernel));
    if (!check::serves(kernel, Case(spec))) continue;
    expect_right(kernel, spec, seed);
    ++done;
  }
}

TEST_P(HopperRow, RandomCases) {
  run_random(*GetParam(), kit::scaled(12));
}

TEST_P(HopperRow, SumsCutOff) {
  const Kernel& kernel = *GetParam();
  emulator::adding = emulator::Adding::cut_off;
  run_random(kernel, kit::scaled(4));
  if (kernel.pass == Pass::forward) return;
  using check::Values;
  for (const Values values : {Values::normal, Values::wide, Values::deep, Values::rising}) {
    CaseSpec spec = sized(kernel, 130, 277);
    spec.values = values;
    expect_right(kernel, spec, kit::first_seed());
  }
}

/// dS of a row that sees one key: dP and D are summed alike, however sums are cut off.
TEST_P(HopperRow, OneKeyHasNoGradientOfScores) {
  if (GetParam()->pass == Pass::forward) return;
  emulator::adding = emulator::Adding::cut_off;
  kit::expect_no_gradient_of_scores(*GetParam(), sized(*GetParam(), 200, 1));
}

TEST_P(HopperRow, AdversarialScores) {
  const Kernel& kernel = *GetParam();
  using check::Values;
  for (const Values values :
       {Values::wide, Values::deep, Values::equal, Values::steep, Values::rising, Values::denormal, Values::tiny}) {
    for (const bool causal : {false, true}) {
      CaseSpec spec = sized(kernel, 130, 277);
      spec.values = values;
      spec.causal = causal;
      expect_right(kernel, spec, kit::first_seed() + static_cast<std::uint64_t>(values));
    }
  }
}

/// One key far above the rest in the first half of the heads: references are outgrown, rows computed again.
void expect_outgrown(const Kernel& kernel, const CaseSpec& spec, std::int64_t jump) {
  Case c(spec);
  c.q.each([&](const check::Index&, std::int64_t at) { c.q.set(at, std::abs(c.q.get(at)) + 1); });
  c.k.each([&](const check::Index& i, std::int64_t at) {
    if (i[1] == jump && i[2] <= spec.heads_kv / 2) c.k.set(at, 16);
  });
  for (check::Array* array : {&c.q, &c.k}) array->seal();
  emulator::set_seed(kit::first_seed() + static_cast<std::uint64_t>(jump));
  EXPECT_TRUE(kit::passes(check::check_kernel(kernel, c))) << "key " << jump;
}
TEST_P(HopperRow, OneKeyFarAboveTheRest) {
  const Kernel& kernel = *GetParam();
  if (kernel.pass == Pass::backward) GTEST_SKIP() << "of the forward";
  const std::int64_t block = kernel.tiles().block_k, keys = 2 * block + 3;
  for (std::int64_t jump = 0; jump < keys; jump += block / 2 - 3) {
    CaseSpec spec = sized(kernel, 130, keys);
    spec.causal = jump / block % 2 == 1;
    expect_outgrown(kernel, spec, jump);
  }
  // Lists of rows fill up, in warpgroups that leave out blocks on both sides; other tiles come after them.
  CaseSpec spec = sized(kernel, 256, 330);
  if (kernel.dtypes != kBf16) return;  // references follow
  spec.heads_q = spec.heads_kv = 18;
  spec.causal = true;
  spec.window_left = 200;
  expect_outgrown(kernel, spec, 200);
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
      expect_right(kernel, *spec, kit::first_seed());
      if (kernel.pass == Pass::forward || spec == &wide) continue;
      CaseSpec ordered = *spec;
      ordered.deterministic = 1;
      expect_right(kernel, ordered, kit::first_seed());
    }
  }
}

/// In whatever order blocks, warps, copies and products run, every bit of the result is the same, but for dQ of calls
/// that are not deterministic, whose parts are added as they come.
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
  std::vector<CaseSpec> specs = {plain, packed};
  if (kernel.pass == Pass::backward) {
    CaseSpec whole = plain;
    whole.causal = false;
    for (CaseSpec spec : {plain, whole, packed}) {
      spec.deterministic = 1;
      specs.push_back(spec);
    }
  }
  for (const CaseSpec& spec : specs) {
    Case c(spec);
    const Reference reference(c);
    std::uint64_t first = 0;
    for (int n = 0; n < kit::scaled(6); ++n) {
      emulator::set_seed(kit::first_seed() + static_cast<std::uint64_t>(n));
      EXPECT_TRUE(kit::passes(check::check_kernel(kernel, c, reference))) << "order " << n;
      std::uint64_t bits = 0;
      for (const check::Array* array : {&c.out, &c.lse, &c.grad_k, &c.grad_v, &c.grad_q}) {
        if (*array && (array != &c.grad_q || spec.deterministic == 1))
          bits = bits * 0x9E3779B97F4A7C15u + array->bits();
      }
      if (n == 0) first = bits;
      EXPECT_EQ(bits, first) << "order " << n;
      if (HasFailure()) return;
    }
  }
}

/// Memory of a tensor whose items lie 2^31 elements and a few apart; only what is used takes any.
class Sparse {
 public:
  static constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 64;

  explicit Sparse(const check::Array& array) : small_(array.tensor(false)), item_(2 * array.count() / array.size()[0]) {
    memory_ = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    for (int b = 0; b < 2; ++b) std::memcpy(large().row(b, 0, 0), small_.row(b, 0, 0), item_);
  }
  ~Sparse() { munmap(memory_, kBytes); }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  Tensor large() const { return {memory_, small_.dtype, kStride, small_.stride_seq, small_.stride_head}; }
  void bring_back() const {
    for (int b = 0; b < 2; ++b) std::memcpy(small_.row(b, 0, 0), large().row(b, 0, 0), item_);
  }

 private:
  static constexpr std::size_t kBytes = 2 * (2 * kStride);
  Tensor small_;
  std::size_t item_;
  void* memory_;
};

TEST_P(HopperRow, ItemsPastTwoToThe31Elements) {
  const Kernel& kernel = *GetParam();
  CaseSpec spec = sized(kernel, 70, 140);
  spec.batch = 2;
  spec.heads_q = spec.heads_kv = 2;
  spec.values = kernel.pass == Pass::forward ? check::Values::steep : check::Values::normal;  // some rows repaired
  Case c(spec);
  const Reference reference(c);
  std::vector<float> workspace(kernel.workspace(c.problem(), 1) / sizeof(float) + 16, NAN);
  const auto first = (reinterpret_cast<std::uintptr_t>(workspace.data()) + 63) / 64 * 64;
  const Launch launch = {.workspace = reinterpret_cast<void*>(first), .workspace_size = 4 * (workspace.size() - 16)};
  const Sparse q(c.q), k(c.k), v(c.v);
  if (kernel.pass == Pass::forward) {
    const Sparse out(c.out);
    EXPECT_TRUE(kit::passes(check::check_forward(c, reference, [&](const Problem& p, const ForwardOperands& x) {
      const Status status = kernel.forward(p, {q.large(), k.large(), v.large(), out.large(), x.lse}, launch);
      out.bring_back();
      return status;
    })));
    return;
  }
  const Sparse out(c.saved_out), grad_out(c.grad_out), grad_q(c.grad_q), grad_k(c.grad_k), grad_v(c.grad_v);
  EXPECT_TRUE(kit::passes(check::check_backward(c, reference, [&](const Problem& p, BackwardOperands x) {
    x.q = q.large(), x.k = k.large(), x.v = v.large(), x.out = out.large(), x.grad_out = grad_out.large();
    x.grad_q = grad_q.large(), x.grad_k = grad_k.large(), x.grad_v = grad_v.large();
    const Status status = kernel.backward(p, x, launch);
    for (const Sparse* grad : {&grad_q, &grad_k, &grad_v}) grad->bring_back();
    return status;
  })));
}

}  // namespace
}  // namespace onepass
