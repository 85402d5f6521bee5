// In place of src/cuda/ptx/wgmma.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda_language.h"
#include "emulator/machine/wgmma.h"

namespace onepass::ptx {

inline void wgmma_fence() {
  emulator::wgmma_fence();
}
inline void wgmma_commit() {
  emulator::wgmma_commit();
}
template <int kPending>
void wgmma_wait() {
  emulator::wgmma_wait(kPending);
}

inline constexpr std::uint32_t kDescriptorHigh = (1024u >> 4) | (1u << 30);
inline std::uint32_t descriptor_low(std::uint32_t address, std::uint32_t leading_bytes = 16) {
  return (address >> 4) | (leading_bytes >> 4 << 16);
}
inline std::uint64_t descriptor(std::uint32_t low) {
  return std::uint64_t{kDescriptorHigh} << 32 | low;
}

template <class T, int kN>
struct Wgmma {
  static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256);
  static constexpr bool kHalf = std::is_same_v<T, __half>;

  template <int kTransposeA, int kTransposeB>
  static void ss(float (&d)[kN / 2], std::uint64_t a, std::uint64_t b, int accumulate) {
    emulator::wgmma({kN, kHalf, nullptr, a, b, kTransposeA != 0, kTransposeB != 0, accumulate != 0, d});
  }
  template <int kTransposeB>
  static void rs(float (&d)[kN / 2], const std::uint32_t* a, std::uint64_t b, int accumulate) {
    emulator::wgmma({kN, kHalf, a, 0, b, false, kTransposeB != 0, accumulate != 0, d});
  }
};

}  // namespace onepass::ptx
