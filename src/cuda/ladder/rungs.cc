// The GPU rungs' list and their closed forms: those of the CPU's ladder (src/ladder) at the GPU's tiles.
#include "ladder/rungs.h"

#include "cuda/ladder/ladder.h"
#include "ladder/parallel.h"

namespace onepass::cuda::ladder {
namespace {

namespace cpu = onepass::ladder;

Counts of(const cpu::Totals& totals) {
  return {totals.moved, totals.matmul_flops};
}

/// The CPU's rung holds all of K, then all of V; here they pass by once for each block of rows.
Counts standard_counts(const Shape& s) {
  Counts counts = of(cpu::kStandard.totals(one_head(s)));
  counts.moved.stored = 2 * s.N * s.d + s.Tr() * 2 * s.N * s.d + 4 * s.N * s.pitch();
  return counts;
}
Counts v1_counts(const Shape& s) {
  return of(cpu::kFlashV1.totals(one_head(s)));
}
Counts v2_counts(const Shape& s) {
  return of(cpu::kFlashV2Skipping.totals(one_head(s)));
}
/// The CPU's rung keeps dQ in bf16 and sees all rows. Here dQ is summed in float32: adding to it moves 4 bytes an
/// element one way, as many as reading and writing bf16; clearing it moves Nd float32 for Nd bf16, and rounding it 1.5
/// Nd more.
Counts backward_counts(const Shape& s) {
  std::int64_t rows = s.Tc() * s.N, pairs = s.N * s.N;  // rows that pass by; scores
  for (std::int64_t j = 0; s.causal && j < s.N; j += kBc) {
    rows -= j;
    pairs -= j * min_of<std::int64_t>(kBc, s.N - j);
  }
  const std::int64_t Nd = s.N * s.d;
  // O, dO, dQ; K, V, dK, dV; Q, dO. Clearing, rounding and adding dQ; D; L and D.
  return {{3 * Nd + 4 * Nd + 2 * rows * s.d, 2 * Nd + rows * s.d + s.N + 2 * rows}, 10 * pairs * s.d};
}

std::int64_t by_model(const char* name, const Shape& s) {
  for (const cpu::WarpRung& rung : cpu::warp_rungs()) {
    if (std::string(name) == rung.name) return rung.formula(one_head(s), {kWarps, {kBr, kBc}}).bytes();
  }
  return 0;
}
std::int64_t v1_shared(const Shape& s) {  // Q once, K and V by each warp, for each tile
  return 2 * (s.Tc() + s.Tr() * 2 * kWarps) * s.N * s.d;
}
std::int64_t split_k_shared(const Shape& s) {
  return by_model("warps_split_k", s);
}
std::int64_t split_q_shared(const Shape& s) {
  return by_model("warps_split_q", s);
}
std::int64_t backward_shared(const Shape& s) {  // L and D come from global memory here
  return by_model("warps_backward_split_q", s) - 4 * s.Tc() * 2 * s.N;
}

const Rung kRungs[] = {
    {"standard", "standard attention: S and P in global memory, three kernels", "src/cuda/ladder/standard.cu",
     "2Nd + Tr 2Nd + 4N^2", false, true, 3, standard, standard_grid, standard_counts, nullptr},
    {"flash_v1", "FlashAttention v1: outer loop over K/V, a thread block a head", "src/cuda/ladder/flash_v1.cu",
     "3Nd + 2N + Tc (3Nd + 4N)", false, false, 1, flash_v1, flash_v1_grid, v1_counts, v1_shared},
    {"flash_v1_split_k", "v1 with its warps: each has a part of the keys", "src/cuda/ladder/flash_v1_split_k.cu",
     "3Nd + 2N + Tc (3Nd + 4N)", false, false, 1, flash_v1_split_k, flash_v1_split_k_grid, v1_counts, split_k_shared},
    {"flash_v2", "FlashAttention v2: outer loop over Q, a thread block 64 rows, a warp 16",
     "src/cuda/ladder/flash_v2.cu", "2Nd + N + Tr 2Nd", false, false, 1, flash_v2, flash_v2_grid, v2_counts,
     split_q_shared},
    {"backward_v2", "v2 backward: a thread block 64 keys, dQ added up in float32", "src/cuda/ladder/backward_v2.cu",
     "9Nd + N + Tc (3Nd + 2N)", true, false, 3, backward_v2, backward_v2_grid, backward_counts, backward_shared}};

}  // namespace

std::span<const Rung> rungs() {
  return kRungs;
}

cpu::Problem one_head(const Shape& shape) {
  cpu::Problem p;
  p.N = shape.N;
  p.d = shape.d;
  p.M = 4 * kBc * shape.d;  // tiles of Q, K, V and O: the papers' Bc is 64 then, and so is Br
  p.dtype = DType::bf16;
  p.causal = shape.causal;
  return p;
}

}  // namespace onepass::cuda::ladder
