// The face of one instruction set's kernels. src/cpu/forward.cc, backward.cc and decode.cc are compiled once per
// instruction set with -DONEPASS_ISA=<name>; each defines its functions in namespace onepass::cpu::<name>.
#pragma once

#include "core/problem.h"

namespace onepass::cpu {

/// Raw results, so that files compiled for one instruction set instantiate nothing from the standard library.
/// 0: done. Everything that can be refused was refused before.
#define ONEPASS_CPU_ISA(isa)                                                                     \
  namespace isa {                                                                                \
  std::size_t forward_workspace(const Problem& problem, int threads);                            \
  void forward(const Problem& problem, const ForwardOperands& operands, const Launch& launch);   \
  std::size_t backward_workspace(const Problem& problem, int threads);                           \
  void backward(const Problem& problem, const BackwardOperands& operands, const Launch& launch); \
  std::size_t decode_workspace(const Problem& problem, int threads);                             \
  void decode(const Problem& problem, const ForwardOperands& operands, const Launch& launch);    \
  }

ONEPASS_CPU_ISA(portable)
ONEPASS_CPU_ISA(avx2)
ONEPASS_CPU_ISA(avx512)
ONEPASS_CPU_ISA(avx512bf16)
ONEPASS_CPU_ISA(amx)
ONEPASS_CPU_ISA(amx_emulated)  // the AMX kernels in plain C++: in tests only
#undef ONEPASS_CPU_ISA

}  // namespace onepass::cpu
