// What runs before and after the main kernel: D, LSE, the plan, and a zero dQ; dQ in its type; zeros where no gradient
// is.
#pragma once

#include "cuda/device/row_dots.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/backward_plan.cuh"

namespace onepass::cuda::sm90 {

inline constexpr int kClearThreads = 256;

/// Threads of a block of backward_prepare: a warp takes 16 query rows.
template <class C>
inline constexpr int kPrepareThreads = 2 * C::kBlockQ;

/// Statistics of a query tile of one head, and the number of its visits; its dQ set to 0.
template <class C>
__device__ __forceinline__ void prepare_rows(const BackwardParams& p, int head, std::int64_t tile) {
  using T = typename C::T;
  const TileOwner owner = tile_owner(p.mask.cu_seqlens_q, tile, p.batch, p.total_q, p.item_q_tiles, C::kBlockQ);
  const Sequence s = p.sequence(owner.b);
  const Extent x = seen(s);
  const std::int64_t first = (tile - owner.first) * C::kBlockQ, index = head * p.tiles + tile;
  if (first >= x.rows.size()) return;
  if (p.passes) {
    auto* const g_dq = reinterpret_cast<float4*>(p.dq + index * C::kDqFloats);
#pragma unroll
    for (int i = 0; i < C::kDqFloats / 4 / kPrepareThreads<C>; ++i) {
      g_dq[i * kPrepareThreads<C> + threadIdx.x] = {0, 0, 0, 0};
    }
  }
  if (p.visits != nullptr && threadIdx.x == 0) {
    const std::int64_t begin = x.rows.begin + first;
    const Interval keys = s.visible_to_any(begin, min_of<std::int64_t>(begin + C::kBlockQ, x.rows.end));
    p.visits[index] =
        VisitCount::of((keys.end - 1 - x.keys.begin) / C::kBlockK - (keys.begin - x.keys.begin) / C::kBlockK + 1);
  }

  const BackwardOperands& o = p.operands;
  const int warp = threadIdx.x / 32;
  const void *g_out[2], *g_grad[2];
  std::int64_t rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t rank = first + 16 * warp + threadIdx.x % 32 / 4 + 8 * half;
    const bool inside = rank < x.rows.size();
    rows[half] = inside ? s.q_row + x.rows.begin + rank : -1;
    g_out[half] = inside ? o.out.row(owner.b, rows[half], head) : nullptr;
    g_grad[half] = inside ? o.grad_out.row(owner.b, rows[half], head) : nullptr;
  }
  const float2 sums = o.out.dtype == DType::f32 ? row_dots_f32<T, C::kDV>(g_out, g_grad, true, p.head_dim_v)
                                                : row_dots<T, C::kDV>(g_out, true, g_grad, true, p.head_dim_v);
  if (!owns_row_dots()) return;
  float* const g_stats = p.stats + index * C::kStatFloats;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // P = 0 past the end, and where a row that could see keys has no weight
    const float lse = rows[half] < 0 ? INFINITY : *o.lse.row(owner.b, head, rows[half]) * 1.4426950408889634f;
    const bool empty = lse == -INFINITY || lse == INFINITY;
    float sum = half == 0 ? sums.x : sums.y;
    if (!empty && o.grad_lse) sum -= *o.grad_lse.row(owner.b, head, rows[half]);
    const int r = 16 * warp + threadIdx.x % 32 / 4 + 8 * half;
    float* const g = g_stats + (r % 8 / 2) * C::kStatWidth + r / 8 * 2 + r % 2;
    g[0] = empty ? INFINITY : lse;
    g[4 * C::kStatWidth] = empty ? 0 : sum;
  }
}

/// Blocks: heads_q tiles for the rows, then enough for a thread each key tile.
template <class C>
__global__ void __launch_bounds__(kPrepareThreads<C>) backward_prepare(const __grid_constant__ BackwardParams p) {
  const std::int64_t row_blocks = p.heads_q * p.tiles;
  // Heads first: in memory their rows are neighbours.
  if (blockIdx.x < row_blocks) return prepare_rows<C>(p, blockIdx.x % p.heads_q, blockIdx.x / p.heads_q);
  const std::int64_t index = (blockIdx.x - row_blocks) * kPrepareThreads<C> + threadIdx.x;
  if (index == 0) *p.next_tile = 0;
  if (index < p.key_tiles * p.heads_kv) p.plan[index] = plan_key_tile<C>(p, index);
}

/// Shared memory of the next kernel.
template <class C>
inline constexpr int kFinishBytes = C::kDqFloats * 2;

/// Scales and rounds a tile of dQ; a warp takes 16 rows of a piece.
template <class C>
__global__ void __launch_bounds__(32 * 4 * C::kPieces) backward_finish(const __grid_constant__ BackwardParams p) {
  using T = typename C::T;
  constexpr int kColumns = C::kPiece, kPiecesOfRows = C::kD / kColumns, kLanes = kColumns / 8;  // lanes of a row
  // (16, piece) of each warp, the 16-byte parts of a row permuted so that eight rows fill the banks.
  auto* const s_rows = reinterpret_cast<unsigned char(*)[16 * kLanes * 16]>(ptx::dynamic_shared());
  const auto place = [](int row, int column) { return (row * kLanes + (column ^ (row / (8 / kLanes) % kLanes))) * 16; };
  const int head = blockIdx.x % p.heads_q;
  const std::int64_t tile = blockIdx.x / p.heads_q, index = head * p.tiles + tile;
  const TileOwner owner = tile_owner(p.mask.cu_seqlens_q, tile, p.batch, p.total_q, p.item_q_tiles, C::kBlockQ);
  const Sequence s = p.sequence(owner.b);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int piece = warp / 4;
  const std::int64_t first =
      (tile - owner.first) * C::kBlockQ + piece / kPiecesOfRows * 64 + warp % 4 * 16;  // of the warp's rows
  const Extent x = seen(s);
  if (first >= x.rows.size()) return;
  const std::uint32_t s_own = ptx::shared_address(s_rows[warp]);
  const auto* const g_dq =
      reinterpret_cast<const float4*>(p.dq + index * C::kDqFloats + warp * (C::kPieceFloats / 4)) + lane;
  float4 part[kColumns / 8];
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) part[i] = __ldcs(g_dq + 32 * i);
  std::uint32_t packed[kColumns / 4];
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    packed[2 * i] = ptx::pack<T>(part[i].x * p.scale, part[i].y * p.scale);
    packed[2 * i + 1] = ptx::pack<T>(part[i].z * p.scale, part[i].w * p.scale);
  }
#pragma unroll
  for (int i = 0; i < kColumns / 16; ++i) {
    const int row = lane % 16, column = 2 * i + lane / 16;  // of 8 elements
    ptx::stmatrix_x4(s_own + place(row, column), packed[4 * i], packed[4 * i + 1], packed[4 * i + 2],
                     packed[4 * i + 3]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kLanes / 2; ++i) {
    const int r = lane / kLanes + 32 / kLanes * i, column = lane % kLanes;
    const std::int64_t rank = first + r;
    if (rank >= x.rows.size()) continue;
    const uint4 value = *reinterpret_cast<const uint4*>(s_rows[warp] + place(r, column));
    const int at = piece % kPiecesOfRows * kColumns + column * 8;
    auto* const g =
        reinterpret_cast<std::uint16_t*>(p.operands.grad_q.row(owner.b, s.q_row + x.rows.begin + rank, head)) + at;
    if (at + 8 <= p.head_dim) {
      *reinterpret_cast<uint4*>(g) = value;
    } else {
      const std::uint32_t words[4] = {value.x, value.y, value.z, value.w};
      for (int k = 0; k < 8 && at + k < p.head_dim; ++k) {
        g[k] = static_cast<std::uint16_t>(words[k / 2] >> (k % 2 * 16));
      }
    }
  }
}

/// Zeros for one row of all heads, by a warp.
__device__ inline void clear_row(const Tensor& x, std::int64_t b, std::int64_t row, int heads, int dim) {
  for (int i = threadIdx.x % 32; i < heads * dim; i += 32) {
    reinterpret_cast<std::uint16_t*>(x.row(b, row, i / dim))[i % dim] = 0;
  }
}

/// Zeros for dK and dV of keys that no row sees, and for dQ of rows that see no key. A warp for each row of K, then for
/// each of Q.
template <class C>
__global__ void __launch_bounds__(kClearThreads) backward_clear(const __grid_constant__ BackwardParams p) {
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kClearThreads / 32) + threadIdx.x / 32;
  const BackwardOperands& o = p.operands;
  const bool packed = p.mask.varlen;
  const std::int64_t key_rows = packed ? p.total_k : p.batch * p.seq_k;
  const bool of_keys = row < key_rows;
  if (!of_keys) row -= key_rows;
  if (!of_keys && row >= (packed ? p.total_q : p.batch * p.seq_q)) return;
  const std::int64_t seq = of_keys ? p.seq_k : p.seq_q;
  const std::int32_t* const g_offsets = of_keys ? p.mask.cu_seqlens_k : p.mask.cu_seqlens_q;
  const std::int64_t b = packed ? last_begun(p.batch, row, [&](std::int64_t i) { return g_offsets[i]; }) : row / seq;
  const std::int64_t item = packed ? 0 : b;
  if (!packed) row %= seq;
  if (p.batch > 0) {
    const Sequence s = p.sequence(b);
    const Extent x = seen(s);
    const Interval used = of_keys ? x.keys : x.rows;
    const std::int64_t first = of_keys ? s.k_row : s.q_row;
    if (first + used.begin <= row && row < first + used.end) return;
  }
  if (of_keys) {
    clear_row(o.grad_k, item, row, p.heads_kv, p.head_dim);
    clear_row(o.grad_v, item, row, p.heads_kv, p.head_dim_v);
  } else {
    clear_row(o.grad_q, item, row, p.heads_q, p.head_dim);
  }
}

}  // namespace onepass::cuda::sm90
