// The six tile operations of AMX-BF16 the kernels use, in one place. Tiles are 16 rows of 64 bytes; all numbers are
// compile-time. With ONEPASS_AMX_EMULATED they work on a thread-local tile file in plain C++, so that the kernels'
// correctness is tested on machines without AMX.
#pragma once

#include "cpu/vec.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

inline constexpr int kTileRows = 16;
inline constexpr int kTileBytes = 1024;
inline constexpr int kTileCount = 8;

#if defined(ONEPASS_AMX_EMULATED)

struct alignas(64) TileFile {
  Vec row[kTileCount][kTileRows];
};
thread_local TileFile tile_file;

struct TileScope {};

template <int kTile>
ONEPASS_INLINE void tile_zero() {
  for (int r = 0; r < kTileRows; ++r) tile_file.row[kTile][r] = Vec{};
}
template <int kTile>
ONEPASS_INLINE void tile_load(const void* p, std::int64_t stride) {
  for (int r = 0; r < kTileRows; ++r)
    __builtin_memcpy(&tile_file.row[kTile][r], static_cast<const char*>(p) + r * stride, 64);
}
template <int kTile>
ONEPASS_INLINE void tile_store(void* p, std::int64_t stride) {
  for (int r = 0; r < kTileRows; ++r)
    __builtin_memcpy(static_cast<char*>(p) + r * stride, &tile_file.row[kTile][r], 64);
}

/// A bfloat16 in the high half of each lane, as a float; subnormals are zeros to the hardware.
ONEPASS_INLINE Vec tile_operand(IntVec high) {
  return as_float((high & 0x7f800000) != 0 ? high : IntVec{});
}

template <int kC, int kA, int kB>
inline void tile_dot() {
  for (int m = 0; m < kTileRows; ++m) {
    const IntVec a = as_int(tile_file.row[kA][m]);
    Vec even{}, odd{};
    for (int k = 0; k < 16; ++k) {
      const IntVec x = broadcast_int(a[k]), b = as_int(tile_file.row[kB][k]);
      even = multiply_add(tile_operand(x << 16), tile_operand(b << 16), even);
      odd = multiply_add(tile_operand(x & static_cast<std::int32_t>(0xffff0000u)),
                         tile_operand(b & static_cast<std::int32_t>(0xffff0000u)), odd);
    }
    tile_file.row[kC][m] += even + odd;
  }
}

#else

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// The tiles of this thread, for as long as the object lives: once per worker entry. A thread that leaves tiles
/// configured makes every context switch carry 8 KB.
struct TileScope {
  ONEPASS_INLINE TileScope() {
    const TileConfig config;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ONEPASS_INLINE ~TileScope() { asm volatile("tilerelease"); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// asm instead of the compiler's intrinsics: GCC's paste the tile number into text, so it cannot be a template
// argument, and its load lacks the memory clobber that keeps stores to the operand before it.
template <int kTile>
ONEPASS_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
/// 16 rows of 64 bytes, `stride` bytes apart.
template <int kTile>
ONEPASS_INLINE void tile_load(const void* p, std::int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
ONEPASS_INLINE void tile_store(void* p, std::int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}
/// C[16][16] += A[16][32] B: float32 += bfloat16; row k of B holds rows 2k and 2k + 1 of the factor, interleaved.
template <int kC, int kA, int kB>
ONEPASS_INLINE void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kB), "i"(kA), "i"(kC));
}

#endif

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
