// What nvcc knows and C++ does not, for device code that a C++ compiler compiles: keywords, the place of a thread,
// the functions of a warp.
#pragma once

#include <vector_functions.h>
#include <vector_types.h>

#include <bit>
#include <cmath>
#include <cstdint>

#include "emulator/machine/machine.h"

#undef __device__
#undef __host__
#undef __global__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (::onepass::emulator::places.thread)
#define blockIdx (::onepass::emulator::places.block)
#define blockDim (::onepass::emulator::places.block_size)
#define gridDim (::onepass::emulator::places.grid)

inline void __syncthreads() {
  onepass::emulator::barrier(0, static_cast<int>(blockDim.x), true);
}
inline int __syncthreads_or(int predicate) {
  bool& some = onepass::emulator::block().some;
  __syncthreads();  // the flag is false
  some |= predicate != 0;
  __syncthreads();  // and complete
  const int result = some ? 1 : 0;
  __syncthreads();  // and read
  some = false;
  return result;
}

namespace onepass::emulator {

inline void check_mask(unsigned mask) {
  if (mask != ~0u) fault("a warp function for the lanes %08x only", mask);
}
/// Every lane gets the value of lane source(own lane).
template <class T, class Source>
T shuffle(const char* what, unsigned mask, T value, Source&& source) {
  check_mask(mask);
  struct Call {
    T value, result;
    int source;
  } call = {value, value, source(static_cast<int>(threadIdx.x) % kWarp)};
  together(what, call, [](Call* const* lanes) {
    for (int i = 0; i < kWarp; ++i) lanes[i]->result = lanes[lanes[i]->source & (kWarp - 1)]->value;
  });
  return call.result;
}
/// Every lane gets `reduce` of all values.
template <class T, class Reduce>
T reduce_warp(const char* what, unsigned mask, T value, Reduce&& reduce) {
  check_mask(mask);
  T result = value;
  struct Call {
    T value;
    T* result;
  } call = {value, &result};
  together(what, call, [&](Call* const* lanes) {
    T all = lanes[0]->value;
    for (int i = 1; i < kWarp; ++i) all = reduce(all, lanes[i]->value);
    for (int i = 0; i < kWarp; ++i) *lanes[i]->result = all;
  });
  return result;
}

}  // namespace onepass::emulator

inline void __syncwarp(unsigned mask = ~0u) {
  onepass::emulator::check_mask(mask);
  int nothing = 0;
  onepass::emulator::together("__syncwarp", nothing, [](int* const*) {});
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return onepass::emulator::shuffle("__shfl_sync", mask, value, [=](int) { return source; });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return onepass::emulator::shuffle("__shfl_xor_sync", mask, value, [=](int lane) { return lane ^ bits; });
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int delta) {
  return onepass::emulator::shuffle("__shfl_up_sync", mask, value,
                                    [=](int lane) { return lane >= delta ? lane - delta : lane; });
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const unsigned own = predicate != 0 ? 1u << threadIdx.x % onepass::emulator::kWarp : 0;
  return onepass::emulator::reduce_warp("__ballot_sync", mask, own, [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int predicate) {
  return onepass::emulator::reduce_warp("__any_sync", mask, predicate != 0 ? 1 : 0, [](int a, int b) { return a | b; });
}
inline int __all_sync(unsigned mask, int predicate) {
  return onepass::emulator::reduce_warp("__all_sync", mask, predicate != 0 ? 1 : 0, [](int a, int b) { return a & b; });
}
inline int __reduce_max_sync(unsigned mask, int value) {
  return onepass::emulator::reduce_warp("__reduce_max_sync", mask, value, [](int a, int b) { return a < b ? b : a; });
}

inline unsigned atomicAdd(unsigned* global, unsigned x) {
  onepass::emulator::check_global(global, 4, 4, "atomicAdd");
  onepass::emulator::progress();
  const unsigned old = *global;
  *global += x;
  return old;
}

/// In a loop that waits for others: the loads in it let them run.
inline void __nanosleep(unsigned) {}

/// Four of the eight bytes of x and y, the lowest three bits of each nibble of `which` say which.
inline std::uint32_t __byte_perm(std::uint32_t x, std::uint32_t y, std::uint32_t which) {
  const std::uint64_t bytes = std::uint64_t{y} << 32 | x;
  std::uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= static_cast<std::uint32_t>(bytes >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return r;
}

inline float __uint_as_float(std::uint32_t x) {
  return std::bit_cast<float>(x);
}
inline std::uint32_t __float_as_uint(float x) {
  return std::bit_cast<std::uint32_t>(x);
}
inline float __int_as_float(int x) {
  return std::bit_cast<float>(x);
}
inline int __float_as_int(float x) {
  return std::bit_cast<int>(x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
template <class T>
T __ldcs(const T* global) {
  return *global;
}
template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
inline void* __cvta_shared_to_generic(std::size_t address) {
  return onepass::emulator::shared(static_cast<std::uint32_t>(address), 0, 1);
}
