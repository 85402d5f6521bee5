// The backward pass in float32. One thread block owns block_k keys of one KV head and passes over the query tiles that
// see them, for all query heads of the group. Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T, so that
// P^T and dS^T leave the products in the registers that dV += P^T dO and dK += dS^T Q take them from; dQ += dS K needs
// dS from shared memory. FlashAttention-2 (Dao, 2023), algorithm 2, with the loop over keys outside.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/reduce.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/sm80/backward_f32_tiles.h"
#include "cuda/sm80/backward_params.h"
#include "cuda/sm80/backward_scope.cuh"
#include "cuda/sm80/f32_parts.cuh"

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
  static constexpr int kColumnWarps = kTile.column_warps, kSumCols = kD / kColumnWarps;
  static constexpr int kDqM = kQ / 16 / kTile.dq_warps_q;
  static constexpr int kDqUnits = kD / (16 * kTile.dq_groups) / kTile.dq_warps_d;
  using KeyTile = PartsTile<kK, kD>;
  using QueryTile = PartsTile<kQ, kD>;
  using ScoreTile = F32Tile<kTile.score_columns()>;

  // Shared memory, in bytes from its start.
  static constexpr int kOffsetV = KeyTile::kBytes, kOffsetQ = 2 * kOffsetV;
  static constexpr int kOffsetDO = kOffsetQ + QueryTile::kBytes, kOffsetDS = kOffsetDO + QueryTile::kBytes;
  static constexpr int kOffsetStats = kOffsetDS + kQ * ScoreTile::kPitch, kOffsetScope = kOffsetStats + 8 * kQ;
  static_assert(kOffsetScope + kTile.kScopeBytes == kTile.shared_bytes(kD));
  static_assert(sizeof(KeyScope) <= kTile.kScopeBytes);

  // Barriers, one a pair each: something is written in the tile of scores. What is overwritten there was read before
  // the block's barriers. P: the first warp of the values arrives; the first of the keys and the second of the values
  // wait.
  static constexpr int kWeights = 1;
  // A second column warp's part of S or of dP: it arrives, the first one waits.
  static constexpr int kValuesPart = kWeights + kTile.pairs, kKeysPart = kValuesPart + kTile.pairs;
  // dS: the first warp of the keys arrives, the second one waits.
  static constexpr int kGradients = kKeysPart + kTile.pairs;

 public:
  __device__ __forceinline__ BackwardF32Block(const BackwardParams& params, unsigned char* s_bytes)
      : p(params),
        scope_(*reinterpret_cast<KeyScope*>(s_bytes + kOffsetScope)),
        s_base_(ptx::shared_address(s_bytes)),
        lane_(threadIdx.x % 32),
        warp_(__shfl_sync(~0u, threadIdx.x / 32, 0)) {}

  __device__ __forceinline__ void run(unsigned block) {
    if (threadIdx.x == 0) scope_.find<kQ, kK, kD, kWarps, 2 * QueryTile::kBytes>(p, block);
    __syncthreads();  // all threads: scope_ is written
    if (scope_.rows_left <= 0) return;
    load_keys();
    if (scope_.tile_begin < scope_.tile_end) load_queries(0, scope_.tile_begin);
    pass();
  }

 private:
  __device__ __forceinline__ int pair() const { return warp_ % kTile.pairs; }
  /// Which of the warps that share the columns.
  __device__ __forceinline__ int column_warp() const { return warp_ / kTile.pairs % kColumnWarps; }
  /// Times 32 columns of `dim` that this warp has.
  __device__ __forceinline__ int lines(int dim) const {
    return (dim + 32 * (kColumnWarps - 1 - column_warp()) + 31) / (32 * kColumnWarps);
  }
  __device__ __forceinline__ int first_key() const { return pair() * 16 * kM; }

  /// Splits K and V.
  __device__ __forceinline__ void load_keys() const {
    const auto load = [&](int offset, const Tensor& x, int dim, bool aligned) {
      const std::uint32_t s_tile = s_base_ + offset;
      const auto* g_rows = reinterpret_cast<const float*>(x.row(scope_.b, scope_.key_row, scope_.kv_head));
      constexpr int kGroups = kD / 16;
#pragma unroll 1
      for (int i = threadIdx.x; i < kK * kGroups; i += kThreads) {
        const int row = i / kGroups;
        const bool inside = scope_.key_begin <= row && row < scope_.key_end;
        KeyTile::split(g_rows + row * x.stride_seq, row, i % kGroups, inside, dim, aligned,
                       [&](int byte, uint4 y) { ptx::store_shared(s_tile + byte, y.x, y.y, y.z, y.w); });
      }
    };
    load(0, p.operands.k, p.head_dim, p.k_aligned);
    load(kOffsetV, p.operands.v, p.head_dim_v, p.v_aligned);
  }
  /// Parts of Q and dO and statistics of tile `tile` of head `g` of the group.
  __device__ __forceinline__ void load_queries(int g, int tile) const {
    const int begin = scope_.row_begin(tile, kQ), end = scope_.row_end(tile, kQ);
    constexpr int kRowChunks = QueryTile::Part::kChunks, kChunks = 2 * QueryTile::kBytes / 16;
    static_assert(kOffsetDO == kOffsetQ + QueryTile::kBytes);
    const unsigned char* g_parts = scope_.g_parts + (g * p.tiles + tile) * (2 * QueryTile::kBytes);
#pragma unroll
    for (int i = 0; i < (kChunks + kThreads - 1) / kThreads; ++i) {
      const int chunk = threadIdx.x + i * kThreads, row = chunk / kRowChunks % kQ;
      if (kChunks % kThreads != 0 && chunk >= kChunks) break;
      ptx::cp_async_16_or_zeros(s_base_ + kOffsetQ + 16 * chunk, g_parts + 16 * chunk, begin <= row && row < end);
    }
    static_assert(kQ / 2 <= kThreads);
    if (threadIdx.x < kQ / 2) {
      ptx::cp_async_16(s_base_ + kOffsetStats + threadIdx.x * 16,
                       scope_.g_stats + (g * p.tiles + tile) * (2 * kQ) + threadIdx.x * 4);
    }
  }

  /// This warp computes P and dV; else dS and dK. The code is mostly one for both, which also helps the cache of
  /// instructions.
  __device__ __forceinline__ bool values() const {
    return warp_ < kWarps / 2;
  }

  __device__ __forceinline__ void pass() {
    float r_sum[kM][kSumCols / 8][4];  // dV or dK of this warp's keys and columns
    set_zero(r_sum);
    int g = scope_.tile_begin < scope_.tile_end ? 0 : p.group, tile = scope_.tile_begin;
#pragma unroll 1
    while (g < p.group) {
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();  // all: Q and dO have landed, from every thread; nobody reads the last tile's dS any more
      float r[kM][kN][4];
      multiply_scores(r);
      if (values()) {
        find_weights(tile, r);
      } else {
        find_gradients(tile, r);
      }
      add_product(r_sum, r);
      __syncthreads();  // all: dS is written, and nobody reads Q, dO and statistics any more
      const int last_g = g, last_tile = tile;
      if (++tile == scope_.tile_end) tile = scope_.tile_begin, ++g;
      if (g < p.group) load_queries(g, tile);
      add_dq(last_g, last_tile);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    const auto& o = p.operands;
    if (values()) {
      write(r_sum, 1.0f, o.grad_v, p.head_dim_v, p.grad_v_aligned);
    } else {
      write(r_sum, p.scale, o.grad_k, p.head_dim, p.grad_k_aligned);
    }
  }

  /// The tile at `offset`; its fragments' addresses are not kept in registers from step to step.
  __device__ __forceinline__ std::uint32_t s_tile(int offset) const {
    return static_cast<std::uint32_t>(ptx::recomputed(static_cast<int>(s_base_ + offset)));
  }
  /// S^T = K Q^T or dP^T = V dO^T, the pair's keys.
  __device__ __forceinline__ void multiply_scores(float (&s)[kM][kN][4]) const {
    const int keys = values() ? 0 : kOffsetV, queries = values() ? kOffsetQ : kOffsetDO;
    const int dim = values() ? p.head_dim : p.head_dim_v, chunk = 4 * column_warp();
    multiply_rows<kM, kN, kK, kQ, kD, kColumnWarps, kTile.steps>(
        s, LaneRows<kD>(block_rows<kD, true>(s_tile(keys), lane_).at(first_key(), chunk)),
        LaneRows<kD>(block_rows<kD, false>(s_tile(queries), lane_).at(0, chunk)), lines(dim));
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
    const std::uint32_t row = e % 2 == 0 ? s_lane : (s_lane ^ 16u) + ScoreTile::kPitch;
    return ScoreTile::advance(row, 8 * n, 4 * m + e / 2 * 2);
  }
  /// Of dS, or of P, whose place is dS's where one warp alone reads it.
  __device__ __forceinline__ std::uint32_t s_score_lane(bool weights) const {
    const int g = lane_ / 4, t = lane_ % 4, key = first_key() + (weights ? ScoreTile::kPitch / 4 - kK : 0);
    return s_base_ + kOffsetDS + ScoreTile::offset(2 * t, key / 4 + g % 2) + g / 2 * 4;
  }
  /// visit(x, address) for each element of this warp's transposed scores.
  template <class Scores, class Visit>
  __device__ __forceinline__ void for_each_score(Scores& r, bool weights, Visit&& visit) const {
    const std::uint32_t s_lane = s_score_lane(weights);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) visit(r[m][n][e], s_score(s_lane, m, n, e));
      }
    }
  }
  __device__ __forceinline__ void store_scores(const float (&r)[kM][kN][4], bool weights) const {
    for_each_score(r, weights, [](float x, std::uint32_t address) { ptx::store_shared(address, __float_as_uint(x)); });
  }
  __device__ __forceinline__ void load_scores(float (&r)[kM][kN][4], bool weights) const {
    for_each_score(r, weights, [](float& x, std::uint32_t address) {
      std::uint32_t y[1];
      ptx::load_shared(address, y);
      x = __uint_as_float(y[0]);
    });
  }
  /// To this warp's part of a product over the columns, that of the second column warp.
  __device__ __forceinline__ void add_scores(float (&r)[kM][kN][4], bool weights) const {
    float other[kM][kN][4];
    load_scores(other, weights);
    add_sums(r, other);
  }
  /// dV += P^T dO or dK += dS^T Q.
  __device__ __forceinline__ void add_product(float (&r_sum)[kM][kSumCols / 8][4], const float (&r)[kM][kN][4]) const {
    const int offset = values() ? kOffsetDO : kOffsetQ, dim = values() ? p.head_dim_v : p.head_dim;
    PartsA a[kN / 2][kM];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int m = 0; m < kM; ++m) a[n / 2][m].set(n % 2, r[m][n]);
    }
    const LaneRows<kD> b(block_rows<kD, true>(s_tile(offset), lane_).at(0, 4 * column_warp()));
    multiply_across<kM, kN / 2, kQ, kD, kColumnWarps, kTile.groups>(r_sum, a, b,
                                                                    kColumnWarps == 1 ? dim : 32 * lines(dim));
  }

  /// The whole scores of a tile from this warp's part of them, r: find() makes P or dS of them, which stands in the
  /// tile of scores afterwards. A second column warp hands its part over and takes what the first one found.
  template <class Find>
  __device__ __forceinline__ void share_scores(int tile, float (&r)[kM][kN][4], bool weights, Find&& find) const {
    if (kColumnWarps == 2 && column_warp() == 1) {
      store_scores(r, weights);
      ptx::named_barrier_arrive((weights ? kValuesPart : kKeysPart) + pair(), 64);
      ptx::named_barrier_sync((weights ? kWeights : kGradients) + pair(), weights ? 96 : 64);
      load_scores(r, weights);
    } else {
      if constexpr (kColumnWarps == 2) {
        ptx::named_barrier_sync((weights ? kValuesPart : kKeysPart) + pair(), 64);
        add_scores(r, weights);
      }
      find();
      hide(tile, r);
      store_scores(r, weights);
      if (weights) {
        ptx::named_barrier_arrive(kWeights + pair(), 32 + 32 * kColumnWarps);
      } else if constexpr (kColumnWarps == 2) {
        ptx::named_barrier_arrive(kGradients + pair(), 64);
      }
    }
  }

  /// P of this warp's part of S.
  __device__ __forceinline__ void find_weights(int tile, float (&r_p)[kM][kN][4]) const {
    share_scores(tile, r_p, true, [&] {
      constexpr float kLog2e = 1.44269504088896341f;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        float lse[2];
        load_stats(0, n, lse);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            r_p[m][n][e] = ptx::exp2_approx(fmaf(r_p[m][n][e], p.scale, -lse[e % 2]) * kLog2e);
        }
      }
    });
  }

  /// dS of this warp's part of dP.
  __device__ __forceinline__ void find_gradients(int tile, float (&r_ds)[kM][kN][4]) const {
    share_scores(tile, r_ds, false, [&] {
      ptx::named_barrier_sync(kWeights + pair(), 32 + 32 * kColumnWarps);
      float r_p[kM][kN][4];
      load_scores(r_p, true);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        float d[2];
        load_stats(1, n, d);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) r_ds[m][n][e] = r_p[m][n][e] * (r_ds[m][n][e] - d[e % 2]);
        }
      }
    });
  }

  /// dQ += dS K of a tile, this warp's part of it, in the order of the products' fragments: 32 lanes after each other.
  __device__ __forceinline__ void add_dq(int g, int tile) const {
    constexpr int kColumns = 16 * kTile.dq_groups;
    const int warp_q = warp_ / kTile.dq_warps_d, warp_d = warp_ % kTile.dq_warps_d;
    const std::uint32_t a_lane =
        s_base_ + kOffsetDS + warp_q * kDqM * 16 * ScoreTile::kPitch + ScoreTile::offset(lane_ % 16, lane_ / 16);
    const std::int64_t index = g * p.tiles + tile;
    float* g_dq = scope_.g_dq + index * (kQ * kD) + lane_;
    unsigned* g_turn = scope_.g_turns + index * kWarps + warp_;
    if (p.deterministic) wait_for_turn(g_turn, tile);
#pragma unroll 1
    for (int unit = warp_d * kDqUnits; unit < (warp_d + 1) * kDqUnits; ++unit) {
      if (unit * kColumns >= p.head_dim) break;
      Chain chain[kDqM][kColumns / 8];
      const LaneRows<kD> b(block_rows<kD, true>(s_tile(0), lane_).at(0, unit * kColumns / 8));
      const auto load_ds = [&](int step, PartsA(&a)[kDqM]) {
#pragma unroll
        for (int m = 0; m < kDqM; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            std::uint32_t x[4];
            ptx::ldmatrix_x4(x, ScoreTile::advance(a_lane, 16 * m, 4 * step + 2 * half));
            a[m].set_columns(half, x);
          }
        }
      };
      multiply_groups<kDqM, kK / 16, kK, kD, kTile.dq_groups>(chain, b, load_ds);
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
  __device__ __forceinline__ void write(const float (&r)[kM][kSumCols / 8][4], float factor, const Tensor& grad,
                                        int dim, bool aligned) const {
    float* g_rows = reinterpret_cast<float*>(grad.row(scope_.b, scope_.key_row + first_key(), scope_.kv_head));
    for_each_four<kM, kSumCols>(r, lane_, [&](int, int, int row, int own_column, float4 x) {
      const int key = first_key() + row,
                column = own_column % 32 + (own_column / 32 * kColumnWarps + column_warp()) * 32;
      if (key >= scope_.rows_left) return;
      const float used = scope_.key_begin <= key && key < scope_.key_end ? factor : 0;
      store_four(g_rows + row * grad.stride_seq, column, dim, aligned,
                 {x.x * used, x.y * used, x.z * used, x.w * used});
    });
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
  unsigned block = blockIdx.x;
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
