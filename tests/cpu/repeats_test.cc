// Backward calls repeated: many items of the same values, other threads, other work on the machine, a workspace in use
// again. Every run has the same bits.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "cpu/every_kernel.h"

namespace onepass {
namespace {

using namespace every_kernel;

/// 300 items of the same values: each item's gradients have the bits that one item alone has, in every run.
TEST(Repeats, C17ManyItems) {
  CaseSpec spec;
  spec.pass = Pass::backward;
  spec.dtype = DType::f16;
  spec.seq_q = 2048;
  spec.seq_k = 128;
  spec.head_dim = spec.head_dim_v = 128;
  spec.values = check::Values::wide;
  if (!kit::chosen(spec)) return;
  Case c(spec);
  expect_right(c);
  constexpr std::int64_t kBatch = 300;
  Problem problem = c.problem();
  problem.batch = kBatch;
  BackwardOperands x = c.backward_operands();
  for (Tensor* t : {&x.q, &x.k, &x.v, &x.out, &x.grad_out}) t->stride_batch = 0;
  x.lse.stride_batch = 0;
  const Kernel& kernel = *kernels_for(c).front();
  run(kernel, c);
  std::vector<std::vector<std::uint16_t>> memory;
  Tensor* results[] = {&x.grad_q, &x.grad_k, &x.grad_v};
  const Tensor alone[] = {x.grad_q, x.grad_k, x.grad_v};
  const std::int64_t sizes[] = {spec.seq_q * 128, 128 * 128, 128 * 128};
  for (int n = 0; n < 3; ++n) {
    memory.emplace_back(static_cast<std::size_t>(kBatch * sizes[n]));
    *results[n] = {memory.back().data(), DType::f16, sizes[n], 128, 128};
  }
  for (const int threads : {2, 1, 3}) {
    for (auto& m : memory) std::fill(m.begin(), m.end(), std::uint16_t{0xffff});
    run(kernel, problem, x, threads);
    for (int n = 0; n < 3; ++n) {
      const auto bytes = static_cast<std::size_t>(2 * sizes[n]);
      for (std::int64_t b = 0; b < kBatch; ++b) {
        ASSERT_EQ(std::memcmp(results[n]->row(b, 0, 0), alone[n].data, bytes), 0) << threads << " item " << b;
      }
    }
  }
}

/// 100 runs, 20 of windows and packed sequences, beside other work, with other threads and a workspace full of NaN each
/// time.
TEST(Repeats, C18C19RepeatsAreBitEqual) {
  std::atomic<bool> stop{false};
  std::thread other([&] {
    for (volatile double x = 1; !stop.load(std::memory_order_relaxed);) x = x * 1.0000001;
  });
  for (int kind = 0; kind < 3; ++kind) {
    CaseSpec spec;
    spec.pass = Pass::backward;
    spec.dtype = DType::bf16;
    spec.batch = 2;
    spec.seq_q = spec.seq_k = 1000;
    spec.heads_q = 8;
    spec.heads_kv = 2;
    spec.head_dim = spec.head_dim_v = 128;
    spec.causal = true;
    spec.deterministic = 1;
    if (kind == 1) spec.window_left = 200;
    if (kind == 2) {
      spec.cu_seqlens_q = spec.cu_seqlens_k = {0, 617, 1617};
      spec.total_q = spec.total_k = 1620;
    }
    if (!kit::chosen(spec)) continue;
    Case c(spec);
    const auto bits = [&] {
      std::uint64_t sum = 0;
      for (const Array* array : {&c.grad_q, &c.grad_k, &c.grad_v}) sum = sum * 0x9E3779B97F4A7C15u + array->bits();
      return sum;
    };
    const std::vector<const Kernel*> kernels = kernels_for(c);
    for (const Kernel* kernel : kernels) {
      const bool best = kernel == kernels.front();
      if (std::string_view(kernel->arch) == "amx_emulated" || std::string_view(kernel->arch) == "portable") continue;
      run(*kernel, c, 2);
      const std::uint64_t first = bits();
      for (int n = 0; n < kit::scaled(!best ? 1 : kind == 0 ? 99 : 19); ++n) {
        run(*kernel, c, 1 + n % 4);
        ASSERT_EQ(bits(), first) << kernel->name << " run " << n;
      }
    }
  }
  stop = true;
  other.join();
}

/// The workspace is the caller's: what a call wrote stays when the next one has used the same memory.
TEST(Repeats, C19WorkspaceIsFreeAfterTheCall) {
  for (const Pass pass : {Pass::forward, Pass::decode, Pass::backward}) {
    CaseSpec spec;
    spec.pass = pass;
    spec.seq_q = pass == Pass::decode ? 4 : 200;
    spec.seq_k = 300;
    spec.heads_q = 8;
    spec.heads_kv = 2;
    spec.head_dim = spec.head_dim_v = 64;
    for (const DType dtype : {DType::f32, DType::bf16}) {
      spec.dtype = dtype;
      if (!kit::chosen(spec)) continue;
      Case c(spec);
      const Array& result = pass == Pass::backward ? c.grad_k : c.out;
      for (const Kernel* kernel : kernels_for(c)) {
        run(*kernel, c);
        const std::uint64_t bits = result.bits();
        const std::size_t size = kernel->workspace(c.problem(), 2);
        std::vector<unsigned char> memory(size + 64, 0x3f);
        const auto start = reinterpret_cast<std::uintptr_t>(memory.data());
        const Launch launch{.workspace = memory.data() + (64 - start % 64) % 64, .workspace_size = size, .threads = 2};
        for (int n = 0; n < 2; ++n) {  // over what the first left
          c.reset();
          ASSERT_TRUE((pass == Pass::backward ? kernel->backward(c.problem(), c.backward_operands(), launch)
                                              : kernel->forward(c.problem(), c.forward_operands(), launch))
                          .ok());
          std::fill(memory.begin(), memory.end(), static_cast<unsigned char>(n == 0 ? 0x3f : 0xff));
          EXPECT_EQ(result.bits(), bits) << kernel->name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace onepass
