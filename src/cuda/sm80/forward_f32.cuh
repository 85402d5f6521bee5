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
  bool q_aligned, k_aligned, v_aligned;  // rows begin at multiples of 16 bytes and are as long
  bool out_aligned;                      // rows begin at multiples of 16 bytes
  float scale;                           // |scale|, or 1 where that is 0
  float scale_log2;                      // scale log2(e)
  float q_factor;                        // 1, or what Q is multiplied by first: -1 for a negative scale, 0 for 0
  int lines;                             // of 32 columns that head_dim needs
  std::int64_t q_tiles;                  // a head
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

  /// What the block works on, in shared memory: little of it is needed at a time.
  struct Scope {
    std::int64_t first_key;     // of block 0 of keys
    std::int64_t q_row;         // in the operand, of the thread block's first query row
    const float *g_k, *g_v;     // (block_k, head_dim), (block_k, head_dim_v) of block 0
    int blocks;                 // of keys that some row sees
    int first_begin, last_end;  // keys that some row sees, of the first and of the last block
    struct {
      int rows;                  // that exist
      int some_begin, some_end;  // blocks that some of its rows see
      int all_begin, all_end;    // and that all of them see
    } warp[kTiles.warps];
  };
  static_assert(sizeof(Scope) <= kTiles.kScopeBytes);

 public:
  __device__ __forceinline__ ForwardF32Block(const ForwardF32Args& args, unsigned char* s_bytes)
      : args_(args),
        scope_(*reinterpret_cast<Scope*>(s_bytes)),
        s_q_(ptx::shared_address(s_bytes) + kTiles.kScopeBytes),
        s_tiles_(s_q_ + kBlockQ * Tile::kPitch),
        lane_(threadIdx.x % 32),
        warp_(__shfl_sync(~0u, threadIdx.x / 32, 0)) {}

  __device__ __forceinline__ void run() {
    if (find_scope() == 0) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) r_max_[r] = -kInfinity, r_sum_[r] = 0;
    set_zero(r_o_);
#pragma unroll
    for (int tile = 0; tile < kStages - 1; ++tile) load(tile);
    const std::uint32_t q_lane = s_q_ + warp_ * (kWarpRows * Tile::kPitch) + Lanes::rows_a(lane_);
    const auto& warp = scope_.warp[warp_];
    // Blocks of keys from the last to the first; K, then V of each.
#pragma unroll 1
    for (int tile = 0; tile < 2 * scope_.blocks; tile += 2) {
      next(tile);
      if (tile == 0 && args_.q_factor != 1) scale_queries();
      const int block = scope_.blocks - 1 - tile / 2;
      const bool sees = warp.some_begin <= block && block < warp.some_end;
      float r_s[kM][kN][4];
      if (sees) {
        multiply_rows<kM, kN, kHeadDim>(r_s, q_lane, s_tile(tile) + Lanes::rows_b(lane_), args_.lines);
        if (block < warp.all_begin || warp.all_end <= block)
          mask(r_s, scope_.first_key + std::int64_t{block} * kBlockK);
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

  /// Fills scope_, begins to load Q and clears rows outside the sequence. Returns the rows of the tile.
  __device__ __forceinline__ int find_scope() {
    const Problem& p = args_.problem;
    const ForwardOperands& x = args_.x;
    const Place place = this->place();
    const Sequence seq = p.sequence(place.b);
    clear_outside_rows(p, x, seq, place.b, place.head, place.row, args_.q_tiles * kBlockQ, kBlockQ);
    const int rows = static_cast<int>(clamp_to<std::int64_t>(seq.q_length - place.row, 0, kBlockQ));
    if (rows == 0) return 0;
    const std::int64_t item = p.mask.varlen ? 0 : place.b;
    const Interval any = seq.visible_to_any(place.row, place.row + rows);
    const std::int64_t first_block = any.begin / kBlockK, first_key = first_block * kBlockK;
    const int blocks = any.size() == 0 ? 0 : static_cast<int>(ceil_div(any.end, kBlockK) - first_block);
    if (threadIdx.x == 0) {
      const auto kv_head = static_cast<unsigned>(place.head) / static_cast<unsigned>(p.group());
      scope_.first_key = first_key;
      scope_.q_row = seq.q_row + place.row;
      scope_.g_k = reinterpret_cast<const float*>(x.k.row(item, seq.k_row + first_key, kv_head));
      scope_.g_v = reinterpret_cast<const float*>(x.v.row(item, seq.k_row + first_key, kv_head));
      scope_.blocks = blocks;
      scope_.first_begin = static_cast<int>(any.begin - first_key);
      scope_.last_end = static_cast<int>(any.end - first_key - (blocks - 1) * kBlockK);
    }
    if (lane_ == 0) {
      auto& warp = scope_.warp[warp_];
      warp.rows = clamp_to(rows - warp_ * kWarpRows, 0, kWarpRows);
      warp.some_begin = warp.some_end = warp.all_begin = warp.all_end = 0;
      const std::int64_t i0 = place.row + warp_ * kWarpRows;
      const Interval some = warp.rows > 0 ? seq.visible_to_any(i0, i0 + warp.rows) : Interval{};
      if (some.size() > 0) {
        const Interval all = seq.visible_to_all(i0, i0 + warp.rows);
        warp.some_begin = static_cast<int>(some.begin / kBlockK - first_block);
        warp.some_end = static_cast<int>(ceil_div(some.end, kBlockK) - first_block);
        warp.all_begin = static_cast<int>(ceil_div(all.begin, kBlockK) - first_block);
        warp.all_end = static_cast<int>(all.end / kBlockK - first_block);
      }
    }
    if (blocks > 0) {
      load_f32_rows<kHeadDim, kBlockQ, kThreads>(
          s_q_, reinterpret_cast<const float*>(x.q.row(item, seq.q_row + place.row, place.head)), x.q.stride_seq, 0,
          rows, static_cast<int>(p.head_dim), args_.q_aligned);
    }
    __syncthreads();  // all: scope_ is written
    return rows;
  }

  __device__ __forceinline__ std::uint32_t s_tile(int tile) const {
    return s_tiles_ + static_cast<std::uint32_t>(tile % kStages) * kTileBytes;
  }
  __device__ __forceinline__ void load(int tile) const {
    if (tile < 2 * scope_.blocks) {
      const int block = scope_.blocks - 1 - tile / 2;
      const int begin = block == 0 ? scope_.first_begin : 0;
      const int end = block == scope_.blocks - 1 ? scope_.last_end : kBlockK;
      const bool values = tile % 2 != 0;
      const std::int64_t stride = values ? args_.x.v.stride_seq : args_.x.k.stride_seq;
      load_f32_rows<kHeadDim, kBlockK, kThreads>(
          s_tile(tile), (values ? scope_.g_v : scope_.g_k) + std::int64_t{block} * kBlockK * stride, stride, begin, end,
          static_cast<int>(values ? args_.problem.head_dim_v : args_.problem.head_dim),
          values ? args_.v_aligned : args_.k_aligned);
    }
    ptx::cp_async_commit();
  }
  /// The tile has arrived, from every thread, and every warp has left the one before, whose stage is filled next.
  __device__ __forceinline__ void next(int tile) const {
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();
    load(tile + kStages - 1);
  }

  /// Q *= q_factor, in the warp's own rows.
  __device__ __forceinline__ void scale_queries() const {
#pragma unroll 1
    for (int i = lane_; i < kWarpRows * kHeadDim / 4; i += 32) {
      const std::uint32_t s_chunk = s_q_ + warp_ * (kWarpRows * Tile::kPitch) + i * 16;
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
    const EdgeMask edge(args_.problem.sequence(place.b), place.row + warp_ * kWarpRows, j0);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = min(r / 2 * 16 + r % 2 * 8 + lane_ / 4, scope_.warp[warp_].rows - 1);
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
    multiply_across<kM, kN, kHeadDim, kTiles.groups>(r_o_, r_p, s_v + Lanes::across_b(lane_),
                                                     static_cast<int>(args_.problem.head_dim_v),
                                                     [&](int r) { return alpha[r]; });
  }

  /// O / l and the log-sum-exp of the warp's rows.
  __device__ __forceinline__ void finish() const {
    const Place place = this->place();
    const std::int64_t item = args_.problem.mask.varlen ? 0 : place.b;
    const std::int64_t q_row = scope_.q_row + warp_ * kWarpRows;
    const int rows = scope_.warp[warp_].rows;
    float inverse[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float sum = r_sum_[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      inverse[r] = sum == 0 ? 0 : 1 / sum;
      const int row = r / 2 * 16 + r % 2 * 8 + lane_ / 4;
      if (args_.x.lse && lane_ % 4 == 0 && row < rows)
        *args_.x.lse.row(item, place.head, q_row + row) =
            sum == 0 ? -kInfinity : fmaf(r_max_[r], args_.scale, logf(sum));
    }
    const Tensor& out = args_.x.out;
    float* g_rows = reinterpret_cast<float*>(out.row(item, q_row, place.head));
    for_each_four<kM, kHeadDim>(r_o_, lane_, [&](int m, int half, int row, int column, float4 x) {
      const float factor = inverse[2 * m + half];
      if (row < rows)
        store_four(g_rows + row * out.stride_seq, column, static_cast<int>(args_.problem.head_dim_v), args_.out_aligned,
                   {x.x * factor, x.y * factor, x.z * factor, x.w * factor});
    });
  }

  const ForwardF32Args& args_;
  Scope& scope_;                 // in shared memory
  std::uint32_t s_q_, s_tiles_;  // addresses of Q (block_q, kHeadDim) and of the stages (block_k, kHeadDim)
  int lane_, warp_;
  float r_o_[kM][kHeadDim / 8][4], r_max_[kRows], r_sum_[kRows];
};

/// Grid: batch x heads_q x q_tiles.
template <class Shape>
__global__ void __launch_bounds__(Shape::kTiles.threads(), Shape::kTiles.blocks_per_sm)
    forward_f32_kernel(const __grid_constant__ ForwardF32Args args) {
  ForwardF32Block<Shape>(args, ptx::dynamic_shared()).run();
}

}  // namespace onepass::cuda::sm80
