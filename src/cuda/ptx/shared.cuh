// Shared memory: where a block's begins, plain loads and stores by 32-bit address.
#pragma once

#include <cstdint>

namespace onepass::ptx {

/// The block's dynamic shared memory, as many bytes as its launch said, 1024-byte aligned.
__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char s_dynamic[];
  return s_dynamic;
}

__device__ __forceinline__ void store_shared(std::uint32_t address, std::uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
/// 16 bytes, aligned.
__device__ __forceinline__ void store_shared(std::uint32_t address, std::uint32_t x, std::uint32_t y, std::uint32_t z,
                                             std::uint32_t w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ __forceinline__ void load_shared(std::uint32_t address, std::uint32_t& x, std::uint32_t& y, std::uint32_t& z,
                                            std::uint32_t& w) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
               : "r"(address)
               : "memory");
}
/// Two neighbouring floats, 8-byte aligned.
__device__ __forceinline__ void load_shared(std::uint32_t address, float& x, float& y) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(address) : "memory");
}
/// Four floats, 16-byte aligned.
__device__ __forceinline__ void store_shared(std::uint32_t address, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
__device__ __forceinline__ void load_shared(std::uint32_t address, float& x, float& y, float& z, float& w) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x), "=f"(y), "=f"(z), "=f"(w)
               : "r"(address)
               : "memory");
}

/// 4, 8 or 16 bytes, aligned to as many.
__device__ __forceinline__ void load_shared(std::uint32_t address, std::uint32_t (&x)[1]) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x[0]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(std::uint32_t address, std::uint32_t (&x)[2]) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(std::uint32_t address, std::uint32_t (&x)[4]) {
  load_shared(address, x[0], x[1], x[2], x[3]);
}

}  // namespace onepass::ptx
