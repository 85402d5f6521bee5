// A main warpgroup: 64 keys. Scores and dP are computed transposed, keys by queries, so that P and dS are A operands in
// registers of the products dV += P^T dO and dK += dS^T Q. A step is one tile of query rows.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_loader.cuh"
#include "cuda/sm90/backward_passes.cuh"
#include "cuda/sm90/backward_query.cuh"

namespace onepass::cuda::sm90 {

template <class C>
class KeyWarpgroup {
 public:
  using T = typename C::T;

  __device__ __forceinline__ KeyWarpgroup(BackwardShared<C>& shared, const BackwardParams& params,
                                          const CUtensorMap& map_v, const CUtensorMap& map_dk,
                                          const CUtensorMap& map_dv, int warpgroup)
      : s_(shared), p_(params), map_v_(map_v), map_dk_(map_dk), map_dv_(map_dv), warpgroup_(warpgroup) {}

  __device__ __forceinline__ void run() {
    float r_dk[C::kD / 2], r_dv[C::kDV / 2];
#pragma unroll 1
    for (unsigned done = 0;; ++done) {
      ptx::mbarrier_wait(ptx::shared_address(&s_.tile_full[done % 2]), done / 2 & 1);
      const KeyTile& tile = s_.tiles[done % 2];
      const int steps = uniform(tile.steps);
      if (steps == 0) break;
      if (uniform(tile.keys) <= 64 * warpgroup_) clear_v();
      ptx::mbarrier_wait(ptx::shared_address(&s_.k_full[done % 2]), done / 2 & 1);
      if (done == 0 && threadIdx.x % 128 == 0) load_v(tile);
      // Rows that see all 64 keys are those from full_begin on, before full_end.
      const int first_row = uniform(tile.first_row), end_row = first_row + steps * C::kBlockQ;
      int full_begin = uniform(64 * warpgroup_ + 64 - tile.hi);
      const int full_end = uniform(64 * warpgroup_ - tile.lo + 1);
      if (uniform(tile.keys) < 64 * warpgroup_ + 64) full_begin = kFarRow;
      int row = first_row;
#pragma unroll 1
      for (int left = steps * p_.group, first = 1; left > 0; --left, first = 0) {
        step(r_dk, r_dv, tile, done, row, row < full_begin || row + C::kBlockQ > full_end, first ^ 1);
        row += C::kBlockQ;
        if (row == end_row) row = first_row;
        if (first && done > 0 && threadIdx.x % 128 == 0) {
          ptx::bulk_wait_read_but<0>();  // the last tile's dK
          ptx::mbarrier_arrive(ptx::shared_address(&s_.k_empty[(done + 1) % 2]));
        }
      }
      store(r_dk, r_dv, tile, done);
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.tile_empty[done % 2]));
    }
    if (threadIdx.x % 128 == 0) ptx::bulk_wait_read_but<0>();
  }

 private:
  static constexpr int kScores = C::kBlockQ / 2;

  __device__ __forceinline__ void step(float (&r_dk)[C::kD / 2], float (&r_dv)[C::kDV / 2], const KeyTile& tile,
                                       unsigned done, int row, bool masked, int accumulate) {
    const int slot = stage_.slot;
    const std::uint32_t stats = ptx::shared_address(s_.stats[slot]) + threadIdx.x % 4 * (C::kStatWidth * 4);
    float r_s[kScores];  // scores, then dP
    std::uint32_t r_p[kScores / 2], r_ds[kScores / 2];

    // S = K Q^T.
    ptx::mbarrier_wait(ptx::shared_address(&s_.q_full[slot]), stage_.round);
    ptx::keep(r_s);
    ptx::wgmma_fence();
    const std::uint32_t k_low = ptx::descriptor_low(ptx::shared_address(s_.k[done % 2])) + warpgroup_ * (64 * 128 >> 4);
    const std::uint32_t q_low = ptx::descriptor_low(ptx::shared_address(s_.q[slot]));
    across<C::kD>(r_s, k_low, q_low);
    ptx::wgmma_commit();
    {
      float r_lse[C::kBlockQ / 4];
#pragma unroll
      for (int i = 0; i < C::kBlockQ / 16; ++i) {
        ptx::load_shared(stats + 16 * i, r_lse[4 * i], r_lse[4 * i + 1], r_lse[4 * i + 2], r_lse[4 * i + 3]);
      }
      ptx::mbarrier_wait(ptx::shared_address(&s_.grad_out_full[slot]), stage_.round);
      if (accumulate == 0) ptx::mbarrier_wait(ptx::shared_address(&s_.v_full[warpgroup_]), done & 1);
      ptx::wgmma_wait<0>();
      ptx::keep(r_s);
      if (masked) hide(r_s, tile, row);
#pragma unroll
      for (int i = 0; i < C::kBlockQ / 8; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // of the keys
          float* const x = r_s + 4 * i + 2 * half;
          r_p[2 * i + half] = ptx::pack<T>(ptx::exp2_approx(fmaf(x[0], p_.scale_log2, -r_lse[2 * i])),
                                           ptx::exp2_approx(fmaf(x[1], p_.scale_log2, -r_lse[2 * i + 1])));
        }
      }
    }

    // dP = V dO^T, dV += P dO.
    ptx::keep(r_s);
    ptx::keep(r_dv);
    ptx::keep(r_p);
    ptx::wgmma_fence();
    const std::uint32_t v_low = ptx::descriptor_low(ptx::shared_address(s_.v)) + warpgroup_ * (64 * 128 >> 4);
    const std::uint32_t do_at = ptx::shared_address(s_.grad_out[slot]);
    across<C::kDV>(r_s, v_low, ptx::descriptor_low(do_at));
    ptx::wgmma_commit();
    along<C::kDV>(r_dv, r_p, do_at, accumulate);
    ptx::wgmma_commit();

    // dS = P (dP - D), P as rounded.
    {
      float r_d[2][4];
      const auto load = [&](int i) {
        ptx::load_shared(stats + C::kStatWidth * 16 + 16 * i, r_d[i % 2][0], r_d[i % 2][1], r_d[i % 2][2],
                         r_d[i % 2][3]);
      };
      load(0);
      load(1);
      ptx::wgmma_wait<1>();
      ptx::keep(r_s);
#pragma unroll
      for (int i = 0; i < C::kBlockQ / 8; ++i) {
        const float* const d = &r_d[i / 2 % 2][i % 2 * 2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 prob = unpack<T>(r_p[2 * i + half]);
          const float* const x = r_s + 4 * i + 2 * half;
          r_ds[2 * i + half] = ptx::pack<T>(prob.x * (x[0] - d[0]), prob.y * (x[1] - d[1]));
        }
        if (i % 2 == 1 && i / 2 + 2 < C::kBlockQ / 16) load(i / 2 + 2);
      }
    }

    // dK += dS Q; meanwhile dS goes to the warpgroup of dQ.
    ptx::keep(r_dk);
    ptx::keep(r_ds);
    ptx::wgmma_fence();
    along<C::kD>(r_dk, r_ds, ptx::shared_address(s_.q[slot]), accumulate);
    ptx::wgmma_commit();
    hand_over(r_ds);
    ptx::wgmma_wait<0>();
    ptx::keep(r_dk);
    ptx::keep(r_dv);
    ptx::keep(r_p);
    ptx::keep(r_ds);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.stage_empty[slot]));
    stage_.next();
  }

  /// r (64 keys, block_q) = own 64 rows of a tile of 128 keys times the rows of a query tile, both (panels, rows, 64).
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
    const std::uint32_t low = ptx::descriptor_low(tile_at, C::kBlockQ * 128);
#pragma unroll
    for (int k = 0; k < C::kBlockQ / 16; ++k) {
      ptx::Wgmma<T, kDim>::template rs<1>(r, a + 4 * k, ptx::descriptor(low + (k * 16 * 128 >> 4)),
                                          k > 0 ? 1 : accumulate);
    }
  }

  /// Hidden pairs get the score -inf.
  __device__ __forceinline__ void hide(float (&r_s)[kScores], const KeyTile& tile, int row) const {
    const unsigned thread = ptx::recomputed(static_cast<int>(threadIdx.x));
    const int key = 64 * warpgroup_ + static_cast<int>(thread / 32 % 4 * 16 + thread % 32 / 4);
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
    const std::uint32_t s_ds = ptx::shared_address(s_.ds[ds_.slot][warpgroup_]) + (lane / 16 * 8 + lane % 8) * 128 +
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

  /// dV and dK of the tile, through the memory of V and K; the next tile's V follows dV.
  __device__ __forceinline__ void store(const float (&r_dk)[C::kD / 2], const float (&r_dv)[C::kDV / 2],
                                        const KeyTile& tile, unsigned done) {
    stage<C::kDV>(r_dv, s_.v, 1.f);
    send<C::kDV>(s_.v, map_dv_, p_.operands.grad_v, p_.head_dim_v, tile);
    // dQ reads all of K: its last product, of the step before ds_, must be done.
    RingPlace<2> last = ds_;
    last.slot ^= 1;
    last.round ^= last.slot;
    ptx::mbarrier_wait(ptx::shared_address(&s_.ds_empty[last.slot]), last.round);
    if (threadIdx.x % 128 == 0) {
      const unsigned next = done + 1;
      ptx::mbarrier_wait(ptx::shared_address(&s_.tile_full[next % 2]), next / 2 & 1);
      ptx::bulk_wait_read_but<0>();
      if (s_.tiles[next % 2].steps > 0) load_v(s_.tiles[next % 2]);
    }
    __syncwarp();
    stage<C::kD>(r_dk, s_.k[done % 2], p_.scale);
    send<C::kD>(s_.k[done % 2], map_dk_, p_.operands.grad_k, p_.head_dim, tile);
  }

  /// The warpgroup's rows of V, by one thread; if there are none, clear_v follows.
  __device__ __forceinline__ void load_v(const KeyTile& tile) const {
    const std::uint32_t full = ptx::shared_address(&s_.v_full[warpgroup_]);
    const int rows = min(tile.keys - 64 * warpgroup_, 64);
    if (rows <= 0) {
      ptx::mbarrier_arrive(full);
      return;
    }
    ptx::mbarrier_arrive_expect(full, C::kPanelsV * 64 * 128);
#pragma unroll
    for (int panel = 0; panel < C::kPanelsV; ++panel) {
      ptx::tma_load(ptx::shared_address(s_.v) + (panel * C::kBlockK + 64 * warpgroup_) * 128, &map_v_, full,
                    box_at(64, panel, tile.k_row + 64 * warpgroup_, rows, tile.kv_head, tile.batch));
    }
  }

  /// Zeros for the warpgroup's rows of V: dP of a hidden key counts 0 times, and must not be NaN. The last tile's dV
  /// left before the barrier that its dK passed.
  __device__ __forceinline__ void clear_v() const {
    const std::uint32_t s_rows = ptx::shared_address(s_.v) + 64 * warpgroup_ * 128 + threadIdx.x % 128 * 16;
#pragma unroll 1
    for (int panel = 0; panel < C::kPanelsV; ++panel) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::store_shared(s_rows + panel * C::kBlockK * 128 + i * 128 * 16, 0u, 0u, 0u, 0u);
      }
    }
    ptx::fence_async_shared();
    ptx::named_barrier_sync(1 + warpgroup_, 128);  // the zeros are written; products read them
  }

  /// Writes the warpgroup's rows of a tile (panels, 128, 64), swizzled; all of them are there when this returns.
  template <int kDim>
  __device__ __forceinline__ void stage(const float (&r)[kDim / 2], unsigned char* s_tile, float scale) const {
    const unsigned thread = ptx::recomputed(static_cast<int>(threadIdx.x)), lane = thread % 32;
    const unsigned row = 64 * warpgroup_ + thread / 32 % 4 * 16 + lane % 16;
    const std::uint32_t s_row = ptx::shared_address(s_tile) + row * 128;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const float* const x = r + 8 * k;
      const unsigned column = (2 * (k % 4) + lane / 16) ^ (row % 8);  // of 8 elements
      ptx::stmatrix_x4(s_row + (k / 4) * C::kBlockK * 128 + column * 16, ptx::pack<T>(x[0] * scale, x[1] * scale),
                       ptx::pack<T>(x[2] * scale, x[3] * scale), ptx::pack<T>(x[4] * scale, x[5] * scale),
                       ptx::pack<T>(x[6] * scale, x[7] * scale));
    }
    ptx::fence_async_shared();
    ptx::named_barrier_sync(1 + warpgroup_, 128);  // the warpgroup's rows are written; send() reads them
  }

  /// Writes the staged rows to memory.
  template <int kDim>
  __device__ __forceinline__ void send(const unsigned char* s_tile, const CUtensorMap& map, const Tensor& grad, int dim,
                                       const KeyTile& tile) const {
    const int rows = min(64, tile.keys - 64 * warpgroup_), row = tile.k_row + 64 * warpgroup_;
    if (p_.store_by_tma) {
      if (threadIdx.x % 128 != 0) return;
      if (rows > 0) {
#pragma unroll
        for (int panel = 0; panel < kDim / 64; ++panel) {
          ptx::tma_store(&map, ptx::shared_address(s_tile) + (panel * C::kBlockK + 64 * warpgroup_) * 128,
                         box_at(64, panel, row, rows, tile.kv_head, tile.batch));
        }
      }
      ptx::bulk_commit();
      return;
    }
#pragma unroll 1
    for (int i = ptx::recomputed(static_cast<int>(threadIdx.x)) % 128; i < rows * dim; i += 128) {
      const int r = i / dim, d = i % dim, tile_row = 64 * warpgroup_ + r;
      const unsigned char* const s_chunk =
          s_tile + (d / 64 * C::kBlockK + tile_row) * 128 + ((d % 64 / 8) ^ (tile_row % 8)) * 16;
      reinterpret_cast<std::uint16_t*>(grad.row(tile.batch, row + r, tile.kv_head))[d] =
          reinterpret_cast<const std::uint16_t*>(s_chunk)[d % 8];
    }
    ptx::fence_async_shared();
    ptx::named_barrier_sync(1 + warpgroup_, 128);  // all rows are read; TMA may write there again
  }

  BackwardShared<C>& s_;
  const BackwardParams& p_;
  const CUtensorMap& map_v_;
  const CUtensorMap& map_dk_;
  const CUtensorMap& map_dv_;
  const int warpgroup_;
  RingPlace<C::kStages> stage_;
  RingPlace<2> ds_;
};

}  // namespace onepass::cuda::sm90
