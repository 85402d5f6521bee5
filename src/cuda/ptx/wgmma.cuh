// Asynchronous matrix products of a warpgroup (wgmma, sm_90a): D (64 x N, float32, registers) += A (64 x 16) B (16 x N)
// of type T, A from shared memory (ss) or registers (rs), B from shared memory. PTX ISA, "Asynchronous Warpgroup Level
// Matrix Instructions". Thread 32 w + 4 g + t holds D[16 w + g + 8 i][8 j + 2 t + c] in d[4 j + 2 i + c]; packed in
// pairs, d[8 s ...8 s + 7] are the A fragment of the k-step s of a product that takes D as its A.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace onepass::ptx {

/// Before the first product after registers of D or A were written; between products it is not needed.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most the newest `kPending` groups are still under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Operand in shared memory, in panels of 64 columns of 16 bits with the 128-byte swizzle: bits 0-13 address / 16,
/// 16-29 leading offset / 16 (from one panel to the next where N runs along the columns, else ignored), 32-45 stride
/// offset / 16 (8 rows: 1024 bytes), 62-63 swizzle. Made of halves, so that address arithmetic stays 32-bit.
inline constexpr std::uint32_t kDescriptorHigh = (1024u >> 4) | (1u << 30);
__device__ __forceinline__ std::uint32_t descriptor_low(std::uint32_t address, std::uint32_t leading_bytes = 16) {
  return (address >> 4) | (leading_bytes >> 4 << 16);
}
__device__ __forceinline__ std::uint64_t descriptor(std::uint32_t low) {
  std::uint64_t d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(kDescriptorHigh));
  return d;
}

/// ss<transpose_a, transpose_b>, rs<transpose_b>: 0 where k runs along the columns in shared memory, 1 where it runs
/// along the rows. accumulate = 0 overwrites D.
template <class T, int kN>
struct Wgmma;

// Operand numbers of the accumulators, 8 a line, and their constraints.
#define ONEPASS_R16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define ONEPASS_R32 ONEPASS_R16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ONEPASS_R40 ONEPASS_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define ONEPASS_R48 ONEPASS_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define ONEPASS_R56 ONEPASS_R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define ONEPASS_R64 ONEPASS_R56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define ONEPASS_R96                                                                                   \
  ONEPASS_R64                                                                                         \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, " \
  "%83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define ONEPASS_R128                                                                                     \
  ONEPASS_R96                                                                                            \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define ONEPASS_D8(i)                                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define ONEPASS_D16 ONEPASS_D8(0), ONEPASS_D8(8)
#define ONEPASS_D32 ONEPASS_D16, ONEPASS_D8(16), ONEPASS_D8(24)
#define ONEPASS_D40 ONEPASS_D32, ONEPASS_D8(32)
#define ONEPASS_D48 ONEPASS_D40, ONEPASS_D8(40)
#define ONEPASS_D56 ONEPASS_D48, ONEPASS_D8(48)
#define ONEPASS_D64 ONEPASS_D56, ONEPASS_D8(56)
#define ONEPASS_D96 ONEPASS_D64, ONEPASS_D8(64), ONEPASS_D8(72), ONEPASS_D8(80), ONEPASS_D8(88)
#define ONEPASS_D128 ONEPASS_D96, ONEPASS_D8(96), ONEPASS_D8(104), ONEPASS_D8(112), ONEPASS_D8(120)

// One shape of one type; n0 to n6 are the operand numbers that follow the N / 2 accumulators.
#define ONEPASS_WGMMA(T, type, n, half, n0, n1, n2, n3, n4, n5, n6)                                                 \
  template <>                                                                                                       \
  struct Wgmma<T, n> {                                                                                              \
    template <int kTransposeA, int kTransposeB>                                                                     \
    static __device__ __forceinline__ void ss(float (&d)[half], std::uint64_t a, std::uint64_t b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n2                                                         \
                   ", 0;\n"                                                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" ONEPASS_R##half             \
                   "}, %" #n0 ", %" #n1 ", p, 1, 1, %" #n3 ", %" #n4 ";\n}"                                         \
                   : ONEPASS_D##half                                                                                \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA), "n"(kTransposeB));                          \
    }                                                                                                               \
    template <int kTransposeB>                                                                                      \
    static __device__ __forceinline__ void rs(float (&d)[half], const std::uint32_t* a, std::uint64_t b,            \
                                              int accumulate) {                                                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n5                                                         \
                   ", 0;\n"                                                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" ONEPASS_R##half             \
                   "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1, %" #n6 ";\n}"                   \
                   : ONEPASS_D##half                                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposeB));        \
    }                                                                                                               \
  };
#define ONEPASS_WGMMA_BOTH(...)                           \
  ONEPASS_WGMMA_TYPED(__nv_bfloat16, "bf16", __VA_ARGS__) \
  ONEPASS_WGMMA_TYPED(__half, "f16", __VA_ARGS__)
#define ONEPASS_WGMMA_TYPED(T, type, ...) ONEPASS_WGMMA(T, type, __VA_ARGS__)

ONEPASS_WGMMA_BOTH(32, 16, 16, 17, 18, 19, 20, 21, 22)
ONEPASS_WGMMA_BOTH(64, 32, 32, 33, 34, 35, 36, 37, 38)
ONEPASS_WGMMA_BOTH(80, 40, 40, 41, 42, 43, 44, 45, 46)
ONEPASS_WGMMA_BOTH(96, 48, 48, 49, 50, 51, 52, 53, 54)
ONEPASS_WGMMA_BOTH(112, 56, 56, 57, 58, 59, 60, 61, 62)
ONEPASS_WGMMA_BOTH(128, 64, 64, 65, 66, 67, 68, 69, 70)
ONEPASS_WGMMA_BOTH(192, 96, 96, 97, 98, 99, 100, 101, 102)
ONEPASS_WGMMA_BOTH(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef ONEPASS_WGMMA_TYPED
#undef ONEPASS_WGMMA_BOTH
#undef ONEPASS_WGMMA
#undef ONEPASS_D128
#undef ONEPASS_D96
#undef ONEPASS_D64
#undef ONEPASS_D56
#undef ONEPASS_D48
#undef ONEPASS_D40
#undef ONEPASS_D32
#undef ONEPASS_D16
#undef ONEPASS_D8
#undef ONEPASS_R128
#undef ONEPASS_R96
#undef ONEPASS_R64
#undef ONEPASS_R56
#undef ONEPASS_R48
#undef ONEPASS_R40
#undef ONEPASS_R32
#undef ONEPASS_R16

}  // namespace onepass::ptx
