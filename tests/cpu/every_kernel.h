// Every kernel that this machine can run, AMX's on emulated tiles among them, so that it is tested without AMX too.
#pragma once

#include <string_view>

#include "core/registry.h"
#include "cpu/kernel.h"
#include "kit/kit.h"
#include "oracle/oracle.h"

namespace onepass::every_kernel {

using check::Array;
using check::Case;
using check::CaseSpec;
using check::Index;
using kit::kStorage;
using kit::sized;

inline Status emulated_forward(const Problem& problem, const ForwardOperands& operands, const Launch& launch) {
  cpu::amx_emulated::forward(problem, operands, launch);
  return {};
}
inline Status emulated_backward(const Problem& problem, const BackwardOperands& operands, const Launch& launch) {
  cpu::amx_emulated::backward(problem, operands, launch);
  return {};
}
inline Status emulated_decode(const Problem& problem, const ForwardOperands& operands, const Launch& launch) {
  cpu::amx_emulated::decode(problem, operands, launch);
  return {};
}
inline const Kernel kEmulatedForward{"fwd_cpu_amx_emulated",
                                     Pass::forward,
                                     Backend::cpu,
                                     "amx_emulated",
                                     kBf16,
                                     1024,
                                     0,
                                     &cpu::amx_emulated::forward_workspace,
                                     &emulated_forward,
                                     nullptr};
inline const Kernel kEmulatedBackward{"bwd_cpu_amx_emulated",
                                      Pass::backward,
                                      Backend::cpu,
                                      "amx_emulated",
                                      kBf16,
                                      1024,
                                      0,
                                      &cpu::amx_emulated::backward_workspace,
                                      nullptr,
                                      &emulated_backward};

inline const Kernel kEmulatedDecode{"decode_cpu_amx_emulated",
                                    Pass::decode,
                                    Backend::cpu,
                                    "amx_emulated",
                                    kF32 | kF16 | kBf16,
                                    1024,
                                    0,
                                    &cpu::amx_emulated::decode_workspace,
                                    &emulated_decode,
                                    nullptr};

/// Tests of one bfloat16 kernel by name, AMX's on emulated tiles by theirs.
class Bf16Kernel : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!this_cpu().avx512bf16) GTEST_SKIP() << "no AVX512-BF16";
    const std::string_view name = GetParam();
    kernel_ = name == kEmulatedForward.name    ? &kEmulatedForward
              : name == kEmulatedBackward.name ? &kEmulatedBackward
                                               : find_kernel(name);
    ASSERT_NE(kernel_, nullptr);
    const bool emulated = std::string_view(kernel_->arch) == "amx_emulated";
    if (!emulated && !can_run(*kernel_, this_cpu())) GTEST_SKIP() << "not on this machine";
  }
  /// Right, and the same bits with any of these thread counts.
  void expect(const CaseSpec& spec, const std::vector<int>& threads = {1}) {
    if (!kit::chosen(spec)) return;
    Case c(spec);
    const check::Reference reference(c);
    std::uint64_t bits = 0;
    for (const int n : threads) {
      const check::Report report = check::check_kernel(*kernel_, c, reference, n);
      EXPECT_TRUE(kit::passes(report));
      worst_ = std::max(worst_, report.worst_bound_ratio());
      if (n == threads.front()) bits = report.bits;
      EXPECT_EQ(report.bits, bits) << n << " threads: " << check::describe(spec);
    }
  }
  void TearDown() override {
    if (worst_ > 0) std::printf("  %s: worst error, of the bound: %.2f\n", GetParam(), worst_);
  }

  const Kernel* kernel_ = nullptr;
  double worst_ = 0;
};

/// Forwards and decodes, or backwards, that serve the case; not the reference.
inline std::vector<const Kernel*> kernels_for(const Case& c) {
  std::vector<const Kernel*> list = check::runnable_kernels(c.spec().pass);
  if (this_cpu().avx512bf16) {
    list.push_back(c.spec().pass == Pass::backward ? &kEmulatedBackward : &kEmulatedForward);
    if (c.spec().pass != Pass::backward) list.push_back(&kEmulatedDecode);
  }
  std::erase_if(list, [&](const Kernel* kernel) {
    return !check::serves(*kernel, c) || std::string_view(kernel->arch) == "oracle";
  });
  EXPECT_FALSE(list.empty());
  return list;
}

/// Runs every kernel on the case as it stands, with 1 and 3 threads, against the reference; then look(kernel).
template <class Look>
void expect_right(Case& c, Look&& look) {
  const check::Reference reference(c);
  ASSERT_TRUE(reference.status().ok()) << reference.status().text();
  for (const Kernel* kernel : kernels_for(c)) {
    for (const int threads : {1, 3}) EXPECT_TRUE(kit::passes(check::check_kernel(*kernel, c, reference, threads)));
    look(*kernel);
  }
}
inline void expect_right(Case& c) {
  expect_right(c, [](const Kernel&) {});
}
inline void expect_right(const CaseSpec& spec) {
  if (!kit::chosen(spec)) return;
  Case c(spec);
  expect_right(c);
}

/// A workspace of exactly the size asked for, full of NaN.
class Workspace {
 public:
  Workspace(const Kernel& kernel, const Problem& problem, int threads)
      : size_(kernel.workspace(problem, threads)), threads_(threads), memory_(size_ + 64, 0xff) {}
  Launch launch() {
    const auto start = reinterpret_cast<std::uintptr_t>(memory_.data());
    return {.workspace = memory_.data() + (64 - start % 64) % 64, .workspace_size = size_, .threads = threads_};
  }

 private:
  std::size_t size_;
  int threads_;
  std::vector<unsigned char> memory_;
};
inline void run(const Kernel& kernel, const Problem& problem, const ForwardOperands& x, int threads = 2) {
  const Status status = kernel.forward(problem, x, Workspace(kernel, problem, threads).launch());
  ASSERT_TRUE(status.ok()) << status.text();
}
inline void run(const Kernel& kernel, const Problem& problem, const BackwardOperands& x, int threads = 2) {
  const Status status = kernel.backward(problem, x, Workspace(kernel, problem, threads).launch());
  ASSERT_TRUE(status.ok()) << status.text();
}
inline void run(const Kernel& kernel, Case& c, int threads = 2) {
  c.reset();
  if (c.spec().pass == Pass::backward) {
    run(kernel, c.problem(), c.backward_operands(), threads);
  } else {
    run(kernel, c.problem(), c.forward_operands(), threads);
  }
}

/// Runs every kernel on the case as it stands, where a closed form says what is right; then look(kernel).
template <class Look>
void run_every(Case& c, Look&& look) {
  for (const Kernel* kernel : kernels_for(c)) {
    run(*kernel, c);
    look(*kernel);
  }
}

template <class F>
void fill(Array& array, F&& value) {
  array.each([&](const Index& i, std::int64_t at) { array.set(at, value(i)); });
  array.seal();
}

/// The forward's results of a backward case anew, after its inputs were changed.
inline void refresh(Case& c) {
  ForwardOperands operands = c.forward_operands();
  operands.out = c.saved_out.tensor(c.spec().varlen());
  operands.lse = c.saved_lse.row_tensor(c.spec().varlen());
  EXPECT_TRUE(oracle::forward(c.problem(), operands).ok());
  for (Array* array : {&c.q, &c.k, &c.v, &c.grad_out, &c.grad_lse, &c.bias, &c.sinks, &c.saved_out, &c.saved_lse}) {
    array->seal();
  }
}

inline double at(const Array& array, std::int64_t b, std::int64_t row, std::int64_t head = 0, std::int64_t x = 0) {
  return array.get(array.offset({b, row, head, x}));
}
/// lse, a row of a head.
inline double lse_at(const Array& array, std::int64_t b, std::int64_t row, std::int64_t head = 0) {
  return array.get(array.offset({b, head, row, 0}));
}

}  // namespace onepass::every_kernel
