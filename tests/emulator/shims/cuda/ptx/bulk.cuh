// In place of src/cuda/ptx/bulk.cuh.
#pragma once

#include "cuda_language.h"
#include "emulator/machine/tensor_copy.h"

namespace onepass::ptx {

inline void bulk_load(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier) {
  emulator::bulk_load(shared, global, bytes, barrier);
}
inline void bulk_store(void* global, std::uint32_t shared, int bytes) {
  emulator::bulk_store(global, shared, bytes);
}
inline void bulk_reduce_add(float* global, std::uint32_t shared, int bytes) {
  emulator::bulk_reduce_add(global, shared, bytes);
}
template <int kPending>
void bulk_wait_read_but() {
  emulator::bulk_wait(kPending, false);
}

}  // namespace onepass::ptx
