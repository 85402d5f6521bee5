// The CUDA runtime's header, but for the driver's function that describes tensors: it is the emulator's.
#pragma once

#include_next <cuda_runtime.h>

#include <string_view>

#include "emulator/machine/tensor_copy.h"

namespace onepass::emulator {

inline cudaError_t entry_point(const char* name, void** entry, unsigned, unsigned long long,
                               cudaDriverEntryPointQueryResult* found) {
  const bool known = std::string_view(name) == "cuTensorMapEncodeTiled";
  *entry = known ? reinterpret_cast<void*>(&encode_tensor_map) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // namespace onepass::emulator

#define cudaGetDriverEntryPointByVersion ::onepass::emulator::entry_point
