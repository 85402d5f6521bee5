// The float32 forward on every instruction set of this machine.
#include <sys/mman.h>

#include <cmath>
#include <cstring>

#include "kit/kit.h"

namespace onepass {
namespace {

using check::Case;
using check::CaseSpec;

std::vector<const Kernel*> forward_kernels() {
  std::vector<const Kernel*> list;
  for (const Kernel* kernel : check::runnable_kernels(Pass::forward)) {
    const std::string_view name = kernel->name, arch = kernel->arch;
    if (name.starts_with("fwd_") && (arch == "portable" || arch == "avx2" || arch == "avx512")) list.push_back(kernel);
  }
  return list;
}

void expect_right(const CaseSpec& spec, const std::vector<int>& threads = {1}) {
  if (!kit::chosen(spec)) return;
  Case c(spec);
  const check::Reference reference(c);
  ASSERT_TRUE(reference.status().ok()) << reference.status().text();
  for (const Kernel* kernel : forward_kernels()) {
    std::uint64_t bits = 0;
    for (const int n : threads) {
      const check::Report report = check::check_kernel(*kernel, c, reference, n);
      EXPECT_TRUE(report.ok()) << report.text();
      if (n != threads.front()) {
        EXPECT_EQ(report.bits, bits) << kernel->name << " with " << n << " threads";
      }
      bits = report.bits;
    }
  }
}

TEST(Forward, RandomCases) {
  check::Sweep sweep;
  sweep.first_seed = kit::first_seed();
  sweep.cases = kit::scaled(600);
  sweep.threads = {1, 2, 3, 8};
  kit::expect_sweep(forward_kernels(), sweep);
}

/// A softcap of 5 on raw scores of hundreds: lse follows the rounding of a few dot products. And its neighbours.
TEST(Forward, SeedsOnceBeyondTheBound) {
  check::Sweep sweep;
  sweep.first_seed = 5820;
  sweep.cases = 20;
  kit::expect_sweep(forward_kernels(), sweep);
  CaseSpec spec;
  spec.seq_q = 47;
  spec.seq_k = 112;
  spec.head_dim = 127;
  spec.head_dim_v = 193;
  spec.causal = true;
  spec.scale = 1;
  spec.softcap = 5;
  spec.values = check::Values::wide;
  for (spec.seed = 0; spec.seed < 20; ++spec.seed) expect_right(spec);
}

TEST(Forward, EveryLengthAgainstTheTiles) {
  for (std::int64_t seq = 1; seq <= 300; ++seq) {
    CaseSpec spec;
    spec.seed = static_cast<std::uint64_t>(seq);
    spec.dtype = static_cast<DType>(seq % 3);
    spec.seq_q = seq;
    spec.seq_k = seq % 2 == 0 ? seq : 301 - seq;
    spec.head_dim = spec.head_dim_v = 24;
    spec.causal = seq % 4 < 2;
    expect_right(spec);
  }
}

TEST(Forward, EveryHeadDim) {
  for (std::int64_t dim = 1; dim <= 264; ++dim) {
    CaseSpec spec;
    spec.dtype = static_cast<DType>(dim % 3);
    spec.seq_q = 7;
    spec.seq_k = 19;
    spec.head_dim = dim;
    spec.head_dim_v = dim % 5 == 0 ? 265 - dim : dim;
    expect_right(spec);
  }
  for (const std::int64_t dim : {320, 512, 1024}) {
    CaseSpec spec;
    spec.seq_q = 70;
    spec.seq_k = 100;
    spec.head_dim = dim;
    spec.head_dim_v = dim == 512 ? 576 : dim;
    expect_right(spec);
  }
}

TEST(Forward, WindowsAroundTheTiles) {
  for (const std::int64_t window : {1, 63, 64, 95, 96, 128, 255}) {
    for (const std::int64_t seq : {64, 65, 129, 200}) {
      CaseSpec spec;
      spec.seq_q = spec.seq_k = seq;
      spec.causal = window % 2 == 0;
      spec.window_left = window;
      spec.window_right = window % 3 == 0 ? -1 : window / 2;
      expect_right(spec, {1, 2});
    }
  }
}

TEST(Forward, MoreQueriesThanKeys) {
  for (const std::int64_t excess : {1, 63, 64, 65, 127, 128, 129}) {
    CaseSpec spec;
    spec.seq_k = 130;
    spec.seq_q = 130 + excess;
    spec.heads_q = spec.heads_kv = 2;
    spec.head_dim = spec.head_dim_v = 64;
    spec.causal = true;
    expect_right(spec);
    spec.window_left = 16;
    expect_right(spec);
  }
}

/// Out and lse of a kernel as bits, row by row of head 1.
std::vector<std::vector<double>> rows_of(const Kernel& kernel, Case& c) {
  std::vector<char> workspace(kernel.workspace(c.problem(), 1) + 64);
  Launch launch;
  launch.workspace = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(workspace.data()) + 63) / 64 * 64);
  EXPECT_TRUE(kernel.forward(c.problem(), c.forward_operands(), launch).ok());
  std::vector<std::vector<double>> rows(static_cast<std::size_t>(c.spec().seq_q));
  for (std::int64_t i = 0; i < c.spec().seq_q; ++i) {
    std::vector<double>& row = rows[static_cast<std::size_t>(i)];
    for (std::int64_t x = 0; x < c.spec().head_dim_v; ++x) row.push_back(c.out.get(c.out.offset({0, i, 1, x})));
    row.push_back(c.lse.get(c.lse.offset({0, 1, i, 0})));
  }
  return rows;
}
bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

CaseSpec banded(DType dtype, std::int64_t window_left, std::int64_t window_right) {
  CaseSpec spec;
  spec.dtype = dtype;
  spec.seq_q = spec.seq_k = 230;
  spec.heads_q = spec.heads_kv = 2;
  spec.head_dim = spec.head_dim_v = 20;
  spec.window_left = window_left;
  spec.window_right = window_right;
  return spec;
}

TEST(Forward, HiddenNonFiniteKeysChangeNoBit) {
  constexpr std::int64_t kKey = 110;
  const std::int64_t windows[][2] = {{-1, 0}, {0, -1}, {40, 3}, {100, 90}};
  for (const Kernel* kernel : forward_kernels()) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const auto& window : windows) {
        for (const bool in_v : {false, true}) {
          if (!kit::chosen(check::describe(banded(dtype, window[0], window[1])) + (in_v ? " V" : " K"), 2e6)) continue;
          const auto rows_with = [&](double value) {
            Case c(banded(dtype, window[0], window[1]));
            check::Array& array = in_v ? c.v : c.k;
            array.each([&](const check::Index& at, std::int64_t offset) {
              if (at[1] == kKey) array.set(offset, value);
            });
            return rows_of(*kernel, c);
          };
          const auto zeros = rows_with(0);
          for (const double value : {std::nan(""), HUGE_VAL}) {
            const auto rows = rows_with(value);
            for (std::int64_t i = 0; i < 230; ++i) {
              const bool seen = (window[0] < 0 || kKey >= i - window[0]) && (window[1] < 0 || kKey <= i + window[1]);
              const auto& row = rows[static_cast<std::size_t>(i)];
              if (!seen) {
                EXPECT_TRUE(same_bits(row, zeros[static_cast<std::size_t>(i)])) << kernel->name << " row " << i;
              } else if (in_v || std::isnan(value)) {
                EXPECT_FALSE(std::isfinite(row[0])) << kernel->name << " row " << i;
              }
            }
          }
        }
      }
    }
  }
}

TEST(Forward, RowsDoNotDependOnTheirNeighbours) {
  for (const Kernel* kernel : forward_kernels()) {
    for (const std::int64_t left : {-1, 50}) {
      CaseSpec spec = banded(DType::f32, left, 0);
      Case all(spec);
      const auto rows = rows_of(*kernel, all);
      for (std::int64_t i = 0; i < spec.seq_q; i += 7) {
        CaseSpec one = spec;
        one.seq_q = 1;
        one.q_position = {static_cast<std::int32_t>(i)};
        if (!kit::chosen(one)) continue;
        Case c(one);
        c.q.each([&](const check::Index& at, std::int64_t offset) {
          c.q.set(offset, all.q.get(all.q.offset({0, i, at[2], at[3]})));
        });
        for (check::Array Case::*operand : {&Case::k, &Case::v}) {
          (c.*operand).each([&](const check::Index& at, std::int64_t offset) {
            (c.*operand).set(offset, (all.*operand).get((all.*operand).offset(at)));
          });
        }
        EXPECT_TRUE(same_bits(rows_of(*kernel, c)[0], rows[static_cast<std::size_t>(i)])) << kernel->name << " " << i;
      }
    }
  }
}

TEST(Forward, ManyTinySequences) {
  // More sequences than a 16-bit grid has places; and many heads.
  CaseSpec spec;
  spec.batch = 70000;
  spec.seq_q = spec.seq_k = 2;
  spec.heads_q = spec.heads_kv = 1;
  spec.head_dim = spec.head_dim_v = 4;
  expect_right(spec, {2});
  spec.batch = 1;
  spec.heads_q = spec.heads_kv = 70000;
  expect_right(spec, {2});
}

TEST(Forward, OffsetsBeyondTwoToThe31) {
  // Sparse memory: strides of 2^30 elements, only the touched pages exist.
  constexpr std::int64_t kStride = std::int64_t{1} << 30;
  constexpr std::int64_t kSeq = 5, kDim = 8;
  const std::size_t bytes = static_cast<std::size_t>(kStride) * kSeq * 4;
  void* memory = mmap(nullptr, 4 * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "this system grants no 80 GiB of address space";
  float* base = static_cast<float*>(memory);
  const std::int64_t span = kStride * kSeq;
  Problem p;
  p.batch = 1;
  p.seq_q = p.seq_k = p.total_q = p.total_k = kSeq;
  p.heads_q = p.heads_kv = 1;
  p.head_dim = p.head_dim_v = kDim;
  std::vector<float> small(4 * kSeq * kDim);
  const auto tensor = [&](float* data, std::int64_t stride) { return Tensor{data, DType::f32, 0, stride, 0}; };
  for (int t = 0; t < 3; ++t) {
    for (std::int64_t i = 0; i < kSeq; ++i) {
      for (std::int64_t c = 0; c < kDim; ++c) {
        const float x = std::sin(static_cast<float>(t * 100 + i * kDim + c));
        base[t * span + i * kStride + c] = small[static_cast<std::size_t>((t * kSeq + i) * kDim + c)] = x;
      }
    }
  }
  for (const Kernel* kernel : forward_kernels()) {
    std::vector<char> workspace(kernel->workspace(p, 1) + 64);
    Launch launch;
    launch.workspace = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(workspace.data()) + 63) / 64 * 64);
    const auto run = [&](float* data, std::int64_t tensor_span, std::int64_t stride) {
      const ForwardOperands f{tensor(data, stride),
                              tensor(data + tensor_span, stride),
                              tensor(data + 2 * tensor_span, stride),
                              tensor(data + 3 * tensor_span, stride),
                              {}};
      EXPECT_TRUE(kernel->forward(p, f, launch).ok());
    };
    run(base, span, kStride);
    run(small.data(), kSeq * kDim, kDim);
    for (std::int64_t i = 0; i < kSeq; ++i) {
      EXPECT_EQ(std::memcmp(base + 3 * span + i * kStride, small.data() + (3 * kSeq + i) * kDim, kDim * 4), 0);
    }
  }
  munmap(memory, 4 * bytes);
}

}  // namespace
}  // namespace onepass
