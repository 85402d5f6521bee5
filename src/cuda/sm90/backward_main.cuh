// What the main warpgroups of the Hopper backward do with 64 keys: products, masks, dS for dQ, dK and dV to memory.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_loader.cuh"
#include "cuda/sm90/backward_passes.cuh"
#include "cuda/sm90/backward_query.cuh"
#include "cuda/sm90/backward_write.cuh"

namespace onepass::cuda::sm90 {

/// Scores and dP are computed transposed, keys by query rows.
template <class C>
class MainWarpgroup {
 public:
  using T = typename C::T;

  /// `half` of the tile's keys; `barrier`: a named barrier of the warpgroup's own.
  __device__ __forceinline__ MainWarpgroup(BlockShared<C>& shared, const BackwardParams& params, int half, int barrier)
      : s_(shared), p_(params), half_(half), barrier_(barrier) {}

 protected:
  static constexpr int kScores = C::kBlockQ / 2;  // registers of a thread
  static constexpr int kKSlots = C::kTile.k_slots, kDsSlots = C::kTile.ds_slots;

  /// r (64 keys, block_q) = own 64 rows of a tile of keys times the rows of a query tile, both (panels, rows, 64).
  template <int kDim>
  static __device__ __forceinline__ void across(float (&r)[kScores], std::uint32_t keys_low, std::uint32_t rows_low) {
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const std::uint32_t a = keys_low + (((k / 4) * C::kBlockK * 128 + (k % 4) * 32) >> 4);
      const std::uint32_t b = rows_low + (((k / 4) * C::kBlockQ * 128 + (k % 4) * 32) >> 4);
      ptx::Wgmma<T, C::kBlockQ>::template ss<0, 0>(r, ptx::descriptor(a), ptx::descriptor(b), k > 0);
    }
  }

  /// r (64 keys, dim) += a (64 keys, block_q) times a query tile (panels, block_q, 64).
  template <int kDim>
  static __device__ __forceinline__ void along(float (&r)[kDim / 2], const std::uint32_t (&a)[kScores / 2],
                                               std::uint32_t tile_at, int accumulate) {
    // The compiler takes no instruction that names more registers than the launch gives each thread.
    constexpr int kN = kDim > 192 ? kDim / 2 : kDim;
    const std::uint32_t low = ptx::descriptor_low(tile_at, C::kBlockQ * 128);
#pragma unroll
    for (int k = 0; k < C::kBlockQ / 16; ++k) {
#pragma unroll
      for (int n = 0; n < kDim / kN; ++n) {
        const std::uint32_t b = low + ((n * (kN / 64) * C::kBlockQ * 128 + k * 16 * 128) >> 4);
        ptx::Wgmma<T, kN>::template rs<1>(reinterpret_cast<float(&)[kN / 2]>(r[n * (kN / 2)]), a + 4 * k,
                                          ptx::descriptor(b), k > 0 ? 1 : accumulate);
      }
    }
  }

  /// LSE of this thread's query rows.
  static __device__ __forceinline__ void load_lse(float (&r_lse)[C::kBlockQ / 4], std::uint32_t s_stats) {
#pragma unroll
    for (int i = 0; i < C::kBlockQ / 16; ++i) {
      ptx::load_shared(s_stats + 16 * i, r_lse[4 * i], r_lse[4 * i + 1], r_lse[4 * i + 2], r_lse[4 * i + 3]);
    }
  }
  /// D of those among the 16 rows from 16 i on.
  static __device__ __forceinline__ void load_d(float (&r_d)[4], std::uint32_t s_stats, int i) {
    ptx::load_shared(s_stats + C::kStatWidth * 16 + 16 * i, r_d[0], r_d[1], r_d[2], r_d[3]);
  }
  /// Statistics of this thread's query rows.
  __device__ __forceinline__ std::uint32_t stats_at(int slot) const {
    return ptx::shared_address(s_.stats[slot]) + threadIdx.x % 4 * (C::kStatWidth * 4);
  }

  /// P = exp(S - LSE), packed.
  __device__ __forceinline__ void weigh(std::uint32_t (&r_p)[kScores / 2], const float (&r_s)[kScores],
                                        const float (&r_lse)[C::kBlockQ / 4]) const {
#pragma unroll
    for (int i = 0; i < C::kBlockQ / 8; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // of 16 keys
        const float* const x = r_s + 4 * i + 2 * half;
        r_p[2 * i + half] = ptx::pack<T>(ptx::exp2_approx(fmaf(x[0], p_.scale_log2, -r_lse[2 * i])),
                                         ptx::exp2_approx(fmaf(x[1], p_.scale_log2, -r_lse[2 * i + 1])));
      }
    }
  }
  /// dS = P (dP - D) of 8 rows, P as rounded.
  static __device__ __forceinline__ void differentiate(std::uint32_t* r_ds, const std::uint32_t* r_p, const float* r_dp,
                                                       const float* r_d) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 prob = widen<T>(r_p[half]);
      r_ds[half] = ptx::pack<T>(prob.x * (r_dp[2 * half] - r_d[0]), prob.y * (r_dp[2 * half + 1] - r_d[1]));
    }
  }

  /// First rows of steps, from `begin` on and before `end`.
  struct Steps {
    int begin, end;
    __device__ __forceinline__ bool hold(int row) const { return row >= begin && row < end; }
  };
  /// Those whose rows all see all 64 keys.
  __device__ __forceinline__ Steps full_rows(const KeyTile& tile) const {
    Steps rows = {uniform(64 * half_ + 64 - tile.hi), uniform(64 * half_ - tile.lo + 2 - C::kBlockQ)};
    if (uniform(tile.keys) < 64 * half_ + 64) rows.begin = kFarRow;
    return rows;
  }
  /// Those of which some row sees some of the keys.
  __device__ __forceinline__ Steps seeing_rows(const KeyTile& tile) const {
    Steps rows = {uniform(64 * half_ + 2 - C::kBlockQ - tile.hi), uniform(min(64 * half_ + 64, tile.keys) - tile.lo)};
    if (uniform(tile.keys) <= 64 * half_) rows.begin = kFarRow;
    return rows;
  }

  /// Hidden pairs get the score -inf.
  __device__ __forceinline__ void hide(float (&r_s)[kScores], const KeyTile& tile, int row) const {
    const unsigned thread = ptx::recomputed(static_cast<int>(threadIdx.x));
    const int key = 64 * half_ + static_cast<int>(thread / 32 % 4 * 16 + thread % 32 / 4);
    const int lo = tile.lo, keys = tile.keys;
    const unsigned width = static_cast<unsigned>(tile.hi) - static_cast<unsigned>(lo);
    const unsigned widths[2] = {key < keys ? width : 0, key + 8 < keys ? width : 0};
    const unsigned base = static_cast<unsigned>(key - row) - thread % 4 * 2 - static_cast<unsigned>(lo);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int half = i / 2 % 2;
      if (base + (8 * half - 8 * (i / 4) - i % 2) >= widths[half]) r_s[i] = p_.hidden;
    }
  }

  /// dS to shared memory, (block_q, 64 keys) with the 128-byte swizzle.
  __device__ __forceinline__ void hand_over(const std::uint32_t (&r_ds)[kScores / 2]) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const std::uint32_t s_ds = ptx::shared_address(s_.ds[ds_.slot][half_]) + (lane / 16 * 8 + lane % 8) * 128 +
                               (((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16);
    ptx::mbarrier_wait(ptx::shared_address(&s_.ds_empty[ds_.slot]), ds_.round ^ 1);
#pragma unroll
    for (int k = 0; k < C::kBlockQ / 16; ++k) {
      ptx::stmatrix_x4_trans(s_ds + k * 16 * 128, r_ds[4 * k], r_ds[4 * k + 1], r_ds[4 * k + 2], r_ds[4 * k + 3]);
    }
    ptx::fence_async_shared();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.ds_full[ds_.slot]));
    ds_.next();
  }

  /// Writes the warpgroup's rows of dK or dV, straight from the sums, so that neither the memory of K nor that of V is
  /// waited for.
  template <int kDim>
  __device__ __forceinline__ void write(const float (&r)[kDim / 2], const Tensor& grad, int dim, float scale,
                                        const KeyTile& tile) const {
    const unsigned thread = ptx::recomputed(static_cast<int>(threadIdx.x)), lane = thread % 32;
    const int key = 64 * half_ + static_cast<int>(thread / 32 % 4 * 16 + lane / 4), keys = tile.keys;
    const bool inside[2] = {key < keys, key + 8 < keys};
    write_rows<T, kDim>(r, grad.row(tile.batch, tile.k_row + key, tile.kv_head), grad.stride_seq * 16, inside, dim,
                        scale, lane);
  }

  BlockShared<C>& s_;
  const BackwardParams& p_;
  const int half_, barrier_;
  RingPlace<C::kStages> stage_;
  RingPlace<kDsSlots> ds_;
};

}  // namespace onepass::cuda::sm90
