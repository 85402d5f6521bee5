// The bfloat16 backward on AVX512-BF16.
#include "cpu/backward_bf16.h"

#include "cpu/products_dot.h"

namespace onepass::cpu::ONEPASS_ISA {

std::size_t backward_workspace(const Problem& problem, int threads) {
  return backward_workspace_bf16<DotProducts>(problem, threads);
}

void backward(const Problem& problem, const BackwardOperands& operands, const Launch& launch) {
  backward_bf16<DotProducts>(problem, operands, launch);
}

}  // namespace onepass::cpu::ONEPASS_ISA
