// Many random cases on several kernels: what `onepass check` and the tests run.
#pragma once

#include "check/compare.h"

namespace onepass::check {

/// One kernel and storage type.
struct Tally {
  const Kernel* kernel = nullptr;
  DType dtype = DType::f32;
  int cases = 0;
  int failed = 0;
  double worst_ratio = 0;  // error over the float32 formula's error
  double worst_bound_ratio = 0;
  std::string worst_case;             // of worst_ratio
  std::vector<std::string> failures;  // of the first few: Report::text
};

struct Sweep {
  Limits limits;
  std::uint64_t first_seed = 0;
  int cases = 100;
  std::vector<int> threads = {1};          // each case runs with each; all must give the same bits
  std::vector<const Kernel*> forwards;     // see check_kernel
  std::function<void(int done)> progress;  // after each case
};

/// Runs the cases on every kernel of the list that serves them. One tally for each kernel and dtype that had a case.
std::vector<Tally> run_sweep(Kernels kernels, const Sweep& sweep);

/// The kernels of this machine for a pass, by the CPU or by its first GPU; forwards and decodes count as each other's
/// where their rows say so.
std::vector<const Kernel*> runnable_kernels(Pass pass, Backend backend = Backend::cpu);

}  // namespace onepass::check
