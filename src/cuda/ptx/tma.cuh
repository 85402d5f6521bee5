// Tensor copies between global and shared memory (TMA, sm_90). PTX ISA, "cp.async.bulk.tensor". A map describes the
// tensor and its box; coordinates count elements, innermost dimension first. What lies outside the tensor is read as
// zeros and never written; the bytes that a load announces are always those of the full box.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace onepass::ptx {

/// Box coordinates in a five-dimensional map.
struct TmaCoordinates {
  int c0, c1, c2, c3, c4;
};

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/// Global to shared; completes its bytes on `barrier`.
__device__ __forceinline__ void tma_load(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier,
                                         const TmaCoordinates& at) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(at.c0), "r"(at.c1), "r"(at.c2), "r"(at.c3), "r"(at.c4)
      : "memory");
}
/// Shared to global; belongs to the thread's current bulk group.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, std::uint32_t shared, const TmaCoordinates& at) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
               "r"(shared), "r"(at.c0), "r"(at.c1), "r"(at.c2), "r"(at.c3), "r"(at.c4)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until this thread's bulk groups have read their shared memory.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// Waits until this thread's bulk groups have written global memory.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace onepass::ptx
