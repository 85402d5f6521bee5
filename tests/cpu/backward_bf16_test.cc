// The bfloat16 backwards, vdpbf16ps and AMX tiles: sizes around their tiles, masks of every kind, special values. The
// AMX kernel runs on emulated tiles, so that it is tested on machines without AMX too.
#include <cstring>

#include "check/random.h"
#include "cpu/every_kernel.h"

namespace onepass {
namespace {

using check::CaseSpec;
using check::Values;

class BackwardBf16 : public every_kernel::Bf16Kernel {};

CaseSpec base(std::int64_t seq_q, std::int64_t seq_k, std::int64_t dim) {
  return kit::sized(Pass::backward, DType::bf16, seq_q, seq_k, dim);
}

TEST_P(BackwardBf16, RandomCases) {
  check::Sweep sweep;
  sweep.limits.pass = Pass::backward;
  sweep.limits.dtypes = kBf16;
  sweep.limits.max_seq = 600;
  sweep.cases = kit::scaled(400);
  sweep.first_seed = kit::first_seed();
  sweep.threads = {1, 2, 3, 8};
  kit::expect_sweep({kernel_}, sweep);
}

TEST_P(BackwardBf16, EveryHeadDim) {
  for (std::int64_t dim = 0; dim <= 264; ++dim) {
    CaseSpec spec = base(17, 35, dim);
    spec.seed = static_cast<std::uint64_t>(dim);
    spec.causal = dim % 2 == 1;
    expect(spec);
    spec.head_dim_v = (dim * 7 + 3) % 265;
    spec.layout_q.start = spec.layout_k.start = spec.layout_v.start = spec.layout_out.start = 1;
    expect(spec);
  }
}

TEST_P(BackwardBf16, LargeHeadDims) {
  for (const std::int64_t dim : {320, 512, 1023, 1024}) {
    CaseSpec spec = base(130, 270, dim);
    spec.seed = static_cast<std::uint64_t>(dim);
    if (dim == 512) spec.head_dim_v = 1024;
    spec.causal = dim != 320;
    expect(spec, {1, 3});
  }
}

// Query blocks of 128 rows in halves of 64, key blocks of up to 512 keys in pieces of 32.
TEST_P(BackwardBf16, EverySeqModTile) {
  check::Random random(7);
  for (std::int64_t n = 0; n <= 264; ++n) {
    CaseSpec spec = base(n, random.between(0, 700), 32);
    spec.seed = static_cast<std::uint64_t>(n);
    spec.causal = random.chance(0.5);
    if (random.chance(0.3)) spec.window_left = random.between(0, 100);
    if (random.chance(0.3)) spec.window_right = random.between(0, 100);
    spec.heads_q = 2;
    spec.heads_kv = random.chance(0.5) ? 1 : 2;
    expect(spec, {1, 2});
    std::swap(spec.seq_q, spec.seq_k);
    expect(spec, {1, 2});
  }
}

TEST_P(BackwardBf16, ManyKeyBlocks) {
  for (const bool causal : {false, true}) {
    for (const std::int64_t window : {-1, 0, 70, 300}) {
      CaseSpec spec = base(700, 900, 64);
      spec.causal = causal;
      spec.window_left = window;
      spec.heads_q = 3;
      expect(spec, {1, 2, 3, 8, 64});
    }
  }
}

TEST_P(BackwardBf16, HardValues) {
  for (const Values values : {Values::steep, Values::rising, Values::deep, Values::equal, Values::wide,
                              Values::denormal, Values::tiny, Values::special}) {
    for (std::uint64_t seed = 0; seed < 6; ++seed) {
      CaseSpec spec = base(150, 330, 40);
      spec.seed = seed;
      spec.values = values;
      spec.causal = seed % 2 == 1;
      if (seed >= 4) spec.window_left = 50;
      expect(spec, {1, 2});
    }
  }
}

/// Runs a case as it stands and returns the gradients of q, k and v as float32, one after the other.
std::vector<float> run(const Kernel& kernel, check::Case& c) {
  c.reset();
  std::vector<char> memory(kernel.workspace(c.problem(), 2) + 64);
  Launch launch;
  const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(memory.data());
  launch.workspace = memory.data() + (64 - start % 64) % 64;
  launch.workspace_size = memory.size() - 64;
  launch.threads = 2;
  EXPECT_TRUE(kernel.backward(c.problem(), c.backward_operands(), launch).ok());
  std::vector<float> result;
  for (check::Array* array : {&c.grad_q, &c.grad_k, &c.grad_v}) {
    array->each([&](const check::Index&, std::int64_t at) { result.push_back(static_cast<float>(array->get(at))); });
  }
  return result;
}

// Under a causal mask NaN in key j, or in row i of Q or dO, stays away from the rows before j and the keys after i.
TEST_P(BackwardBf16, NanReachesOnlyWhatSeesIt) {
  constexpr std::int64_t kSeq = 300, kDim = 40;
  for (const std::int64_t place : {0, 1, 63, 64, 127, 128, 200, 256, 299}) {
    for (int which = 0; which < 4; ++which) {
      CaseSpec spec = base(kSeq, kSeq, kDim);
      spec.causal = true;
      if (!kit::chosen(std::to_string(4 * place + which), 3e6)) continue;
      check::Case c(spec);
      check::Array* operands[] = {&c.q, &c.k, &c.v, &c.grad_out};
      operands[which]->set(operands[which]->offset({0, place, 0, 5}), NAN);
      const std::vector<float> got = run(*kernel_, c);
      for (std::int64_t row = 0; row < kSeq; ++row) {
        for (std::int64_t part = 0; part < 3; ++part) {
          const bool of_row = part == 0, poisoned_row = which == 0 || which == 3;
          const bool hidden = poisoned_row ? (of_row ? row != place : row > place) : of_row && row < place;
          if (!hidden) continue;
          for (std::int64_t x = 0; x < kDim; ++x) {
            ASSERT_TRUE(std::isfinite(got[static_cast<std::size_t>((part * kSeq + row) * kDim + x)]))
                << "operand " << which << " at " << place << ", gradient " << part << " at " << row;
          }
        }
      }
    }
  }
}

// Gradients far below what products of pairs can hold.
TEST_P(BackwardBf16, TinyGradients) {
  for (const bool v_too : {false, true}) {
    CaseSpec spec = base(100, 100, 32);
    spec.causal = true;
    check::Case c(spec);
    c.grad_out.each([&](const check::Index&, std::int64_t at) { c.grad_out.set(at, c.grad_out.get(at) * 0x1p-122); });
    if (v_too) c.v.each([&](const check::Index&, std::int64_t at) { c.v.set(at, c.v.get(at) * 0x1p-70); });
    c.grad_out.seal();
    c.v.seal();
    const check::Reference reference(c);
    EXPECT_TRUE(kit::passes(check::check_kernel(*kernel_, c, reference, 2)));
  }
}

TEST_P(BackwardBf16, RepeatsAreBitEqual) {
  CaseSpec spec = base(500, 1000, 64);
  spec.batch = 2;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.causal = true;
  spec.softcap = 20;
  if (!kit::chosen(spec)) return;
  check::Case c(spec);
  const std::vector<float> first = run(*kernel_, c);
  for (int n = 0; n < kit::scaled(20); ++n) {
    const std::vector<float> again = run(*kernel_, c);
    ASSERT_EQ(std::memcmp(first.data(), again.data(), first.size() * sizeof(float)), 0) << "run " << n;
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, BackwardBf16,
                         testing::Values("bwd_cpu_avx512bf16", "bwd_cpu_amx", "bwd_cpu_amx_emulated"),
                         [](const auto& kernel) { return std::string(kernel.param); });

}  // namespace
}  // namespace onepass
