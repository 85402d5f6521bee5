// What the tests of the float32-arithmetic backward share.
#pragma once

#include <cmath>
#include <limits>

#include "kit/kit.h"
#include "oracle/oracle.h"

namespace onepass::backward_kit {

using check::Case;
using check::CaseSpec;
using check::Index;

/// Those of this machine with float32 arithmetic.
inline const std::vector<const Kernel*>& backward_kernels() {
  static const std::vector<const Kernel*> list = [] {
    std::vector<const Kernel*> kernels;
    for (const Kernel* kernel : check::runnable_kernels(Pass::backward)) {
      const std::string_view arch = kernel->arch;
      if (arch == "portable" || arch == "avx2" || arch == "avx512") kernels.push_back(kernel);
    }
    return kernels;
  }();
  return list;
}

inline CaseSpec spec_of(std::int64_t seq_q, std::int64_t seq_k, std::int64_t heads, std::int64_t dim) {
  CaseSpec spec = kit::sized(Pass::backward, DType::f32, seq_q, seq_k, dim);
  spec.heads_q = spec.heads_kv = heads;
  return spec;
}

/// Right on every kernel, and the same bits for each number of threads.
inline void expect_right(Case& c, const std::vector<int>& threads = {1}) {
  const check::Reference reference(c);
  ASSERT_TRUE(reference.status().ok()) << reference.status().text();
  for (const Kernel* kernel : backward_kernels()) {
    std::uint64_t bits = 0;
    for (const int n : threads) {
      const check::Report report = check::check_kernel(*kernel, c, reference, n);
      EXPECT_TRUE(kit::passes(report));
      if (n != threads.front()) {
        EXPECT_EQ(report.bits, bits) << kernel->name << " with " << n << " threads: " << check::describe(c.spec());
      }
      bits = report.bits;
    }
  }
}
inline void expect_right(const CaseSpec& spec, const std::vector<int>& threads = {1}) {
  if (!kit::chosen(spec)) return;
  Case c(spec);
  expect_right(c, threads);
}

/// Runs on the operands as they are now, with a workspace of NaN.
inline void run(const Kernel& kernel, const Problem& problem, const BackwardOperands& operands, int threads = 1) {
  std::vector<unsigned char> memory(kernel.workspace(problem, threads) + 64, 0xff);
  Launch launch;
  launch.workspace = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64);
  launch.workspace_size = memory.size() - 64;
  launch.threads = threads;
  EXPECT_TRUE(kernel.backward(problem, operands, launch).ok());
}
inline void run(const Kernel& kernel, Case& c, int threads = 1) {
  c.reset();
  run(kernel, c.problem(), c.backward_operands(), threads);
}

inline std::uint64_t gradient_bits(const Case& c) {
  std::uint64_t bits = 0;
  for (const check::Array* array : {&c.grad_q, &c.grad_k, &c.grad_v, &c.grad_bias, &c.grad_sinks}) {
    if (*array) bits = bits * 0x9E3779B97F4A7C15u + array->bits();
  }
  return bits;
}

/// The forward's results anew, after inputs were changed; all inputs count as original from here on.
inline void refresh(Case& c) {
  ForwardOperands operands = c.forward_operands();
  operands.out = c.saved_out.tensor(c.spec().varlen());
  operands.lse = c.saved_lse.row_tensor(c.spec().varlen());
  EXPECT_TRUE(oracle::forward(c.problem(), operands).ok());
  for (check::Array* array :
       {&c.q, &c.k, &c.v, &c.grad_out, &c.grad_lse, &c.bias, &c.sinks, &c.saved_out, &c.saved_lse}) {
    array->seal();
  }
}

}  // namespace onepass::backward_kit
