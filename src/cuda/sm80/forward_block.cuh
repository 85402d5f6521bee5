// What one warp of the forward pass holds and does: its rows of S = Q K^T, P = softmax(S) and O = P V, in registers.
#pragma once

#include <type_traits>

#include "cuda/device/division.cuh"
#include "cuda/device/quad.cuh"
#include "cuda/device/swizzle.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/sm80/load_tile.cuh"
#include "cuda/sm80/rows.cuh"
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
  unsigned heads;           // of all items
  unsigned q_tiles;         // a head
  Divisor heads_together;   // heads whose tiles are interleaved
  Divisor rest_together;    // the same of the last of them
  Divisor blocks_together;  // their tiles
  Divisor heads_q;          // of an item
  Divisor group;            // query heads a KV head
  bool same;                // all items are the same sequence:
  Sequence sequence;

  /// Which tile a thread block takes: of so many a head, and so many heads together.
  void set_places(std::int64_t tiles, std::int64_t together) {
    const auto divisor = [](std::int64_t x) { return Divisor(static_cast<std::uint32_t>(max_of<std::int64_t>(x, 1))); };
    heads = static_cast<unsigned>(problem.batch * problem.heads_q);
    q_tiles = static_cast<unsigned>(tiles);
    heads_together = divisor(together);
    rest_together = divisor(heads % together == 0 ? together : heads % together);
    blocks_together = divisor(together * tiles);
    heads_q = divisor(problem.heads_q);
    group = divisor(problem.group());
    const MaskSpec& mask = problem.mask;
    same = mask.cu_seqlens_q == nullptr && mask.cu_seqlens_k == nullptr && mask.q_length == nullptr &&
           mask.k_start == nullptr && mask.k_length == nullptr && mask.q_position == nullptr;
    if (same) sequence = problem.sequence(0);
  }
};

template <class T, int kHeadDim, class Plan>
struct ForwardBlock {
  static constexpr ForwardTiles kTiles = Plan::kTiles;
  static constexpr ForwardSteps kUse = Plan::kUse;
  static constexpr int kBlockK = kTiles.block_k, kRowTiles = kTiles.row_tiles, kStages = kTiles.stages;
  static constexpr int kColumnTiles = kBlockK / 8, kOutTiles = kHeadDim / 8, kSteps = kHeadDim / 16;
  static constexpr int kRows = 2 * kRowTiles;  // rows a thread has a part of
  static_assert(kRows == 2 || kRows == 4);
  static constexpr int kWarpRows = kTiles.warp_rows();
  static constexpr float kSumLimit = 256, kTileLimit = 32768;  // of a block's, a tile's weights of a thread in a row
  static constexpr bool kRetries = kTiles.retries && kUse.maximum == Maximum::checked;
  static constexpr unsigned kOutgrown = 1u << 31;
  using Layout = std::conditional_t<kUse.swizzle, SwizzledTile<kHeadDim>, PlainTile<kHeadDim>>;
  static constexpr int kTileBytes = kBlockK * Layout::kRowBytes;
  using KeyLoader = TileLoader<Layout, kBlockK, kHeadDim, kTiles.threads(), kUse.copies>;
  using QueryLoader = TileLoader<Layout, kTiles.block_q(), kHeadDim, kTiles.threads(), kUse.copies>;

  const ForwardArgs& args;
  int lane;
  std::uint32_t s_q, s_k, s_v;            // addresses: the warp's rows of Q, the first stage of K and V
  std::uint32_t rows_lane, columns_lane;  // bytes from there to this lane's row in fragments of Q and V, of K
  float c;                                // scale_log2

  std::uint32_t r_q[kTiles.q_in_registers ? kSteps : 1][kRowTiles][4];
  float r_s[kRowTiles][kColumnTiles][4];
  std::uint32_t r_p[kBlockK / 16][kRowTiles][4];
  float r_o[kRowTiles][kOutTiles][4];
  float r_shift[kRows];  // a row's reference, what its exponents are counted from; 0 without a key so far
  float r_sum[kRows];    // of this thread's weights
  unsigned without = (1u << kRows) - 1;  // bit r: row r saw no key so far; kOutgrown: a sum was beyond kTileLimit
  bool some_without = true;              // in some lane

  /// This lane's place, of a row and of chunk 0 or 1, moved on.
  __device__ __forceinline__ static std::uint32_t at(std::uint32_t place, int row, int chunk) {
    if constexpr (kUse.swizzle) return LaneRows<kHeadDim>(place).at(row, chunk);
    return place + row * Layout::kRowBytes + chunk * 16;
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
        ptx::ldmatrix_x4(r_q[step % (kTiles.q_in_registers ? kSteps : 1)][m], s_q + at(rows_lane, m * 16, 2 * step));
  }
  /// S = Q K^T for the K tile of a stage, bytes from the first.
  __device__ __forceinline__ void scores(std::uint32_t stage) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) r_s[m][n][i] = 0;
    const std::uint32_t s_tile = s_k + stage;
    constexpr bool kAhead = kUse.fragments_ahead && kTiles.k_ahead;
    std::uint32_t a[kRowTiles][4], b[kAhead ? 2 : 1][kColumnTiles / 2][4];
    const auto fetch = [&](int step) {
#pragma unroll
      for (int n = 0; n < kColumnTiles / 2; ++n)
        ptx::ldmatrix_x4(b[kAhead ? step % 2 : 0][n], s_tile + at(columns_lane, n * 16, 2 * step));
    };
    if (kAhead) fetch(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (!kTiles.q_in_registers)
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) ptx::ldmatrix_x4(a[m], s_q + at(rows_lane, m * 16, 2 * step));
      const int next = kAhead ? step + 1 : step;
      if (next < kSteps) fetch(next);
      const auto& k = b[kAhead ? step % 2 : 0];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          const int x = m % 2 ? kColumnTiles - 1 - n : n;
          const auto& q = kTiles.q_in_registers ? r_q[step % (kTiles.q_in_registers ? kSteps : 1)][m] : a[m];
          ptx::mma_16x8x16<T>(r_s[m][x], q, k[x / 2][x % 2 * 2], k[x / 2][x % 2 * 2 + 1]);
        }
    }
  }

  /// O += P V for the V tile of a stage.
  __device__ __forceinline__ void values(std::uint32_t stage) {
    constexpr int kPair = 2;                        // V fragments (16 columns) a group
    constexpr int kGroups = kOutTiles / 2 / kPair;  // groups a key step
    constexpr int kUnits = kBlockK / 16 * kGroups;
    const std::uint32_t s_tile = s_v + stage;
    std::uint32_t b[2][kPair][4];
    const auto fetch = [&](int unit) {
#pragma unroll
      for (int i = 0; i < kPair; ++i)
        ptx::ldmatrix_x4_trans(b[unit % 2][i],
                               s_tile + at(rows_lane, unit / kGroups * 16, unit % kGroups * 2 * kPair + 2 * i));
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

  /// References from the maxima; what is there is scaled to them.
  __device__ __forceinline__ void new_references(bool rescale) {
    float alpha[kRows];
    unsigned none = 0;
    if constexpr (kRetries) {
      none = without & kOutgrown;
#pragma unroll
      for (int r = 0; r < kRows; ++r) none |= !(r_sum[r] <= kTileLimit) ? kOutgrown : 0;  // as it won't be seen later
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float x = -kInfinity;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
        x = fmaxf(x, fmaxf(r_s[r / 2][n][r % 2 * 2], r_s[r / 2][n][r % 2 * 2 + 1]));
      x = quad_max(x);
      const bool had = (without >> r & 1) == 0;
      const float shift = had ? fmaxf(r_shift[r], x * c) : x * c;
      alpha[r] = had ? ptx::exp2_approx(r_shift[r] - shift) : 0;
      none |= shift == -kInfinity ? 1u << r : 0;
      r_shift[r] = shift == -kInfinity ? 0 : shift;
    }
    without = none;
    some_without = __any_sync(~0u, (none & ~kOutgrown) != 0);
    if (!rescale) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) r_sum[r] *= alpha[r];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) r_o[m][n][i] *= alpha[2 * m + i / 2];
  }
  /// P against the references; adds to sums.
  __device__ __forceinline__ void weights(float (&sums)[kRows]) {
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
      exponentials(step, sums);
      convert(step);
    }
  }
  /// Whether some row's weights were too large for its reference, or not numbers.
  __device__ __forceinline__ static bool beyond_limit(const float (&sums)[kRows]) {
    bool beyond = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) beyond |= !(sums[r] <= kSumLimit);
    return __any_sync(~0u, beyond);
  }
  /// Whether the tile's weights of some row were so large, or not numbers, that something is infinite or none now; a
  /// weight below the limit is a number in float16 too. References that grew later may have made the sums small again.
  __device__ __forceinline__ bool overflown() const {
    bool beyond = (without & kOutgrown) != 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) beyond |= !(r_sum[r] <= kTileLimit);
    if (__builtin_expect(!__any_sync(~0u, beyond), 1)) return false;
    float zero = 0;  // unless something times 0 is not
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      zero = fmaf(quad_sum(r_sum[r]), 0, zero);
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n)
        zero = fmaf(r_o[r / 2][n][r % 2 * 2], 0, fmaf(r_o[r / 2][n][r % 2 * 2 + 1], 0, zero));
    }
    return zero != 0;
  }
  /// Whether some maximum exceeds its reference by more than 8 in base 2.
  __device__ __forceinline__ bool references_too_low() const {
    bool low = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float x = -kInfinity;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
        x = fmaxf(x, fmaxf(r_s[r / 2][n][r % 2 * 2], r_s[r / 2][n][r % 2 * 2 + 1]));
      low |= x * c > r_shift[r] + 8;
    }
    return __any_sync(~0u, low);
  }

  /// O / l and the log-sum-exp of the warp's rows, of which `rows` exist, from query row `q_row` of the operand on.
  /// Whether those are all is the caller's to say: ptxas 13.0 for 9.0 takes a comparison of the clamped number with its
  /// bound for always true (VIMNMX.RELU with two predicates).
  __device__ __forceinline__ void finish(int rows, bool all_rows, std::int64_t item, std::int64_t head,
                                         std::int64_t q_row) {
    float* const g_lse = args.x.lse ? args.x.lse.row(item, head, q_row) : nullptr;
    // Each lane of a quad takes one of the rows of which they all have a part.
    const int own = lane % kRows, own_row = own / 2 * 16 + own % 2 * 8 + lane / 4;
    float sum = 0, shift = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float all = quad_sum(r_sum[r]);
      if (own == r) sum = all, shift = r_shift[r];
    }
    if (g_lse != nullptr && lane % 4 < kRows && own_row < rows)
      g_lse[own_row] = sum == 0 ? -kInfinity : fmaf(shift, kLn2, logf(sum));
    const float inverse = sum == 0 ? 0 : 1 / sum;
#pragma unroll
    for (int r = 0; r < kRows; ++r) r_sum[r] = __shfl_sync(~0u, inverse, lane / 4 * 4 + r);
    char* const g_rows = args.x.out.row(item, q_row, head);
    if (args.x.out.dtype == DType::f32) {
      write_wide(reinterpret_cast<float*>(g_rows), rows);
    } else {
      write(g_rows, rows, all_rows);
    }
  }
  __device__ __forceinline__ void write_wide(float* g_rows, int rows) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = r / 2 * 16 + r % 2 * 8 + lane / 4;
      float* const g_row = g_rows + row * args.x.out.stride_seq;
      const int columns = row < rows ? static_cast<int>(args.problem.head_dim_v) - lane % 4 * 2 : 0;
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (n * 8 + i < columns) g_row[n * 8 + lane % 4 * 2 + i] = r_o[r / 2][n][r % 2 * 2 + i] * r_sum[r];
    }
  }
  /// Rows of 16 bits pass through the warp's part of Q, so that global memory gets 16 bytes a thread.
  __device__ __forceinline__ void write(char* g_rows, int rows, bool all_rows) {
    const std::uint32_t s_lane = s_q + Layout::offset(lane / 4, 0) + lane % 4 * 4;
    __syncwarp();  // the warp's lanes have read Q
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n)
        ptx::store_shared(at(s_lane, r / 2 * 16 + r % 2 * 8, n),
                          ptx::pack<T>(r_o[r / 2][n][r % 2 * 2] * r_sum[r], r_o[r / 2][n][r % 2 * 2 + 1] * r_sum[r]));
    __syncwarp();
    constexpr int kAcross = Layout::kGroup, kDown = 32 / kAcross, kTimes = Layout::kChunks / kAcross;
    const int first = lane / kAcross, chunk = lane % kAcross;
    const std::int64_t row_bytes = args.x.out.stride_seq * 2;
    const bool fast = all_rows && args.problem.head_dim_v == kHeadDim && args.out_alignment == 16;
    if (fast) {
      char* g_lane = g_rows + first * row_bytes + chunk * 16;
#pragma unroll
      for (int pass = 0; pass < kWarpRows / kDown; ++pass, g_lane += kDown * row_bytes)
#pragma unroll
        for (int time = 0; time < kTimes; ++time) {
          uint4 x;
          ptx::load_shared(s_q + Layout::offset(first + pass * kDown, chunk + time * kAcross), x.x, x.y, x.z, x.w);
          *reinterpret_cast<uint4*>(g_lane + time * kAcross * 16) = x;
        }
      return;
    }
#pragma unroll 1
    for (int i = lane; i < rows * Layout::kChunks; i += 32) {
      const int row = i / Layout::kChunks, column = i % Layout::kChunks * 8;
      uint4 x;
      ptx::load_shared(s_q + Layout::offset(row, column / 8), x.x, x.y, x.z, x.w);
      store_eight(reinterpret_cast<std::uint16_t*>(g_rows + row * row_bytes), column,
                  static_cast<int>(args.problem.head_dim_v), args.out_alignment == 16, x);
    }
  }
};

}  // namespace onepass::cuda::sm80
