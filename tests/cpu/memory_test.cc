// Memory beyond the operands: what a call's peak really is at a length whose score matrix would take 16 GiB.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "core/registry.h"
#include "kit/kit.h"

namespace onepass {
namespace {

/// Peak resident bytes of the process since the last reset; 0 where the system does not tell.
std::int64_t peak_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    long long kilobytes = 0;
    if (std::sscanf(line.c_str(), "VmHWM: %lld kB", &kilobytes) == 1) return kilobytes * 1024;
  }
  return 0;
}
bool reset_peak() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5";
  file.flush();
  return static_cast<bool>(file);
}

constexpr std::int64_t kSeq = 65536, kDim = 16;

std::unique_ptr<float[]> filled(std::int64_t count) {
  auto data = std::make_unique<float[]>(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i)
    data[static_cast<std::size_t>(i)] = static_cast<float>((i * 2654435761u >> 16) % 1000) / 500 - 1;
  return data;
}

TEST(Memory, PeakFollowsTheFormulaAtSeq65536) {
  if (kit::kSanitized) GTEST_SKIP() << "a sanitizer's own memory hides the call's";
  if (peak_bytes() == 0 || !reset_peak()) GTEST_SKIP() << "this system does not tell the peak";
  Problem p;
  p.batch = p.heads_q = p.heads_kv = 1;
  p.seq_q = p.seq_k = p.total_q = p.total_k = kSeq;
  p.head_dim = p.head_dim_v = kDim;
  p.mask.causal = true;
  p.mask.window_left = 2000;  // keeps the test short; the memory is that of the whole length
  p.score.scale = 0.25;
  const auto q = filled(kSeq * kDim), k = filled(kSeq * kDim), v = filled(kSeq * kDim), dout = filled(kSeq * kDim);
  const auto out = filled(kSeq * kDim), lse = filled(kSeq), dq = filled(kSeq * kDim), dk = filled(kSeq * kDim),
             dv = filled(kSeq * kDim);
  const auto tensor = [](const std::unique_ptr<float[]>& data) {
    return Tensor{data.get(), DType::f32, kSeq * kDim, kDim, kDim};
  };
  const RowTensor rows{lse.get(), kSeq, kSeq};
  const ForwardOperands forward{tensor(q), tensor(k), tensor(v), tensor(out), rows};
  BackwardOperands backward{tensor(q), tensor(k),  tensor(v),  tensor(out), tensor(dout), rows,
                            {},        tensor(dq), tensor(dk), tensor(dv),  {},           {}};
  constexpr int kThreads = 2;
  constexpr std::int64_t kSlack = 4 << 20;  // stacks of the pool's threads, the allocator
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    p.pass = pass;
    const Kernel* kernel = nullptr;
    ASSERT_TRUE(select_kernel(p, this_cpu(), nullptr, &kernel).ok());
    const std::size_t bytes = kernel->workspace(p, kThreads);
    // Forward: tiles of each thread. Backward: D and at most one float32 dQ as well.
    const std::int64_t linear = pass == Pass::forward ? 0 : kSeq * 4 * (kDim + 4);
    EXPECT_LE(static_cast<std::int64_t>(bytes), linear + kThreads * (std::int64_t{2} << 20)) << kernel->name;
    ASSERT_TRUE(reset_peak());
    const std::int64_t before = peak_bytes();
    {
      std::vector<char> workspace(bytes + 64);
      Launch launch;
      launch.workspace = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(workspace.data()) + 63) / 64 * 64);
      launch.workspace_size = bytes;
      launch.threads = kThreads;
      const Status status =
          pass == Pass::forward ? kernel->forward(p, forward, launch) : kernel->backward(p, backward, launch);
      ASSERT_TRUE(status.ok()) << status.text();
    }
    EXPECT_LE(peak_bytes() - before, static_cast<std::int64_t>(bytes) + kSlack) << kernel->name;
  }
}

}  // namespace
}  // namespace onepass
