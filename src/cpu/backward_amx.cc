// The bfloat16 backward on AMX tiles.
#include "cpu/backward_bf16.h"
#include "cpu/products_amx.h"

namespace onepass::cpu::ONEPASS_ISA {

std::size_t backward_workspace(const Problem& problem, int threads) {
  return backward_workspace_bf16<AmxProducts>(problem, threads);
}

void backward(const Problem& problem, const BackwardOperands& operands, const Launch& launch) {
  backward_bf16<AmxProducts>(problem, operands, launch);
}

}  // namespace onepass::cpu::ONEPASS_ISA
