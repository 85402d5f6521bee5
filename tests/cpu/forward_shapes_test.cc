// Sizes, strides and modifiers that broke attention libraries, on every forward kernel of this machine.
#include <algorithm>
#include <cmath>

#include "kit/kit.h"

namespace onepass {
namespace {

using check::Case;
using check::CaseSpec;
using check::Index;
using kit::kStorage;

CaseSpec sized(DType dtype, std::int64_t seq_q, std::int64_t seq_k, std::int64_t dim, std::int64_t heads = 1) {
  CaseSpec spec = kit::sized(dtype, seq_q, seq_k, dim);
  spec.heads_q = spec.heads_kv = heads;
  return spec;
}

std::vector<const Kernel*> forward_kernels(DType dtype) {
  std::vector<const Kernel*> list;
  for (const Kernel* kernel : check::runnable_kernels(Pass::forward)) {
    const bool reads = (kernel->dtypes >> static_cast<int>(dtype) & 1u) != 0;
    if (kernel->pass == Pass::forward && reads && std::string_view(kernel->arch) != "oracle") list.push_back(kernel);
  }
  return list;
}

void run(const Kernel& kernel, const Problem& problem, const ForwardOperands& operands, int threads = 2) {
  std::vector<char> workspace(kernel.workspace(problem, threads) + 64);
  Launch launch;
  launch.threads = threads;
  launch.workspace = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(workspace.data()) + 63) / 64 * 64);
  ASSERT_TRUE(kernel.forward(problem, operands, launch).ok());
}

TEST(ForwardShapes, C16OddLengths) {
  int n = 0;
  for (const std::int64_t seq : {1, 2, 97, 113, 127, 129, 203, 257}) {
    for (const std::int64_t dim : {32, 40, 64, 128}) {
      CaseSpec spec = sized(kStorage[n++ % 3], seq, seq, dim);
      spec.causal = n % 2 == 0;
      kit::expect_case(spec);
    }
  }
}

TEST(ForwardShapes, C20Softcap) {
  for (const double cap : {10.0, 0.5}) {
    for (const DType dtype : kStorage) {
      CaseSpec spec = sized(dtype, 217, 217, 128);
      spec.softcap = cap;
      spec.scale = 2;  // scores up to about 100
      kit::expect_case(spec);
      spec.batch = 2;
      spec.cu_seqlens_q = spec.cu_seqlens_k = {0, 128, 345};
      spec.total_q = spec.total_k = 345;
      kit::expect_case(spec);
    }
  }
}

TEST(ForwardShapes, C21Sinks) {
  for (const double sink : {-HUGE_VAL, 0.0, 5.0}) {
    for (const std::int64_t window : {-1, 7}) {
      CaseSpec spec = sized(DType::f32, 33, 33, 64, 6);
      spec.heads_kv = 2;
      spec.sinks = true;
      spec.window_left = window;
      Case c(spec);
      c.sinks.each([&](const Index&, std::int64_t at) { c.sinks.set(at, sink); });
      c.sinks.seal();
      const check::Reference reference(c);
      for (const Kernel* kernel : forward_kernels(spec.dtype)) {
        EXPECT_TRUE(kit::passes(check::check_kernel(*kernel, c, reference)));
      }
    }
  }
}

TEST(ForwardShapes, C22Biases) {
  const std::array<bool, 4> broadcasts[] = {{true, false, false, false}, {false, true, true, false},
                                            {true, true, false, false},  {true, false, false, true},
                                            {true, true, true, true},    {false, false, false, false}};
  int n = 0;
  for (const auto& broadcast : broadcasts) {
    for (const DType bias_dtype : kStorage) {
      CaseSpec spec = sized(kStorage[n++ % 3], 70, 128, 32, 4);
      spec.batch = 2;
      spec.bias = true;
      spec.bias_dtype = bias_dtype;
      spec.bias_broadcast = broadcast;
      spec.causal = n % 2 == 0;
      kit::expect_case(spec);
    }
  }
}

TEST(ForwardShapes, C23LongerKeys) {
  kit::expect_case(sized(DType::f16, 64, 256, 64));
  kit::expect_case(sized(DType::f16, 130, 520, 96, 2));
}

/// Broadcast inputs keep the memory small: every head's result is the first one's.
TEST(ForwardShapes, C24ManyItemsAndHeads) {
  if (kit::kSanitized) GTEST_SKIP() << "a minute";
  struct Size {
    std::int64_t batch, seq, heads, dim;
  };
  for (const Size& size : {Size{65536, 4, 8, 64}, Size{1, 10, 65536, 16}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Case one(sized(dtype, size.seq, size.seq, size.dim));
      Problem problem = one.problem();
      problem.batch = size.batch;
      problem.heads_q = problem.heads_kv = size.heads;
      problem.head_dim_v = 1;
      ForwardOperands operands = one.forward_operands();
      for (Tensor* tensor : {&operands.q, &operands.k, &operands.v}) tensor->stride_batch = tensor->stride_head = 0;
      const std::int64_t item = size.seq * size.heads;
      std::vector<float> out(static_cast<std::size_t>(size.batch * item));
      operands.out = {out.data(), DType::f32, item, size.heads, 1};
      operands.lse = {};
      for (const Kernel* kernel : forward_kernels(dtype)) {
        std::fill(out.begin(), out.end(), NAN);
        run(*kernel, problem, operands);
        std::int64_t different = 0;
        for (std::int64_t at = 0; at < size.batch * item; ++at) {
          const std::int64_t first = at % item / size.heads * size.heads;
          different += out[static_cast<std::size_t>(at)] != out[static_cast<std::size_t>(first)];
        }
        EXPECT_EQ(different, 0) << kernel->name;
        EXPECT_TRUE(std::isfinite(out[0])) << kernel->name;
      }
    }
  }
}

TEST(ForwardShapes, C24ManySequences) {
  CaseSpec spec = sized(DType::f32, 16, 16, 4);
  spec.batch = 80000;
  spec.total_q = spec.total_k = 16 * spec.batch;
  for (std::int32_t b = 0; b <= spec.batch; ++b) spec.cu_seqlens_q.push_back(16 * b);
  spec.cu_seqlens_k = spec.cu_seqlens_q;
  if (!kit::chosen(spec)) return;
  Case c(spec);
  c.v.each([&](const Index& i, std::int64_t at) { c.v.set(at, static_cast<double>(i[1] / 16)); });
  for (const Kernel* kernel : forward_kernels(spec.dtype)) {
    run(*kernel, c.problem(), c.forward_operands());
    std::int64_t wrong = 0;
    c.out.each([&](const Index& i, std::int64_t at) {
      const double right = static_cast<double>(i[1] / 16);
      wrong += !(std::abs(c.out.get(at) - right) <= 1e-5 * right);
    });
    EXPECT_EQ(wrong, 0) << kernel->name;
  }
}

TEST(ForwardShapes, C28C29ZeroSizes) {
  for (int bits = 0; bits < 64; ++bits) {
    CaseSpec spec = sized(kStorage[bits % 3], bits & 1 ? 0 : 3, bits & 2 ? 0 : 5, bits & 4 ? 0 : 8);
    spec.batch = bits & 8 ? 0 : 2;
    if (bits & 16) spec.heads_q = spec.heads_kv = 0;
    if (bits & 32) spec.head_dim_v = 0;
    spec.causal = bits % 5 == 0;
    Case c(spec);
    const check::Reference reference(c);
    for (const Kernel* kernel : forward_kernels(spec.dtype)) {
      EXPECT_TRUE(kit::passes(check::check_kernel(*kernel, c, reference, 3)));
    }
  }
  CaseSpec spec = sized(DType::f32, 0, 0, 8);
  spec.batch = 1;
  spec.cu_seqlens_q = spec.cu_seqlens_k = {0, 0};
  kit::expect_case(spec);
  spec.total_q = 5;  // tokens of no sequence
  kit::expect_case(spec);
}

TEST(ForwardShapes, C31UnequalHeadDims) {
  const std::int64_t dims[][2] = {{64, 128}, {128, 64}, {192, 128}, {96, 32}, {576, 512}};
  for (const auto& dim : dims) {
    CaseSpec spec = sized(kStorage[dim[0] % 3], 67, 205, dim[0], 2);
    spec.head_dim_v = dim[1];
    kit::expect_case(spec);
  }
}

TEST(ForwardShapes, C32OneAndTwo) {
  for (int bits = 0; bits < 16; ++bits) {
    CaseSpec spec = sized(kStorage[bits % 3], 1 + (bits & 1), 1 + (bits >> 1 & 1), 64, 1 + (bits >> 2 & 1));
    spec.batch = 1 + (bits >> 3);
    kit::expect_case(spec);
  }
}

TEST(ForwardShapes, C33C34ViewsAndBroadcasts) {
  for (const DType dtype : kStorage) {
    for (int n = 0; n < 3; ++n) {
      CaseSpec spec = sized(dtype, 62, 62, 128, 4);
      (n == 0 ? spec.layout_q : n == 1 ? spec.layout_k : spec.layout_v).order = {0, 2, 1};
      kit::expect_case(spec);
    }
    for (int axis = 0; axis < 3; axis += 2) {
      CaseSpec spec = sized(dtype, 65, 129, 64, 4);
      spec.batch = 2;
      spec.layout_k.broadcast[static_cast<std::size_t>(axis)] = true;
      spec.layout_v.broadcast[static_cast<std::size_t>(axis)] = true;
      kit::expect_case(spec);
    }
    CaseSpec odd = sized(dtype, 33, 70, 20, 3);  // rows at odd elements
    odd.layout_q.start = odd.layout_k.start = odd.layout_v.start = odd.layout_out.start = 1;
    odd.layout_q.gap = odd.layout_k.gap = odd.layout_v.gap = odd.layout_out.gap = {3, 1, 1};
    kit::expect_case(odd);
  }
}

TEST(ForwardShapes, C35CausalPatternAsBias) {
  for (const DType bias_dtype : kStorage) {
    CaseSpec spec = sized(DType::f16, 32, 32, 16, 4);
    spec.batch = 2;
    CaseSpec causal = spec;
    causal.causal = true;
    spec.bias = true;
    spec.bias_dtype = bias_dtype;
    Case with_bias(spec), with_mask(causal);
    with_bias.bias.each([&](const Index& i, std::int64_t at) { with_bias.bias.set(at, i[3] <= i[2] ? 0 : -HUGE_VAL); });
    for (check::Array Case::*operand : {&Case::q, &Case::k, &Case::v}) {
      (with_mask.*operand).each([&](const Index& i, std::int64_t at) {
        (with_mask.*operand).set(at, (with_bias.*operand).get((with_bias.*operand).offset(i)));
      });
    }
    for (const Kernel* kernel : forward_kernels(spec.dtype)) {
      run(*kernel, with_bias.problem(), with_bias.forward_operands());
      run(*kernel, with_mask.problem(), with_mask.forward_operands());
      with_mask.out.each([&](const Index& i, std::int64_t at) {
        EXPECT_NEAR(with_mask.out.get(at), with_bias.out.get(with_bias.out.offset(i)), 2e-3) << kernel->name;
      });
    }
  }
}

TEST(ForwardShapes, C36TokensOutsideSequences) {
  for (const DType dtype : kStorage) {
    CaseSpec spec = sized(dtype, 512, 512, 64);
    spec.batch = 3;
    spec.cu_seqlens_q = spec.cu_seqlens_k = {0, 144, 432, 944};
    spec.total_q = spec.total_k = 946;
    kit::expect_case(spec);
  }
}

TEST(ForwardShapes, Scales) {
  for (const double scale : {0.0, -0.3, 1e-40, -1e-35, 3.0, 1e-6}) {
    for (const double softcap : {0.0, 20.0}) {
      CaseSpec spec = sized(DType::f32, 40, 120, 32);
      spec.scale = scale;
      spec.softcap = softcap;
      spec.causal = true;
      kit::expect_case(spec);
    }
  }
}

}  // namespace
}  // namespace onepass
