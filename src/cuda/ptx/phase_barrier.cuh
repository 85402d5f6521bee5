// Barriers in shared memory whose threads arrive first and wait later (mbarrier without transactions, sm_80).
// PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier". Addresses are in the shared window.
#pragma once

#include <cstdint>

namespace onepass::ptx {

/// A phase ends after `count` arrivals.
__device__ __forceinline__ void phase_barrier_init(std::uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void phase_barrier_arrive(std::uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
/// Waits for the end of the phase of parity `parity`.
__device__ __forceinline__ void phase_barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra end;\n"
      "bra again;\n"
      "end:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace onepass::ptx
