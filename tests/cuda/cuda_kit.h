// What the tests of CUDA kernels share. Without a GPU they are skipped.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "kit/kit.h"

namespace onepass::cuda_kit {

using check::Array;
using check::Block;
using check::Case;
using check::CaseSpec;
using check::DeviceMirror;
using check::Index;
using check::Reference;
using check::Report;
using kit::sized;

inline bool have_gpu() {
  Machine gpu;
  return this_gpu(0, &gpu).ok();
}

/// CUDA rows of a pass; that this GPU can run.
inline std::vector<const Kernel*> gpu_kernels(Pass pass) {
  return have_gpu() ? check::runnable_kernels(pass, Backend::cuda) : std::vector<const Kernel*>();
}
/// Whose LSE a backward may be given: see check_kernel.
inline const std::vector<const Kernel*>& gpu_forwards() {
  static const std::vector<const Kernel*> list = gpu_kernels(Pass::forward);
  return list;
}
/// Those that serve a case.
inline std::vector<const Kernel*> kernels_for(const Case& c) {
  std::vector<const Kernel*> list = gpu_kernels(c.spec().pass);
  std::erase_if(list, [&](const Kernel* kernel) { return !check::serves(*kernel, c); });
  return list;
}

/// All of the CUDA rows, for parametrised tests: names exist on every machine.
inline std::vector<const Kernel*> all_rows() {
  std::vector<const Kernel*> list;
  for (const Kernel& kernel : kernels()) {
    if (kernel.backend == Backend::cuda) list.push_back(&kernel);
  }
  return list;
}
inline std::string row_name(const testing::TestParamInfo<const Kernel*>& info) {
  return info.param->name;
}

#define ONEPASS_NEEDS_GPU() \
  if (!::onepass::cuda_kit::have_gpu()) GTEST_SKIP() << "no GPU"
#define ONEPASS_NEEDS_GPU_FOR(kernel) \
  ONEPASS_NEEDS_GPU();                \
  if (!::onepass::can_run_here(*(kernel))) GTEST_SKIP() << "this GPU does not run " << (kernel)->name

inline void expect_right(const Kernel& kernel, const CaseSpec& spec) {
  Case c(spec);
  ASSERT_TRUE(check::serves(kernel, c)) << check::describe(spec);
  EXPECT_TRUE(kit::passes(check::check_kernel(kernel, c, 1, gpu_forwards())));
}

/// On every row that serves the case.
inline void expect_everywhere(const CaseSpec& spec) {
  Case c(spec);
  const Reference reference(c);
  for (const Kernel* kernel : kernels_for(c)) {
    EXPECT_TRUE(kit::passes(check::check_kernel(*kernel, c, reference, 1, gpu_forwards())));
  }
}

enum class Workspace { full_of_nan, as_allocated };

/// A case and a workspace in the current device's memory.
class OnDevice {
 public:
  OnDevice(const Kernel& kernel, Case& c, Workspace workspace = Workspace::full_of_nan)
      : kernel_(kernel), case_(c), mirror_(c.memory()) {
    size_ = kernel.workspace(c.problem(), 1);
    workspace_ = check::device_memory(size_);
    status_ = mirror_.status();
    if (status_.ok() && workspace_ == nullptr) status_ = device_error("no memory for the workspace");
    if (status_.ok() && workspace == Workspace::full_of_nan) cudaMemset(workspace_.get(), 0xff, size_);
  }
  const Status& status() const { return status_; }
  const DeviceMirror& mirror() const { return mirror_; }

  /// Launches. device: the one whose memory it is.
  Status run(cudaStream_t stream = nullptr, int device = 0) const {
    const Launch launch{.workspace = workspace_.get(), .workspace_size = size_, .device = device, .stream = stream};
    const Problem problem = mirror_.at(case_.problem());
    return kernel_.pass == Pass::backward ? kernel_.backward(problem, mirror_.at(case_.backward_operands()), launch)
                                          : kernel_.forward(problem, mirror_.at(case_.forward_operands()), launch);
  }
  Status fetch() const { return mirror_.download(); }

 private:
  const Kernel& kernel_;
  Case& case_;
  DeviceMirror mirror_;
  std::size_t size_ = 0;
  std::shared_ptr<void> workspace_;
  Status status_;
};

/// Every output's bits.
inline std::uint64_t bits(const Case& c) {
  std::uint64_t sum = 0;
  for (const Array* array : {&c.out, &c.lse, &c.grad_q, &c.grad_k, &c.grad_v}) {
    if (*array) sum = sum * 0x9E3779B97F4A7C15u + array->bits();
  }
  return sum;
}

/// Compares what the case now holds.
inline Report judged(const Case& c, const Reference& reference) {
  Report report;
  report.name = check::describe(c.spec());
  report.faults = c.faults();
  reference.compare(c, report);
  return report;
}

}  // namespace onepass::cuda_kit
