// In place of src/cuda/ptx/tma.cuh.
#pragma once

#include <cuda.h>

#include "cuda_language.h"
#include "emulator/machine/tensor_copy.h"

namespace onepass::ptx {

struct TmaCoordinates {
  int c0, c1, c2, c3, c4;
};

inline void tma_prefetch_map(const CUtensorMap*) {}
inline void tma_load(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier, const TmaCoordinates& at) {
  emulator::load_box(shared, *map, barrier, {at.c0, at.c1, at.c2, at.c3, at.c4});
}
inline void tma_store(const CUtensorMap* map, std::uint32_t shared, const TmaCoordinates& at) {
  emulator::store_box(*map, shared, {at.c0, at.c1, at.c2, at.c3, at.c4});
}
inline void bulk_commit() {
  emulator::bulk_commit();
}
inline void bulk_wait_read() {
  emulator::bulk_wait(0, false);
}
inline void bulk_wait() {
  emulator::bulk_wait(0, true);
}

}  // namespace onepass::ptx
