// The bfloat16 forwards, vdpbf16ps and AMX tiles: sizes around their tiles, raised references, special values. The AMX
// kernel runs on emulated tiles, so that it is tested on machines without AMX too.
#include <cstring>

#include "check/random.h"
#include "cpu/every_kernel.h"

namespace onepass {
namespace {

using check::CaseSpec;
using check::Values;

class ForwardBf16 : public every_kernel::Bf16Kernel {};

CaseSpec base() {
  CaseSpec spec;
  spec.dtype = DType::bf16;
  return spec;
}

TEST_P(ForwardBf16, RandomCases) {
  check::Sweep sweep;
  sweep.limits.dtypes = kBf16;
  sweep.limits.max_seq = 600;
  sweep.cases = kit::scaled(400);
  sweep.first_seed = kit::first_seed();
  sweep.threads = {1, 2, 3, 8};
  kit::expect_sweep({kernel_}, sweep);
}

TEST_P(ForwardBf16, LargeHeadDims) {
  for (const std::int64_t dim : {320, 512, 1023, 1024}) {
    CaseSpec spec = base();
    spec.seed = static_cast<std::uint64_t>(dim);
    spec.head_dim = dim;
    spec.head_dim_v = dim == 512 ? 1024 : dim;
    spec.seq_q = 130;
    spec.seq_k = 270;
    spec.causal = dim != 320;
    expect(spec);
  }
}

TEST_P(ForwardBf16, EveryHeadDim) {
  for (std::int64_t dim = 0; dim <= 264; ++dim) {
    CaseSpec spec = base();
    spec.seed = static_cast<std::uint64_t>(dim);
    spec.head_dim = dim;
    spec.head_dim_v = dim;
    spec.seq_q = 17;
    spec.seq_k = 35;
    spec.causal = dim % 2 == 1;
    expect(spec);
    spec.head_dim_v = (dim * 7 + 3) % 265;
    spec.layout_q.start = spec.layout_k.start = spec.layout_v.start = spec.layout_out.start = 1;
    expect(spec);
  }
}

TEST_P(ForwardBf16, EverySeqModTile) {
  check::Random random(7);
  for (std::int64_t n = 0; n <= 264; ++n) {
    CaseSpec spec = base();
    spec.seed = static_cast<std::uint64_t>(n);
    spec.head_dim = spec.head_dim_v = 32;
    spec.seq_q = n;
    spec.seq_k = random.between(0, 520);
    spec.causal = random.chance(0.5);
    if (random.chance(0.3)) spec.window_left = random.between(0, 100);
    if (random.chance(0.3)) spec.window_right = random.between(0, 100);
    expect(spec);
    std::swap(spec.seq_q, spec.seq_k);
    expect(spec);
  }
}

// References that turn out too low: once by far, again and again, in some rows, in all.
TEST_P(ForwardBf16, RaisedReferences) {
  for (const Values values : {Values::steep, Values::rising, Values::deep, Values::equal, Values::wide}) {
    for (const bool causal : {false, true}) {
      CaseSpec spec = base();
      spec.values = values;
      spec.causal = causal;
      spec.head_dim = spec.head_dim_v = 64;
      spec.seq_q = 200;
      spec.seq_k = 1500;
      expect(spec);
      spec.window_left = 300;
      expect(spec);
      spec.softcap = 1e5;
      expect(spec);
    }
  }
}

TEST_P(ForwardBf16, AnyScale) {
  for (const double scale : {0.0, -0.0, -0.25, -30.0, 1e-30, -1e-30, 1e30, 1e3, 1e6, 1e9, 1e12, 1e20}) {
    CaseSpec spec = base();
    spec.scale = scale;
    spec.head_dim = spec.head_dim_v = 48;
    spec.seq_q = 90;
    spec.seq_k = 500;
    for (const bool causal : {false, true}) {
      spec.causal = causal;
      expect(spec);
    }
  }
}

TEST_P(ForwardBf16, SameBitsForAnyThreadCount) {
  for (const bool causal : {false, true}) {
    CaseSpec spec = base();
    spec.head_dim = spec.head_dim_v = 64;
    spec.seq_q = spec.seq_k = 700;
    spec.heads_q = 3;
    spec.values = causal ? Values::steep : Values::normal;
    spec.causal = causal;
    if (!kit::chosen(spec)) continue;
    check::Case c(spec);
    const check::Reference reference(c);
    const std::uint64_t bits = check::check_kernel(*kernel_, c, reference, 1).bits;
    for (const int threads : {2, 3, 8, 64}) {
      const check::Report report = check::check_kernel(*kernel_, c, reference, threads);
      EXPECT_TRUE(kit::passes(report));
      EXPECT_EQ(report.bits, bits) << threads << " threads";
    }
  }
}

/// Runs a case as it stands and returns the results as float32.
std::vector<float> run(const Kernel& kernel, check::Case& c) {
  c.reset();
  std::vector<char> memory(kernel.workspace(c.problem(), 2) + 64);
  Launch launch;
  const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(memory.data());
  launch.workspace = memory.data() + (64 - start % 64) % 64;
  launch.workspace_size = memory.size() - 64;
  launch.threads = 2;
  EXPECT_TRUE(kernel.forward(c.problem(), c.forward_operands(), launch).ok());
  std::vector<float> result;
  for (check::Array* array : {&c.out, &c.lse}) {
    array->each([&](const check::Index&, std::int64_t at) { result.push_back(static_cast<float>(array->get(at))); });
  }
  return result;
}

// Under a causal mask row i sees the keys up to i. Rows before a poisoned key must be the same bits as with zeros
// there.
TEST_P(ForwardBf16, SpecialValuesReachOnlyRowsThatSeeThem) {
  constexpr std::int64_t kSeq = 300, kDim = 40;
  for (const double poison : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    for (const std::int64_t key : {0, 1, 47, 48, 100, 191, 192, 255, 256, 299}) {
      for (const bool in_v : {false, true}) {
        CaseSpec spec = base();
        spec.seed = static_cast<std::uint64_t>(key);
        spec.head_dim = spec.head_dim_v = kDim;
        spec.seq_q = spec.seq_k = kSeq;
        spec.causal = true;
        if (!kit::chosen(spec)) continue;
        check::Case c(spec);
        check::Array& array = in_v ? c.v : c.k;
        const std::int64_t at = array.offset({0, key, 0, 5});
        array.set(at, 0);
        const std::vector<float> with_zero = run(*kernel_, c);
        array.set(at, poison);
        const std::vector<float> with_poison = run(*kernel_, c);
        for (std::int64_t i = 0; i < kSeq; ++i) {
          const std::size_t row = static_cast<std::size_t>(i * kDim), lse = static_cast<std::size_t>(kSeq * kDim + i);
          if (i < key) {
            EXPECT_EQ(std::memcmp(&with_zero[row], &with_poison[row], kDim * 4), 0) << "row " << i << ", key " << key;
          } else if (in_v) {
            EXPECT_FALSE(std::isfinite(with_poison[row + 5])) << "row " << i << ", key " << key;
          }
          if (i < key || in_v) {
            EXPECT_EQ(with_zero[lse], with_poison[lse]) << "row " << i << ", key " << key;
          }
        }
      }
    }
  }
}

// Weighted sums that pass float's range before the division.
TEST_P(ForwardBf16, HugeValues) {
  for (const bool causal : {false, true}) {
    CaseSpec spec = base();
    spec.head_dim = spec.head_dim_v = 32;
    spec.seq_q = spec.seq_k = 300;
    spec.causal = causal;
    check::Case c(spec);
    c.v.each([&](const check::Index& i, std::int64_t at) { c.v.set(at, i[3] == 3 ? 0x1.8p127 : c.v.get(at)); });
    c.v.seal();
    const check::Reference reference(c);
    EXPECT_TRUE(kit::passes(check::check_kernel(*kernel_, c, reference, 2)));
  }
}

TEST_P(ForwardBf16, TinyValues) {
  CaseSpec spec = base();
  spec.head_dim = spec.head_dim_v = 32;
  spec.seq_q = spec.seq_k = 100;
  spec.causal = true;
  check::Case c(spec);
  c.v.each([&](const check::Index&, std::int64_t at) { c.v.set(at, c.v.get(at) * 0x1p-131); });
  c.v.seal();
  const check::Reference reference(c);
  EXPECT_TRUE(kit::passes(check::check_kernel(*kernel_, c, reference, 2)));
}

// One key, whose score is below what pair products keep: lse is that score.
TEST_P(ForwardBf16, TinyScoresOfOneKey) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    CaseSpec spec = base();
    spec.seed = seed;
    spec.seq_q = 97;
    spec.seq_k = seed < 5 ? 1 : 97;
    if (seed >= 5) spec.window_left = spec.window_right = 0;
    spec.head_dim = 100;
    spec.head_dim_v = 16;
    check::Case c(spec);
    c.q.each([&](const check::Index&, std::int64_t at) { c.q.set(at, c.q.get(at) * 0x1p-66); });
    c.k.each([&](const check::Index&, std::int64_t at) { c.k.set(at, c.k.get(at) * 0x1p-65); });
    c.q.seal();
    c.k.seal();
    EXPECT_TRUE(kit::passes(check::check_kernel(*kernel_, c, 2)));
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, ForwardBf16,
                         testing::Values("fwd_cpu_avx512bf16", "fwd_cpu_amx", "fwd_cpu_amx_emulated"),
                         [](const auto& kernel) { return std::string(kernel.param); });

}  // namespace
}  // namespace onepass
