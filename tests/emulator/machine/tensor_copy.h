// Asynchronous copies between global and shared memory on compute capability 9.0: boxes of tensors (TMA) and contiguous
// bytes. PTX ISA, "cp.async.bulk.tensor", "cp.async.bulk", "cp.reduce.async.bulk". What a load will write is NaN from
// its issue on and comes in parts; what a store reads must not change until it has been waited for; global memory
// outside every operand is never touched.
#pragma once

#include <cuda.h>

#include "emulator/machine/machine.h"

namespace onepass::emulator {

/// The driver's cuTensorMapEncodeTiled for what is served here: 16-bit elements, 128-byte swizzle, zeros outside.
CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                           const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                           const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);

/// Coordinates count elements, innermost first.
void load_box(std::uint32_t shared, const CUtensorMap& map, std::uint32_t barrier, const int (&at)[5]);
void store_box(const CUtensorMap& map, std::uint32_t shared, const int (&at)[5]);

void bulk_load(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier);
void bulk_store(void* global, std::uint32_t shared, int bytes);
/// float32, element by element.
void bulk_reduce_add(float* global, std::uint32_t shared, int bytes);
/// Closes the running thread's group of stores and reductions.
void bulk_commit();
/// All its groups but the newest `pending` have read shared memory; with `written`, also reached global memory.
void bulk_wait(std::size_t pending, bool written);

}  // namespace onepass::emulator
