// The backward pass in float32. One thread block owns block_k keys of one KV head and passes over the query tiles that
// see them, for all query heads of the group. Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T, so that
// P^T and dS^T leave the products in the registers that dV += P^T dO and dK += dS^T Q take them from; dQ += dS K needs
// dS from shared memory. FlashAttention-2 (Dao, 2023), algorithm 2, with the loop over keys outside.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/reduce.cuh"
#include "cuda/sm80/backward_f32_tiles.h"
#include "cuda/sm80/backward_params.h"
#include "cuda/sm80/backward_scope.cuh"
#include "cuda/sm80/f32_products.cuh"

namespace onepass::cuda::sm80 {

/// Shape: kHeadDim, the bucket of both dimensions, and kTile.
template <class Shape>
class BackwardF32Block {
  static constexpr BackwardF32Tile kTile = Shape::kTile;
  static constexpr int kD = Shape::kHeadDim;
  static_assert(kTile.valid(kD));
  static constexpr int kQ = kTile.block_q, kK = kTile.block_k();
  static constexpr int kThreads = kTile.threads(), kWarps = kTile.warps();
  static constexpr int kM = kTile.key_tiles;  // 16-key tiles of a warp
  static constexpr int kN = kQ / 8;
  static constexpr int kDqM = kQ / 16 / kTile.dq_warps_q;
  static constexpr int kDqUnits = kD / (16 * kTile.dq_groups) / kTile.dq_warps_d;
  using Tile = F32Tile<kD>;
  using Lanes = F32Lanes<kD>;
  using TileDS = F32Tile<kK>;
  using LanesDS = F32Lanes<kK>;
  static constexpr Split kSums = Split::two;  // of dV, dK and dQ; scores and dP need three parts
  using Products = Operands<kSums>;

  // Shared memory, in bytes from its start.
  static constexpr int kOffsetV = kK * Tile::kPitch, kOffsetQ = 2 * kOffsetV;
  static constexpr int kOffsetDO = kOffsetQ + kQ * Tile::kPitch, kOffsetDS = kOffsetDO + kQ * Tile::kPitch;
  static constexpr int kOffsetStats = kOffsetDS + kQ * TileDS::kPitch, kOffsetScope = kOffsetStats + 8 * kQ;
  static_assert(kOffsetScope + kTile.kScopeBytes == kTile.shared_bytes(kD));
  static_assert(sizeof(KeyScope) <= kTile.kScopeBytes);

  static constexpr int kPair =
      1;  // and on, a barrier a pair of warps: P is in shared memory (values arrives, keys waits)

 public:
  __device__ __forceinline__ BackwardF32Block(const BackwardParams& params, unsigned char* s_bytes)
      : p(params),
        scope_(*reinterpret_cast<KeyScope*>(s_bytes + kOffsetScope)),
        s_base_(ptx::shared_address(s_bytes)),
        lane_(threadIdx.x % 32),
        warp_(__shfl_sync(~0u, threadIdx.x / 32, 0)) {}

  __device__ __forceinline__ void run(std::int64_t block) {
    if (threadIdx.x == 0) find_scope(block);
    __syncthreads();  // all threads: scope_ is written
    if (scope_.rows_left <= 0) return;
    load_keys();
    if (scope_.tile_begin < scope_.tile_end) load_queries(0, scope_.tile_begin);
    if (warp_ < kTile.pairs) {
      pass<true>();
    } else {
      pass<false>();
    }
  }

 private:
  __device__ __forceinline__ int pair() const { return warp_ % kTile.pairs; }
  __device__ __forceinline__ int first_key() const { return pair() * 16 * kM; }

  __device__ __forceinline__ void find_scope(std::int64_t block) {
    KeyScope& k = scope_;
    k.key_block = block % p.key_blocks;
    k.kv_head = block / p.key_blocks % p.heads_kv;
    k.b = block / p.key_blocks / p.heads_kv;
    k.sequence = p.sequence(k.b);
    const std::int64_t row = k.key_block * kK;
    k.rows_left = static_cast<int>(clamp_to<std::int64_t>(p.item_keys(k.b, k.sequence) - row, 0, kK));
    k.first_key = row - k.sequence.k_start;
    k.key_row = k.sequence.k_row + k.first_key;
    const std::int64_t head = k.kv_head * p.group;
    k.g_q = p.operands.q.row(k.b, k.sequence.q_row, head);
    k.g_grad_out = p.operands.grad_out.row(k.b, k.sequence.q_row, head);
    const std::int64_t first_tile = head * p.tiles + p.first_tile(k.b, k.sequence, kQ);
    k.g_stats = p.stats + first_tile * (2 * kQ);
    k.g_dq = p.dq_sum + first_tile * (kQ * kD);
    k.g_turns = p.turns + first_tile * kWarps;
    k.find_rows(kQ, kK);
  }

  __device__ __forceinline__ void load_keys() const {
    const auto load = [&](int offset, const Tensor& t, int dim, bool aligned) {
      load_f32_rows<kD, kK, kThreads>(s_base_ + offset,
                                      reinterpret_cast<const float*>(t.row(scope_.b, scope_.key_row, scope_.kv_head)),
                                      t.stride_seq, scope_.key_begin, scope_.key_end, dim, aligned);
    };
    load(0, p.operands.k, p.head_dim, p.k_aligned);
    load(kOffsetV, p.operands.v, p.head_dim_v, p.v_aligned);
  }
  /// Q, dO and statistics of tile `tile` of head `g` of the group.
  __device__ __forceinline__ void load_queries(int g, int tile) const {
    const int begin = scope_.row_begin(tile, kQ), end = scope_.row_end(tile, kQ);
    const auto load = [&](int offset, const char* g_first, const Tensor& t, int dim, bool aligned) {
      const float* g_rows =
          reinterpret_cast<const float*>(g_first) + std::int64_t{tile} * kQ * t.stride_seq + g * t.stride_head;
      load_f32_rows<kD, kQ, kThreads>(s_base_ + offset, g_rows, t.stride_seq, begin, end, dim, aligned);
    };
    load(kOffsetQ, scope_.g_q, p.operands.q, p.head_dim, p.q_aligned);
    load(kOffsetDO, scope_.g_grad_out, p.operands.grad_out, p.head_dim_v, p.grad_out_aligned);
    static_assert(kQ / 2 <= kThreads);
    if (threadIdx.x < kQ / 2) {
      ptx::cp_async_16(s_base_ + kOffsetStats + threadIdx.x * 16,
                       scope_.g_stats + (g * p.tiles + tile) * (2 * kQ) + threadIdx.x * 4);
    }
  }

  /// kValues: this warp computes P and dV; else dS and dK.
  template <bool kValues>
  __device__ __forceinline__ void pass() {
    float r_sum[kM][kD / 8][4];  // dV or dK of this warp's keys
    set_zero(r_sum);
    int g = scope_.tile_begin < scope_.tile_end ? 0 : p.group, tile = scope_.tile_begin;
#pragma unroll 1
    while (g < p.group) {
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();  // all: Q and dO have landed, from every thread; nobody reads the last tile's dS any more
      if constexpr (kValues) {
        add_dv(tile, r_sum);
      } else {
        add_dk(tile, r_sum);
      }
      __syncthreads();  // all: dS is written, and nobody reads Q, dO and statistics any more
      const int last_g = g, last_tile = tile;
      if (++tile == scope_.tile_end) tile = scope_.tile_begin, ++g;
      if (g < p.group) load_queries(g, tile);
      add_dq(last_g, last_tile);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    const auto& o = p.operands;
    if constexpr (kValues) {
      write(r_sum, 1.0f, o.grad_v, p.head_dim_v, p.grad_v_aligned);
    } else {
      write(r_sum, p.scale, o.grad_k, p.head_dim, p.grad_k_aligned);
    }
  }

  __device__ __forceinline__ std::uint32_t own_rows_a(int offset) const {
    return s_base_ + offset + first_key() * Tile::kPitch + Lanes::rows_a(lane_);
  }
  /// Two neighbouring rows' statistics: log-sum-exp (which = 0) or D (1) of the rows 8 n + 2 t and behind it.
  __device__ __forceinline__ void load_stats(int which, int n, float (&x)[2]) const {
    ptx::load_shared(s_base_ + kOffsetStats + 4 * (which * kQ + 8 * n + lane_ % 4 * 2), x[0], x[1]);
  }
  /// Zero for hidden pairs of a tile of transposed scores.
  __device__ __forceinline__ void hide(int tile, float (&r)[kM][kN][4]) const {
    if (scope_.full(tile)) return;
    const TileMask mask = scope_.mask(tile, kQ);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int begin, end;
        mask.keys(8 * n + lane_ % 4 * 2 + i, begin, end);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int key = first_key() + 16 * m + 8 * half + lane_ / 4;
            if (key < begin || key >= end) r[m][n][2 * half + i] = 0;
          }
        }
      }
    }
  }
  /// Address of element e of block (m, n) of this warp's transposed scores in the tile of dS (block_q, block_k): in
  /// each eight keys the even ones come first, as the product with K takes them. P is handed over where dS goes
  /// afterwards.
  __device__ __forceinline__ std::uint32_t s_score(std::uint32_t s_lane, int m, int n, int e) const {
    const std::uint32_t row = e % 2 == 0 ? s_lane : (s_lane ^ 16u) + TileDS::kPitch;
    return TileDS::advance(row, 8 * n, 4 * m + e / 2 * 2);
  }
  __device__ __forceinline__ std::uint32_t s_score_lane() const {
    const int g = lane_ / 4, t = lane_ % 4;
    return s_base_ + kOffsetDS + TileDS::offset(2 * t, first_key() / 4 + g % 2) + g / 2 * 4;
  }
  __device__ __forceinline__ void store_scores(const float (&r)[kM][kN][4]) const {
    const std::uint32_t s_lane = s_score_lane();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) ptx::store_shared(s_score(s_lane, m, n, e), __float_as_uint(r[m][n][e]));
      }
    }
  }
  /// sum += R^T B, R a result of multiply_rows, B the tile of Q or dO at `offset`.
  __device__ __forceinline__ void add_product(float (&r_sum)[kM][kD / 8][4], const float (&r)[kM][kN][4], int offset,
                                              int columns) const {
    typename Products::A a[kN / Products::kLoads][kM];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int m = 0; m < kM; ++m) a[n / Products::kLoads][m].set_result(n % Products::kLoads, r[m][n]);
    }
    multiply_across<kM, kN, kD, kTile.groups, kSums>(r_sum, a, s_base_ + offset + Lanes::across_b(lane_), columns,
                                                     [](int) { return 1.0f; });
  }

  __device__ __forceinline__ void add_dv(int tile, float (&r_dv)[kM][kD / 8][4]) const {
    float r_p[kM][kN][4];
    multiply_rows<kM, kN, kD, Split::three>(r_p, own_rows_a(0), s_base_ + kOffsetQ + Lanes::rows_b(lane_), lines());
    constexpr float kLog2e = 1.44269504088896341f;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float lse[2];
      load_stats(0, n, lse);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) r_p[m][n][e] = ptx::exp2_approx(fmaf(r_p[m][n][e], p.scale, -lse[e % 2]) * kLog2e);
      }
    }
    hide(tile, r_p);
    store_scores(r_p);
    ptx::named_barrier_arrive(kPair + pair(), 64);
    add_product(r_dv, r_p, kOffsetDO, p.head_dim_v);
  }

  __device__ __forceinline__ void add_dk(int tile, float (&r_dk)[kM][kD / 8][4]) const {
    float r_ds[kM][kN][4];
    multiply_rows<kM, kN, kD, Split::three>(r_ds, own_rows_a(kOffsetV), s_base_ + kOffsetDO + Lanes::rows_b(lane_),
                                            lines_v());
    ptx::named_barrier_sync(kPair + pair(), 64);
    const std::uint32_t s_lane = s_score_lane();
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float d[2];
      load_stats(1, n, d);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          std::uint32_t weight[1];
          ptx::load_shared(s_score(s_lane, m, n, e), weight);
          r_ds[m][n][e] = __uint_as_float(weight[0]) * (r_ds[m][n][e] - d[e % 2]);
        }
      }
    }
    hide(tile, r_ds);
    store_scores(r_ds);
    add_product(r_dk, r_ds, kOffsetQ, p.head_dim);
  }

  /// dQ += dS K of a tile, this warp's part of it, in the order of the products' fragments: 32 lanes after each other.
  __device__ __forceinline__ void add_dq(int g, int tile) const {
    constexpr int kColumns = 16 * kTile.dq_groups;
    const int warp_q = warp_ / kTile.dq_warps_d, warp_d = warp_ % kTile.dq_warps_d;
    const std::uint32_t a_lane = s_base_ + kOffsetDS + warp_q * kDqM * 16 * TileDS::kPitch + LanesDS::rows_a(lane_);
    const std::int64_t index = g * p.tiles + tile;
    float* g_dq = scope_.g_dq + index * (kQ * kD) + lane_;
    unsigned* g_turn = scope_.g_turns + index * kWarps + warp_;
    if (p.deterministic) wait_for_turn(g_turn, tile);
#pragma unroll 1
    for (int unit = warp_d * kDqUnits; unit < (warp_d + 1) * kDqUnits; ++unit) {
      if (unit * kColumns >= p.head_dim) break;
      Chain chain[kDqM][kColumns / 8];
      const std::uint32_t b_lane = Tile::advance(s_base_ + Lanes::across_b(lane_), 0, unit * kColumns / 4);
      const auto load_ds = [&](int step, typename Products::A(&a)[kDqM]) {
#pragma unroll
        for (int m = 0; m < kDqM; ++m) {
#pragma unroll
          for (int load = 0; load < Products::kLoads; ++load) {
            std::uint32_t x[4];
            ptx::ldmatrix_x4(x, TileDS::advance(a_lane, 16 * m, 2 * (step + load)));
            a[m].set(load, x);
          }
        }
      };
      multiply_groups<kDqM, kK / 8, kD, kTile.dq_groups, kSums>(chain, b_lane, load_ds);
#pragma unroll
      for (int m = 0; m < kDqM; ++m) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          const int fragment = (warp_q * kDqM + m) * (kD / 8) + unit * (kColumns / 8) + n;
#pragma unroll
          for (int e = 0; e < 4; ++e) ptx::reduce_add(g_dq + fragment * 128 + e * 32, chain[m][n].sum(e));
        }
      }
    }
    if (p.deterministic) {
      __syncwarp();
      if (lane_ == 0) ptx::reduce_add_release(g_turn, 1);
    }
  }
  /// Until the blocks of earlier keys have added their part.
  __device__ __forceinline__ void wait_for_turn(const unsigned* g_turn, int tile) const {
    const auto turn = static_cast<unsigned>(scope_.key_block - scope_.first_block(tile, kQ, kK));
    while (ptx::load_acquire(g_turn) != turn) __nanosleep(20);
    __syncwarp();
  }

  /// This warp's rows of dK or dV; 0 for keys that nobody sees.
  __device__ __forceinline__ void write(const float (&r)[kM][kD / 8][4], float factor, const Tensor& grad, int dim,
                                        bool aligned) const {
    float* g_rows = reinterpret_cast<float*>(grad.row(scope_.b, scope_.key_row + first_key(), scope_.kv_head));
    for_each_four<kM, kD>(r, lane_, [&](int, int, int row, int column, float4 x) {
      const int key = first_key() + row;
      if (key >= scope_.rows_left) return;
      const float used = scope_.key_begin <= key && key < scope_.key_end ? factor : 0;
      store_four(g_rows + row * grad.stride_seq, column, dim, aligned,
                 {x.x * used, x.y * used, x.z * used, x.w * used});
    });
  }

  __device__ __forceinline__ int lines() const {
    return (p.head_dim + 31) / 32;
  }
  __device__ __forceinline__ int lines_v() const {
    return (p.head_dim_v + 31) / 32;
  }

  const BackwardParams& p;
  KeyScope& scope_;  // in shared memory
  std::uint32_t s_base_;
  int lane_, warp_;
};

/// Grid: batch x heads_kv x key_blocks, the key blocks of a head in a row. A deterministic call hands out the blocks by
/// a counter, so that whoever waits for another's turn started after it.
template <class Shape>
__global__ void __launch_bounds__(Shape::kTile.threads(), Shape::kTile.blocks_per_sm)
    backward_f32_kernel(const __grid_constant__ BackwardParams params) {
  unsigned char* const s_bytes = ptx::dynamic_shared();
  std::int64_t block = blockIdx.x;
  if (params.deterministic) {
    auto* s_ticket = reinterpret_cast<unsigned*>(s_bytes);
    if (threadIdx.x == 0)
      *s_ticket = atomicAdd(params.turns + params.heads_q * params.tiles * Shape::kTile.warps(), 1u);
    __syncthreads();  // all: the ticket is written
    block = *s_ticket;
    __syncthreads();  // all: the ticket is read
  }
  BackwardF32Block<Shape>(params, s_bytes).run(block);
}

}  // namespace onepass::cuda::sm80
