// Bulk copies of contiguous bytes between global and shared memory (sm_90), and the sum of floats into global memory.
// PTX ISA, "cp.async.bulk" and "cp.reduce.async.bulk". Addresses and sizes are multiples of 16 bytes.
#pragma once

#include <cstdint>

namespace onepass::ptx {

/// Global to shared; completes its bytes on `barrier`.
__device__ __forceinline__ void bulk_load(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}
/// Shared to global; belongs to the thread's current bulk group.
__device__ __forceinline__ void bulk_store(void* global, std::uint32_t shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}
/// global += shared, float32 each, atomically by element; belongs to the thread's current bulk group.
__device__ __forceinline__ void bulk_reduce_add(float* global, std::uint32_t shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}
/// Waits until all but the newest `kPending` of this thread's bulk groups have read their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read_but() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace onepass::ptx
