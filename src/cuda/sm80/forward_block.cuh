// What one warp of the forward pass holds and does: its rows of S = Q K^T, P = softmax(S) and O = P V, in registers.
#pragma once

#include <type_traits>

#include "cuda/device/swizzle.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/sm80/load_tile.cuh"
#include "cuda/sm80/tiles.h"

namespace onepass::cuda::sm80 {

inline constexpr float kLn2 = 0.693147180559945309f;
inline constexpr float kInfinity = __builtin_huge_valf();

/// When a row's reference, what its exponents are counted from, follows its maximum: always, or when the maximum has
/// grown by more than 8 in base 2, or when a block's sum of weights shows that it was too low (no maximum is taken).
enum class Maximum { exact, lazy, checked };

/// The steps of docs/sm80.md that are not in the tile table; the library uses the last value of each.
struct ForwardSteps {
  bool swizzle = true;
  Copies copies = Copies::predicated;
  bool load_ahead = true;       // a block's copies run during the block before
  bool fragments_ahead = true;  // ldmatrix runs during the products before
  Maximum maximum = Maximum::checked;
  bool load_behind_scores = true;  // those copies are issued behind Q K^T, not before it
  bool last_tiles_first = true;    // with a causal mask the last tiles of a head have the most keys
};

struct ForwardArgs {
  Problem problem;
  ForwardOperands x;
  int q_alignment, k_alignment, v_alignment, out_alignment;
  float scale_log2;         // |scale| log2(e), or log2(e) where that is 0
  float q_factor;           // 1, or what Q is multiplied by first: -1 for a negative scale, 0 for 0
  unsigned q_tiles;         // a head
  unsigned heads_together;  // heads whose tiles are interleaved
};

template <class T, int kHeadDim, class Plan>
struct ForwardBlock {
  static constexpr ForwardTiles kTiles = Plan::kTiles;
  static constexpr ForwardSteps kUse = Plan::kUse;
  static constexpr int kBlockK = kTiles.block_k, kRowTiles = kTiles.row_tiles, kStages = kTiles.stages;
  static constexpr int kColumnTiles = kBlockK / 8, kOutTiles = kHeadDim / 8, kSteps = kHeadDim / 16;
  static constexpr int kRows = 2 * kRowTiles;  // rows a thread has a part of
  static constexpr int kWarpRows = kTiles.warp_rows();
  static constexpr float kSumLimit = 256;
  using Layout = std::conditional_t<kUse.swizzle, SwizzledTile<kHeadDim>, PlainTile<kHeadDim>>;
  static constexpr int kTileBytes = kBlockK * Layout::kRowBytes;
  using KeyLoader = TileLoader<Layout, kBlockK, kHeadDim, kTiles.threads(), kUse.copies>;
  using QueryLoader = TileLoader<Layout, kTiles.block_q(), kHeadDim, kTiles.threads(), kUse.copies>;

  const ForwardArgs& args;
  std::uint32_t s_q, s_k, s_v;  // addresses
  int lane;
  std::uint32_t q_lane, k_lane, v_lane;  // bytes: this lane's row in each operand's fragments
  float c;                               // scale_log2

  std::uint32_t r_q[kTiles.q_in_registers ? kSteps : 1][kRowTiles][4];
  float r_s[kRowTiles][kColumnTiles][4];
  std::uint32_t r_p[kBlockK / 16][kRowTiles][4];
  float r_o[kRowTiles][kOutTiles][4];
  float r_max[kRows], r_shift[kRows], r_sum[kRows], r_limit[kRows];

  /// The address `s_lane`, of a row and of chunk 0 or 1, moved on.
  __device__ __forceinline__ static std::uint32_t at(std::uint32_t s_lane, int row, int chunk) {
    if constexpr (kUse.swizzle) return LaneRows<kHeadDim>(s_lane).at(row, chunk);
    return s_lane + row * Layout::kRowBytes + chunk * 16;
  }

  /// Q *= q_factor, in the warp's own rows.
  __device__ void scale_queries(char* s_rows) const {
    T* s_elements = reinterpret_cast<T*>(s_rows);
#pragma unroll 1
    for (int i = lane; i < kWarpRows * kHeadDim; i += 32)
      s_elements[i] = static_cast<T>(static_cast<float>(s_elements[i]) * args.q_factor);
    __syncwarp();
  }
  __device__ __forceinline__ void fetch_queries() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
        ptx::ldmatrix_x4(r_q[step % (kTiles.q_in_registers ? kSteps : 1)][m], at(s_q + q_lane, m * 16, 2 * step));
  }
  /// S = Q K^T for the K tile at s_tile.
  __device__ __forceinline__ void scores(std::uint32_t s_tile) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) r_s[m][n][i] = 0;
    const std::uint32_t s_lane = s_tile + k_lane;
    std::uint32_t a[2][kRowTiles][4], b[2][kColumnTiles / 2][4];
    const auto fetch = [&](int step) {
#pragma unroll
      for (int n = 0; n < kColumnTiles / 2; ++n) ptx::ldmatrix_x4(b[step % 2][n], at(s_lane, n * 16, 2 * step));
      if constexpr (!kTiles.q_in_registers)
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) ptx::ldmatrix_x4(a[step % 2][m], at(s_q + q_lane, m * 16, 2 * step));
    };
    if (kUse.fragments_ahead) fetch(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int next = kUse.fragments_ahead ? step + 1 : step;
      if (next < kSteps) fetch(next);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          const int x = m % 2 ? kColumnTiles - 1 - n : n;
          const auto& q = kTiles.q_in_registers ? r_q[step % (kTiles.q_in_registers ? kSteps : 1)][m] : a[step % 2][m];
          ptx::mma_16x8x16<T>(r_s[m][x], q, b[step % 2][x / 2][x % 2 * 2], b[step % 2][x / 2][x % 2 * 2 + 1]);
        }
    }
  }

  /// O += P V for the V tile at s_tile.
  __device__ __forceinline__ void values(std::uint32_t s_tile) {
    constexpr int kPair = 2;                        // V fragments (16 columns) a group
    constexpr int kGroups = kOutTiles / 2 / kPair;  // groups a key step
    constexpr int kUnits = kBlockK / 16 * kGroups;
    const std::uint32_t s_lane = s_tile + v_lane;
    std::uint32_t b[2][kPair][4];
    const auto fetch = [&](int unit) {
#pragma unroll
      for (int i = 0; i < kPair; ++i)
        ptx::ldmatrix_x4_trans(b[unit % 2][i], at(s_lane, unit / kGroups * 16, unit % kGroups * 2 * kPair + 2 * i));
    };
    if (kUse.fragments_ahead) fetch(0);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int next = kUse.fragments_ahead ? unit + 1 : unit;
      if (next < kUnits) fetch(next);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < 2 * kPair; ++n) {
          const int x = m % 2 ? 2 * kPair - 1 - n : n;
          ptx::mma_16x8x16<T>(r_o[m][unit % kGroups * 2 * kPair + x], r_p[unit / kGroups][m],
                              b[unit % 2][x / 2][x % 2 * 2], b[unit % 2][x / 2][x % 2 * 2 + 1]);
        }
    }
  }

  /// p = 2^(c s - shift) in place for the scores of one 16-key step; adds to sums. Neighbouring sums are of other rows.
  __device__ __forceinline__ void exponentials(int step, float (&sums)[kRows]) {
#pragma unroll
    for (int n = 2 * step; n < 2 * step + 2; ++n)
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& s = r_s[m][n][i];
          s = ptx::exp2_approx(fmaf(s, c, -r_shift[2 * m + i / 2]));
          sums[2 * m + i / 2] += s;
        }
  }
  __device__ __forceinline__ void convert(int step) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&s)[4] = r_s[m][2 * step + i / 2];
        r_p[step][m][i] = ptx::pack<T>(s[i % 2 * 2], s[i % 2 * 2 + 1]);
      }
  }

  /// New maxima, with the factors by which what is there must be scaled.
  __device__ __forceinline__ void new_reference(float (&alpha)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float x = r_max[r];
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
        x = fmaxf(x, fmaxf(r_s[r / 2][n][r % 2 * 2], r_s[r / 2][n][r % 2 * 2 + 1]));
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
      const float shift = x == -kInfinity ? 0.f : x * c;
      alpha[r] = r_max[r] == -kInfinity ? 0.f : ptx::exp2_approx(r_shift[r] - shift);
      r_max[r] = x;
      r_shift[r] = shift;
    }
  }
  __device__ __forceinline__ void rescale(const float (&alpha)[kRows]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) r_o[m][n][i] *= alpha[2 * m + i / 2];
  }
  /// Softmax of the whole tile against its own maxima: P, sums and O follow.
  __device__ __forceinline__ void exact_softmax() {
    float alpha[kRows];
    new_reference(alpha);
    rescale(alpha);
#pragma unroll
    for (int r = 0; r < kRows; ++r) r_sum[r] *= alpha[r];
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
      exponentials(step, r_sum);
      convert(step);
    }
    set_limits();
  }

  /// O / l and the log-sum-exp of the warp's rows, of which `rows` exist, from query row `q_row` of the operand on.
  /// Rows of 16 bits pass through the warp's part of Q at s_rows, so that global memory gets 16 bytes a thread.
  __device__ __forceinline__ void finish(char* s_rows, int rows, std::int64_t item, std::int64_t head,
                                         std::int64_t q_row) {
    const bool wide = args.x.out.dtype == DType::f32;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int m = r / 2, row = m * 16 + r % 2 * 8 + lane / 4;
      float sum = r_sum[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const float inverse = sum == 0 ? 0 : 1 / sum;
      if (args.x.lse && lane % 4 == 0 && row < rows)
        *args.x.lse.row(item, head, q_row + row) = sum == 0 ? -kInfinity : fmaf(r_shift[r], kLn2, logf(sum));
      float* g_row = row < rows ? reinterpret_cast<float*>(args.x.out.row(item, q_row + row, head)) : nullptr;
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        const float low = r_o[m][n][r % 2 * 2] * inverse, high = r_o[m][n][r % 2 * 2 + 1] * inverse;
        if (!wide) {
          *reinterpret_cast<std::uint32_t*>(s_rows + Layout::offset(row, n) + lane % 4 * 4) = ptx::pack<T>(low, high);
        } else if (g_row != nullptr) {
          const int column = n * 8 + lane % 4 * 2;
          if (column < args.problem.head_dim_v) g_row[column] = low;
          if (column + 1 < args.problem.head_dim_v) g_row[column + 1] = high;
        }
      }
    }
    if (wide) return;
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < rows * Layout::kChunks; i += 32) {
      const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
      const int columns = static_cast<int>(args.problem.head_dim_v) - chunk * 8;
      const T* s_chunk = reinterpret_cast<const T*>(s_rows + Layout::offset(row, chunk));
      T* g_chunk = reinterpret_cast<T*>(args.x.out.row(item, q_row + row, head)) + chunk * 8;
      if (columns >= 8 && args.out_alignment == 16) {
        *reinterpret_cast<uint4*>(g_chunk) = *reinterpret_cast<const uint4*>(s_chunk);
      } else {
        for (int c = 0; c < min(columns, 8); ++c) g_chunk[c] = s_chunk[c];
      }
    }
  }
  /// What a row's scores may reach before its reference must follow.
  __device__ __forceinline__ void set_limits() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (kUse.maximum == Maximum::lazy) r_limit[r] = r_max[r] == -kInfinity ? -kInfinity : r_max[r] + 8 / c;
      // A row without a key so far has no reference: an infinite shift makes the next block find one.
      if constexpr (kUse.maximum == Maximum::checked) r_shift[r] = r_max[r] == -kInfinity ? -kInfinity : r_shift[r];
    }
  }
  /// Adds a block's sums; true if some row's weights were too large, or not numbers, for its reference.
  __device__ __forceinline__ bool add_sums(const float (&sums)[kRows]) {
    bool beyond = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) beyond |= !(sums[r] <= kSumLimit);
    if (__any_sync(~0u, beyond)) return true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) r_sum[r] += sums[r];
    return false;
  }
  __device__ __forceinline__ bool beyond_limit() const {
    bool beyond = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float x = -kInfinity;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
        x = fmaxf(x, fmaxf(r_s[r / 2][n][r % 2 * 2], r_s[r / 2][n][r % 2 * 2 + 1]));
      beyond |= x > r_limit[r];
    }
    return __any_sync(~0u, beyond);
  }
};

}  // namespace onepass::cuda::sm80
