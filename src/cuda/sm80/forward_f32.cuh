// The forward pass in float32. A thread block has block_q query rows of one head, a warp 16 or 32 of them; tiles of K
// and V pass by in turn through the same stages of shared memory.
#pragma once

#include "cuda/device/mask.cuh"
#include "cuda/device/outside.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/sm80/f32_products.cuh"
#include "cuda/sm80/forward_f32_tiles.h"

namespace onepass::cuda::sm80 {

struct ForwardF32Args {
  Problem problem;
  ForwardOperands x;
  bool q_aligned, k_aligned, v_aligned, out_aligned;  // rows begin at multiples of 16 bytes
  float scale;                                        // |scale|, or 1 where that is 0
  float scale_log2;                                   // scale log2(e)
  float q_factor;        // 1, or what Q is multiplied by first: -1 for a negative scale, 0 for 0
  int lines, lines_v;    // of 32 columns that head_dim and head_dim_v need
  std::int64_t q_tiles;  // a head
};

/// Shape: kHeadDim, the bucket of both dimensions, and kTiles.
template <class Shape>
class ForwardF32Block {
  static constexpr int kHeadDim = Shape::kHeadDim;
  static constexpr ForwardF32Tiles kTiles = Shape::kTiles;
  static constexpr float kInfinity = __builtin_huge_valf();
  static constexpr int kBlockQ = kTiles.block_q(), kBlockK = kTiles.block_k, kStages = kTiles.stages;
  static constexpr int kThreads = kTiles.threads(), kWarpRows = kTiles.warp_rows();
  static constexpr int kM = kTiles.row_tiles, kN = kBlockK / 8, kRows = 2 * kM;  // rows a thread has a part of
  using Tile = F32Tile<kHeadDim>;
  using Lanes = F32Lanes<kHeadDim>;
  static constexpr int kTileBytes = kBlockK * Tile::kPitch;

 public:
  __device__ __forceinline__ ForwardF32Block(const ForwardF32Args& args, std::uint32_t s_bytes)
      : args_(args), s_q_(s_bytes), s_tiles_(s_bytes + kBlockQ * Tile::kPitch), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    const Problem& p = args_.problem;
    const ForwardOperands& x = args_.x;
    const Place place = this->place();
    const Sequence seq = p.sequence(place.b);
    clear_outside_rows(p, x, seq, place.b, place.head, place.row, args_.q_tiles * kBlockQ, kBlockQ);
    const int tile_rows = static_cast<int>(clamp_to<std::int64_t>(seq.q_length - place.row, 0, kBlockQ));
    if (tile_rows == 0) return;
    const std::int64_t item = p.mask.varlen ? 0 : place.b;
    const Interval any = seq.visible_to_any(place.row, place.row + tile_rows);
    const std::int64_t first_block = any.begin / kBlockK;
    const int blocks = any.size() == 0 ? 0 : static_cast<int>(ceil_div(any.end, kBlockK) - first_block);
    const int first_begin = static_cast<int>(any.begin - first_block * kBlockK);  // keys that some row sees, of the
    const int last_end = static_cast<int>(any.end - (first_block + blocks - 1) * kBlockK);  // first and last block

    warp_row_ = __shfl_sync(~0u, threadIdx.x / 32, 0) * kWarpRows;
    warp_rows_ = clamp_to(tile_rows - warp_row_, 0, kWarpRows);
    // Blocks that some, and that all, of this warp's rows see.
    int some_begin = 0, some_end = 0, all_begin = 0, all_end = 0;
    if (warp_rows_ > 0) {
      const std::int64_t i0 = place.row + warp_row_;
      const Interval some = seq.visible_to_any(i0, i0 + warp_rows_), all = seq.visible_to_all(i0, i0 + warp_rows_);
      if (some.size() > 0) {
        some_begin = static_cast<int>(some.begin / kBlockK - first_block);
        some_end = static_cast<int>(ceil_div(some.end, kBlockK) - first_block);
        all_begin = static_cast<int>(ceil_div(all.begin, kBlockK) - first_block);
        all_end = static_cast<int>(all.end / kBlockK - first_block);
      }
    }
    clear();

    // Blocks of keys from the last to the first; K, then V of each.
    const std::int64_t kv_head = p.kv_head(place.head), last_row = seq.k_row + (first_block + blocks - 1) * kBlockK;
    const float* g_k = reinterpret_cast<const float*>(x.k.row(item, last_row, kv_head));  // (block_k, head_dim)
    const float* g_v = reinterpret_cast<const float*>(x.v.row(item, last_row, kv_head));  // (block_k, head_dim_v)
    const auto load = [&](int tile) {
      if (tile < 2 * blocks) {
        const int block = blocks - 1 - tile / 2;
        const int begin = block == 0 ? first_begin : 0, end = block == blocks - 1 ? last_end : kBlockK;
        if (tile % 2 == 0) {
          load_f32_rows<kHeadDim, kBlockK, kThreads>(s_tile(tile), g_k, x.k.stride_seq, begin, end,
                                                     static_cast<int>(p.head_dim), args_.k_aligned);
          g_k -= kBlockK * x.k.stride_seq;
        } else {
          load_f32_rows<kHeadDim, kBlockK, kThreads>(s_tile(tile), g_v, x.v.stride_seq, begin, end,
                                                     static_cast<int>(p.head_dim_v), args_.v_aligned);
          g_v -= kBlockK * x.v.stride_seq;
        }
      }
      ptx::cp_async_commit();
    };
    // The tile has arrived, from every thread, and every warp has left the one before, whose stage is filled next.
    const auto next = [&](int tile) {
      ptx::cp_async_wait<kStages - 2>();
      __syncthreads();
      load(tile + kStages - 1);
    };
    if (blocks > 0) {
      load_f32_rows<kHeadDim, kBlockQ, kThreads>(
          s_q_, reinterpret_cast<const float*>(x.q.row(item, seq.q_row + place.row, place.head)), x.q.stride_seq, 0,
          tile_rows, static_cast<int>(p.head_dim), args_.q_aligned);
    }
#pragma unroll
    for (int tile = 0; tile < kStages - 1; ++tile) load(tile);
    const std::uint32_t q_lane = s_q_ + warp_row_ * Tile::kPitch + Lanes::rows_a(lane_);
#pragma unroll 1
    for (int block = blocks - 1, tile = 0; block >= 0; --block, tile += 2) {
      next(tile);
      if (tile == 0 && args_.q_factor != 1) scale_queries();
      const bool sees = some_begin <= block && block < some_end;
      float r_s[kM][kN][4];
      if (sees) {
        multiply_rows<kM, kN, kHeadDim, kTiles.chain>(r_s, q_lane, s_tile(tile) + Lanes::rows_b(lane_), args_.lines);
        if (block < all_begin || all_end <= block) mask(r_s, (first_block + block) * kBlockK);
      }
      next(tile + 1);
      if (sees) add(r_s, s_tile(tile + 1));
    }
    finish();
  }

 private:
  struct Place {
    std::int64_t b, head, row;  // the block's first query row, of the sequence
  };
  /// Of this thread block; the last tiles of a head, for causal masks the longest, come first.
  __device__ __forceinline__ Place place() const {
    const auto tiles = static_cast<unsigned>(args_.q_tiles), heads = static_cast<unsigned>(args_.problem.heads_q);
    const unsigned item_head = blockIdx.x / tiles, b = item_head / heads;
    return {b, item_head - b * heads, std::int64_t{tiles - 1 - (blockIdx.x - item_head * tiles)} * kBlockQ};
  }

  __device__ __forceinline__ std::uint32_t s_tile(int tile) const {
    return s_tiles_ + static_cast<std::uint32_t>(tile % kStages) * kTileBytes;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) r_max_[r] = -kInfinity, r_sum_[r] = 0;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) r_o_[m][n][i] = 0;
      }
    }
  }

  /// Q *= q_factor, in the warp's own rows.
  __device__ __forceinline__ void scale_queries() const {
#pragma unroll 1
    for (int i = lane_; i < kWarpRows * kHeadDim / 4; i += 32) {
      const std::uint32_t s_chunk = s_q_ + warp_row_ * Tile::kPitch + i * 16;
      std::uint32_t x[4];
      ptx::load_shared(s_chunk, x[0], x[1], x[2], x[3]);
#pragma unroll
      for (std::uint32_t& word : x) word = __float_as_uint(__uint_as_float(word) * args_.q_factor);
      ptx::store_shared(s_chunk, x[0], x[1], x[2], x[3]);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void mask(float (&r_s)[kM][kN][4], std::int64_t j0) const {
    const Place place = this->place();
    const EdgeMask edge(args_.problem.sequence(place.b), place.row + warp_row_, j0);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = min(r / 2 * 16 + r % 2 * 8 + lane_ / 4, warp_rows_ - 1);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!edge.sees(row, n * 8 + lane_ % 4 * 2 + i)) r_s[r / 2][n][r % 2 * 2 + i] = -kInfinity;
        }
      }
    }
  }

  /// Softmax of a block of scores, and O += P V. Scores are compared before they are scaled: where both are large,
  /// their difference is exact.
  __device__ __forceinline__ void add(float (&r_s)[kM][kN][4], std::uint32_t s_v) {
    float alpha[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float top = r_max_[r];
#pragma unroll
      for (int n = 0; n < kN; ++n) top = fmaxf(top, fmaxf(r_s[r / 2][n][r % 2 * 2], r_s[r / 2][n][r % 2 * 2 + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float reference = top == -kInfinity ? 0.f : top;
      alpha[r] = ptx::exp2_approx((r_max_[r] - reference) * args_.scale_log2);
      r_max_[r] = top;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& s = r_s[r / 2][n][r % 2 * 2 + i];
          s = ptx::exp2_approx((s - reference) * args_.scale_log2);
          sum += s;
        }
      }
      r_sum_[r] = fmaf(r_sum_[r], alpha[r], sum);
    }
    SplitA r_p[kN][kM];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int m = 0; m < kM; ++m) r_p[n][m].set_result(r_s[m][n]);
    }
    multiply_across<kM, kN, kHeadDim, kTiles.width>(r_o_, r_p, s_v + Lanes::across_b(lane_), args_.lines_v,
                                                    [&](int r) { return alpha[r]; });
  }

  /// O / l and the log-sum-exp of the warp's rows.
  __device__ __forceinline__ void finish() const {
    const Place place = this->place();
    const std::int64_t item = args_.problem.mask.varlen ? 0 : place.b, head = place.head;
    const std::int64_t q_row = args_.problem.sequence(place.b).q_row + place.row + warp_row_;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int m = r / 2, row = m * 16 + r % 2 * 8 + lane_ / 4;
      float sum = r_sum_[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (row >= warp_rows_) continue;
      const float inverse = sum == 0 ? 0 : 1 / sum;
      if (args_.x.lse && lane_ % 4 == 0)
        *args_.x.lse.row(item, head, q_row + row) = sum == 0 ? -kInfinity : fmaf(r_max_[r], args_.scale, logf(sum));
      float* g_row = reinterpret_cast<float*>(args_.x.out.row(item, q_row + row, head));
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n += 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int e = r % 2 * 2 + i;
          store_four(g_row, n * 8 + lane_ % 4 * 8 + 4 * i, static_cast<int>(args_.problem.head_dim_v),
                     args_.out_aligned,
                     {r_o_[m][n][e] * inverse, r_o_[m][n + 1][e] * inverse, r_o_[m][n + 2][e] * inverse,
                      r_o_[m][n + 3][e] * inverse});
        }
      }
    }
  }

  const ForwardF32Args& args_;
  std::uint32_t s_q_, s_tiles_;  // addresses of Q (block_q, kHeadDim) and of the stages (block_k, kHeadDim)
  int lane_, warp_row_, warp_rows_;
  float r_o_[kM][kHeadDim / 8][4], r_max_[kRows], r_sum_[kRows];
};

/// Grid: batch x heads_q x q_tiles.
template <class Shape>
__global__ void __launch_bounds__(Shape::kTiles.threads(), Shape::kTiles.blocks_per_sm)
    forward_f32_kernel(const __grid_constant__ ForwardF32Args args) {
  extern __shared__ __align__(128) unsigned char s_bytes[];
  ForwardF32Block<Shape>(args, ptx::shared_address(s_bytes)).run();
}

}  // namespace onepass::cuda::sm80
