// The bfloat16 forward on AMX tiles.
#include "cpu/forward_bf16.h"
#include "cpu/tiles_amx.h"

namespace onepass::cpu::ONEPASS_ISA {

std::size_t forward_workspace(const Problem& problem, int threads) {
  return forward_workspace_bf16<AmxTiles>(problem, threads);
}

void forward(const Problem& problem, const ForwardOperands& operands, const Launch& launch) {
  forward_bf16<AmxTiles>(problem, operands, launch);
}

}  // namespace onepass::cpu::ONEPASS_ISA
