// A forward of few query rows, in float32 arithmetic from any storage type.
#include "cpu/decode_tasks.h"
#include "cpu/kernel.h"

namespace onepass::cpu::ONEPASS_ISA {

std::size_t decode_workspace(const Problem& problem, int threads) {
  return static_cast<std::size_t>(plan_decode(problem, threads).bytes);
}

void decode(const Problem& problem, const ForwardOperands& operands, const Launch& launch) {
  switch (problem.dtype) {
    case DType::f16: return run_decode<FloatProducts<StoreF16>>(problem, operands, launch);
    case DType::bf16: return run_decode<FloatProducts<StoreBf16>>(problem, operands, launch);
    default: return run_decode<FloatProducts<StoreF32>>(problem, operands, launch);
  }
}

}  // namespace onepass::cpu::ONEPASS_ISA
