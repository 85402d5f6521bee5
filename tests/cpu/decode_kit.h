// What the tests of the decode kernels share.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "check/compare.h"
#include "check/sweep.h"
#include "cpu/every_kernel.h"
#include "kit/kit.h"

namespace onepass::decode_kit {

using check::Array;
using check::Case;
using check::CaseSpec;
using check::Index;
using check::Values;

inline std::vector<const Kernel*> decode_kernels() {
  std::vector<const Kernel*> list;
  for (const Kernel* kernel : check::runnable_kernels(Pass::decode)) {
    if (kernel->pass == Pass::decode) list.push_back(kernel);
  }
  if (this_cpu().avx512bf16) list.push_back(&every_kernel::kEmulatedDecode);
  return list;
}

inline CaseSpec sized(std::int64_t seq_q, std::int64_t seq_k, std::int64_t heads_q, std::int64_t heads_kv,
                      std::int64_t dim) {
  CaseSpec spec = kit::sized(Pass::decode, DType::f32, seq_q, seq_k, dim);
  spec.heads_q = heads_q;
  spec.heads_kv = heads_kv;
  return spec;
}

/// Every kernel that serves the case, within the bound and with the same bits for every number of threads.
inline void expect_right(const CaseSpec& spec, const std::vector<int>& threads = {1, 2, 3, 8}) {
  if (!kit::chosen(spec)) return;
  Case c(spec);
  const check::Reference reference(c);
  ASSERT_TRUE(reference.status().ok()) << reference.status().text();
  for (const Kernel* kernel : decode_kernels()) {
    if (!check::serves(*kernel, c)) continue;
    std::uint64_t bits = 0;
    for (const int n : threads) {
      const check::Report report = check::check_kernel(*kernel, c, reference, n);
      EXPECT_TRUE(kit::passes(report));
      if (n != threads.front()) {
        EXPECT_EQ(report.bits, bits) << report.name;
      }
      bits = report.bits;
    }
  }
}
inline void expect_right_in_each_type(CaseSpec spec) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    spec.dtype = dtype;
    expect_right(spec);
  }
}

/// Exactly as large as asked for, followed by a guard.
class Workspace {
 public:
  explicit Workspace(std::size_t size) : size_(size), memory_(size / 64 + 3) {
    std::memset(memory_.data(), 0xff, memory_.size() * sizeof(Line));
  }
  Launch launch(int threads) { return {.workspace = memory_.data(), .workspace_size = size_, .threads = threads}; }
  bool intact() const {
    const auto* byte = reinterpret_cast<const unsigned char*>(memory_.data());
    for (std::size_t n = size_; n < memory_.size() * sizeof(Line); ++n) {
      if (byte[n] != 0xff) return false;
    }
    return true;
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::size_t size_;
  std::vector<Line> memory_;
};

/// Runs every kernel on operands that the test filled, then looks at the outputs.
template <class Look>
void run_each(Case& c, Look&& look) {
  for (const Kernel* kernel : decode_kernels()) {
    if (!check::serves(*kernel, c)) continue;
    SCOPED_TRACE(kernel->name);
    c.reset();
    Workspace workspace(kernel->workspace(c.problem(), 3));
    ASSERT_TRUE(kernel->forward(c.problem(), c.forward_operands(), workspace.launch(3)).ok());
    EXPECT_TRUE(workspace.intact());
    EXPECT_TRUE(c.faults().empty());
    look();
  }
}
template <class F>
void fill(Array& array, F&& value) {
  array.each([&](const Index& i, std::int64_t at) { array.set(at, value(i)); });
  array.seal();
}
inline double out(const Case& c, std::int64_t row, std::int64_t x = 0, std::int64_t head = 0, std::int64_t b = 0) {
  return c.out.get(c.out.offset({b, row, head, x}));
}
inline double lse(const Case& c, std::int64_t row, std::int64_t head = 0, std::int64_t b = 0) {
  return c.lse.get(c.lse.offset({b, head, row, 0}));
}

}  // namespace onepass::decode_kit
