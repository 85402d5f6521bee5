// Asynchronous copies from global to shared memory (cp.async, sm_80), 16 bytes or fewer a thread.
// PTX ISA, "Data Movement and Conversion Instructions: cp.async".
#pragma once

#include <cstdint>

namespace onepass::ptx {

/// Address of a shared-memory object in the shared window, as the instructions below take it.
__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Copies the first `bytes` (0 to 16) of 16 bytes and fills the rest with zeros; both addresses 16-byte aligned. With
/// bytes = 0 nothing is read. Goes past L1, and asks L2 for the 128-byte line.
__device__ __forceinline__ void cp_async_16(std::uint32_t shared, const void* global, std::uint32_t bytes = 16) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

/// Copies 16 bytes, or stores 16 zeros and reads nothing: one instruction, where a variable count of bytes takes ten.
__device__ __forceinline__ void cp_async_16_or_zeros(std::uint32_t shared, const void* global, bool copy) {
  asm volatile(
      "{\n"
      ".reg .pred zeros;\n"
      "setp.eq.s32 zeros, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, zeros;\n"
      "}" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(copy))
      : "memory");
}

/// cp_async_16 for 4 and 8 bytes, through L1.
template <int kBytes>
__device__ __forceinline__ void cp_async_small(std::uint32_t shared, const void* global, std::uint32_t bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes), "r"(bytes)
               : "memory");
}

/// Closes the group of this thread's copies since the last one.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most the newest `kPending` groups of this thread are still under way. Other threads' copies need a
/// barrier after it.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace onepass::ptx
