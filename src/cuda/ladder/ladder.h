// The ladder on the GPU: the derivation's rungs as CUDA kernels in their plainest form. All of them use the same tiles
// and warps, so that nothing differs between two rungs but the algorithm. bfloat16 in, float32 sums.
#pragma once

#include <cuda_bf16.h>

#include <span>
#include <string>

#include "core/problem.h"
#include "core/status.h"
#include "ladder/rung.h"

namespace onepass::cuda::ladder {

using Bf16 = __nv_bfloat16;

/// Query rows and keys of a tile, and the warps of a thread block.
inline constexpr int kBr = 64, kBc = 64, kWarps = 4, kThreads = 32 * kWarps;

/// `heads` (batch x heads) attentions of N queries and keys of d numbers, d 64 or 128.
struct Shape {
  std::int64_t heads = 1, N = 0, d = 64;
  bool causal = false;

  ONEPASS_INLINE std::int64_t Tr() const { return ceil_div(N, kBr); }
  ONEPASS_INLINE std::int64_t Tc() const { return ceil_div(N, kBc); }
  /// Numbers between two rows of S or P: whole tiles.
  ONEPASS_INLINE std::int64_t pitch() const { return Tc() * kBc; }
  /// Row i sees the keys before this one.
  ONEPASS_INLINE std::int64_t end(std::int64_t i) const { return i >= N ? 0 : causal ? i + 1 : N; }
};

/// Device memory. A rung takes what it needs.
struct Arrays {
  const Bf16 *Q = nullptr, *K = nullptr, *V = nullptr, *dO = nullptr;  // (heads, N, d)
  Bf16 *O = nullptr, *dQ = nullptr, *dK = nullptr, *dV = nullptr;      // (heads, N, d)
  Bf16 *S = nullptr, *P = nullptr;                                     // (heads, N, pitch), standard only
  float *m = nullptr, *l = nullptr;                                    // (heads, N), v1
  float* L = nullptr;                                                  // (heads, N), v2
  float *D = nullptr, *dQ_sum = nullptr;                               // (heads, N), (heads, N, d), backward
};

/// The thread blocks of a rung's main kernel, and the shared memory of each.
struct Grid {
  std::int64_t blocks = 0, shared_bytes = 0;
};
/// Of one head.
struct Counts {
  onepass::ladder::Elements moved;  // between global memory and the multiprocessors
  std::int64_t matmul_flops = 0;
  std::int64_t bytes() const { return moved.bytes(DType::bf16); }
};

struct Rung {
  const char* name;     // "flash_v2"
  const char* title;    // one line
  const char* file;     // src/cuda/ladder/flash_v2.cu
  const char* formula;  // of the elements that a head moves
  bool backward = false;
  bool squares = false;  // it keeps N x N matrices
  int kernels = 1;       // launched by a run
  Status (*run)(const Shape& shape, const Arrays& arrays, const Launch& launch) = nullptr;
  Grid (*grid)(const Shape& shape) = nullptr;
  Counts (*counts)(const Shape& shape) = nullptr;
  /// Bytes that a head's warps read from and write to shared memory, beside what is copied there; null: not modelled.
  std::int64_t (*shared_traffic)(const Shape& shape) = nullptr;
};

/// In the order of the story.
std::span<const Rung> rungs();

/// One head as the CPU's ladder takes it, with the tiles above.
onepass::ladder::Problem one_head(const Shape& shape);

#define ONEPASS_GPU_RUNG(name)                                                \
  Status name(const Shape& shape, const Arrays& arrays, const Launch& where); \
  Grid name##_grid(const Shape& shape)
ONEPASS_GPU_RUNG(standard);
ONEPASS_GPU_RUNG(flash_v1);
ONEPASS_GPU_RUNG(flash_v1_split_k);
ONEPASS_GPU_RUNG(flash_v2);
ONEPASS_GPU_RUNG(backward_v2);
#undef ONEPASS_GPU_RUNG

}  // namespace onepass::cuda::ladder
