// The two main warpgroups where they share 64 keys, since dK and dV together would not fit the registers of one: the
// first has S, P and dV += P^T dO, the second dP, dS and dK += dS^T Q. P passes through shared memory. A step is one
// tile of query rows; the first may be a step ahead.
#pragma once

#include "cuda/sm90/backward_main.cuh"

namespace onepass::cuda::sm90 {

template <class C>
class PairValues : MainWarpgroup<C> {
  using Base = MainWarpgroup<C>;
  using Base::kKSlots, Base::kScores, Base::p_, Base::s_, Base::stage_;

 public:
  __device__ __forceinline__ PairValues(PairShared<C>& shared, const BackwardParams& params)
      : Base(shared, params, 0, 1) {}

  __device__ __forceinline__ void run() {
    float r_dv[C::kDV / 2];
#pragma unroll 1
    for (unsigned done = 0;; ++done) {
      ptx::mbarrier_wait(ptx::shared_address(&s_.tile_full[done % 2]), done / 2 & 1);
      const KeyTile& tile = s_.tiles[done % 2];
      const int steps = uniform(tile.steps);
      if (steps == 0) break;
      ptx::mbarrier_wait(ptx::shared_address(&s_.k_full[done % kKSlots]), done / kKSlots & 1);
      const int first_row = uniform(tile.first_row), end_row = first_row + steps * C::kBlockQ;
      const auto full = Base::full_rows(tile);
      int row = first_row;
#pragma unroll 1
      for (int left = steps * p_.group, accumulate = 0; left > 0; --left, accumulate = 1) {
        step(r_dv, tile, done, row, !full.hold(row), accumulate);
        row += C::kBlockQ;
        if (row == end_row) row = first_row;
      }
      Base::template write<C::kDV>(r_dv, p_.operands.grad_v, p_.head_dim_v, 1.f, tile);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.tile_empty[done % 2]));
    }
  }

 private:
  __device__ __forceinline__ void step(float (&r_dv)[C::kDV / 2], const KeyTile& tile, unsigned done, int row,
                                       bool masked, int accumulate) {
    const int slot = stage_.slot;
    float r_s[kScores];
    std::uint32_t r_p[kScores / 2];

    // S = K Q^T.
    ptx::mbarrier_wait(ptx::shared_address(&s_.q_full[slot]), stage_.round);
    ptx::keep(r_s);
    ptx::wgmma_fence();
    Base::template across<C::kD>(r_s, ptx::descriptor_low(ptx::shared_address(s_.k[done % kKSlots])),
                                 ptx::descriptor_low(ptx::shared_address(s_.q[slot])));
    ptx::wgmma_commit();
    {
      float r_lse[C::kBlockQ / 4];
      Base::load_lse(r_lse, Base::stats_at(slot));
      ptx::wgmma_wait<0>();
      ptx::keep(r_s);
      if (masked) Base::hide(r_s, tile, row);
      Base::weigh(r_p, r_s, r_lse);
    }

    // P to the other warpgroup.
    const std::uint32_t s_own = ptx::shared_address(s_.p) + threadIdx.x % 128 * 16;
    ptx::mbarrier_wait(ptx::shared_address(&s_.p_empty), round_ ^ 1);
#pragma unroll
    for (int k = 0; k < C::kBlockQ / 16; ++k) {
      ptx::store_shared(s_own + k * 128 * 16, r_p[4 * k], r_p[4 * k + 1], r_p[4 * k + 2], r_p[4 * k + 3]);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.p_full));
    round_ ^= 1;

    // dV += P dO.
    ptx::mbarrier_wait(ptx::shared_address(&s_.grad_out_full[slot]), stage_.round);
    ptx::keep(r_dv);
    ptx::keep(r_p);
    ptx::wgmma_fence();
    Base::template along<C::kDV>(r_dv, r_p, ptx::shared_address(s_.grad_out[slot]), accumulate);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::keep(r_dv);
    ptx::keep(r_p);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.stage_empty[slot]));
    stage_.next();
  }

  int round_ = 0;  // of P
};

template <class C>
class PairKeys : MainWarpgroup<C> {
  using Base = MainWarpgroup<C>;
  using Base::kKSlots, Base::kScores, Base::p_, Base::s_, Base::stage_;

 public:
  __device__ __forceinline__ PairKeys(PairShared<C>& shared, const BackwardParams& params)
      : Base(shared, params, 0, 2) {}

  __device__ __forceinline__ void run() {
    float r_dk[C::kD / 2];
#pragma unroll 1
    for (unsigned done = 0;; ++done) {
      ptx::mbarrier_wait(ptx::shared_address(&s_.tile_full[done % 2]), done / 2 & 1);
      const KeyTile& tile = s_.tiles[done % 2];
      const int steps = uniform(tile.steps);
      if (steps == 0) break;
      ptx::mbarrier_wait(ptx::shared_address(s_.v_full), done & 1);
#pragma unroll 1
      for (int left = steps * p_.group, accumulate = 0; left > 0; --left, accumulate = 1) step(r_dk, accumulate);
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(s_.v_empty));
      Base::template write<C::kD>(r_dk, p_.operands.grad_k, p_.head_dim, p_.scale, tile);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.tile_empty[done % 2]));
    }
  }

 private:
  __device__ __forceinline__ void step(float (&r_dk)[C::kD / 2], int accumulate) {
    const int slot = stage_.slot;
    const std::uint32_t stats = Base::stats_at(slot);
    const std::uint32_t s_own = ptx::shared_address(s_.p) + threadIdx.x % 128 * 16;
    float r_dp[kScores];
    std::uint32_t r_ds[kScores / 2];

    // dP = V dO^T.
    ptx::mbarrier_wait(ptx::shared_address(&s_.grad_out_full[slot]), stage_.round);
    ptx::keep(r_dp);
    ptx::wgmma_fence();
    Base::template across<C::kDV>(r_dp, ptx::descriptor_low(ptx::shared_address(s_.v)),
                                  ptx::descriptor_low(ptx::shared_address(s_.grad_out[slot])));
    ptx::wgmma_commit();

    // dS = P (dP - D).
    {
      float r_d[2][4];
      std::uint32_t r_p[2][4];
      const auto load = [&](int k) {
        Base::load_d(r_d[k % 2], stats, k);
        std::uint32_t(&r)[4] = r_p[k % 2];
        ptx::load_shared(s_own + k * 128 * 16, r[0], r[1], r[2], r[3]);
      };
      ptx::mbarrier_wait(ptx::shared_address(&s_.q_full[slot]), stage_.round);
      ptx::mbarrier_wait(ptx::shared_address(&s_.p_full), round_);
      round_ ^= 1;
      load(0);
      load(1);
      ptx::wgmma_wait<0>();
      ptx::keep(r_dp);
#pragma unroll
      for (int k = 0; k < C::kBlockQ / 16; ++k) {
        Base::differentiate(r_ds + 4 * k, r_p[k % 2], r_dp + 8 * k, r_d[k % 2]);
        Base::differentiate(r_ds + 4 * k + 2, r_p[k % 2] + 2, r_dp + 8 * k + 4, r_d[k % 2] + 2);
        if (k + 2 < C::kBlockQ / 16) load(k + 2);
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.p_empty));

    // dK += dS Q; meanwhile dS goes to the warpgroup of dQ.
    ptx::keep(r_dk);
    ptx::keep(r_ds);
    ptx::wgmma_fence();
    Base::template along<C::kD>(r_dk, r_ds, ptx::shared_address(s_.q[slot]), accumulate);
    ptx::wgmma_commit();
    Base::hand_over(r_ds);
    ptx::wgmma_wait<0>();
    ptx::keep(r_dk);
    ptx::keep(r_ds);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.stage_empty[slot]));
    stage_.next();
  }

  int round_ = 0;  // of P
};

}  // namespace onepass::cuda::sm90
