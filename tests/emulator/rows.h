// The rows of kernels.def that the emulator runs, as kernels on host memory.
#pragma once

#include <vector>

#include "core/registry.h"

namespace onepass::emulator {

const std::vector<Kernel>& rows();
/// Those of the forward pass.
std::vector<const Kernel*> forward_rows();

}  // namespace onepass::emulator
