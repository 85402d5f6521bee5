// The face of the CUDA kernels: each row of kernels.def defines these in a namespace of the row's name, in an instance
// file that CMake makes of src/cuda/instance.cu.in.
#pragma once

#include "core/problem.h"
#include "core/status.h"
#include "core/tiles.h"

namespace onepass::cuda {

#define ONEPASS_CUDA_PASS_forward ForwardOperands
#define ONEPASS_CUDA_PASS_backward BackwardOperands
#define ONEPASS_CPU_KERNEL(...)
#define ONEPASS_CUDA_KERNEL(name, pass, arch, dtype, head_dim, head_dim_v)                            \
  namespace name {                                                                                    \
  Tiles tiles();                                                                                      \
  std::size_t workspace(const Problem& problem, int threads);                                         \
  /* Launches on launch.stream of launch.device; the workspace may hold anything. */                  \
  Status run(const Problem& problem, const ONEPASS_CUDA_PASS_##pass& operands, const Launch& launch); \
  }
#include "core/kernels.def"
#undef ONEPASS_CUDA_KERNEL
#undef ONEPASS_CPU_KERNEL
#undef ONEPASS_CUDA_PASS_backward
#undef ONEPASS_CUDA_PASS_forward

}  // namespace onepass::cuda
