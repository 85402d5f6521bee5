// A main warpgroup that has 64 keys to itself. S and dP leave the products as the A operands, P and dS, of
// dV += P^T dO and dK += dS^T Q. A step is one tile of query rows.
#pragma once

#include "cuda/sm90/backward_main.cuh"

namespace onepass::cuda::sm90 {

template <class C>
class KeyWarpgroup : MainWarpgroup<C> {
  using Base = MainWarpgroup<C>;
  using Base::half_, Base::p_, Base::s_, Base::stage_;
  using Base::kKSlots, Base::kScores;

 public:
  __device__ __forceinline__ KeyWarpgroup(BackwardShared<C>& shared, const BackwardParams& params, int warpgroup)
      : Base(shared, params, warpgroup, 1 + warpgroup) {}

  __device__ __forceinline__ void run() {
    float r_dk[C::kD / 2], r_dv[C::kDV / 2];
#pragma unroll 1
    for (unsigned done = 0;; ++done) {
      ptx::mbarrier_wait(ptx::shared_address(&s_.tile_full[done % 2]), done / 2 & 1);
      const KeyTile& tile = s_.tiles[done % 2];
      const int steps = uniform(tile.steps);
      if (steps == 0) break;
      ptx::mbarrier_wait(ptx::shared_address(&s_.k_full[done % kKSlots]), done / kKSlots & 1);
      const int first_row = uniform(tile.first_row), end_row = first_row + steps * C::kBlockQ;
      const auto full = Base::full_rows(tile), seeing = Base::seeing_rows(tile);
      int row = first_row, started = 0;
#pragma unroll 1
      for (int left = steps * p_.group; left > 0; --left) {
        if (seeing.hold(row)) {
          step(r_dk, r_dv, tile, done, row, !full.hold(row), started);
          started = 1;
        } else {
          pass(done);
        }
        row += C::kBlockQ;
        if (row == end_row) row = first_row;
      }
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.v_empty[half_]));
      Base::template write<C::kDV>(r_dv, p_.operands.grad_v, p_.head_dim_v, 1.f, tile);
      Base::template write<C::kD>(r_dk, p_.operands.grad_k, p_.head_dim, p_.scale, tile);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.tile_empty[done % 2]));
    }
  }

 private:
  /// A step whose rows see none of the keys: dS is 0. A half without keys has no others; it too waits for V, which is
  /// then given back.
  __device__ __forceinline__ void pass(unsigned done) {
    const std::uint32_t r_ds[kScores / 2] = {};
    ptx::mbarrier_wait(ptx::shared_address(&s_.v_full[half_]), done & 1);
    ptx::mbarrier_wait(ptx::shared_address(&s_.q_full[stage_.slot]), stage_.round);
    Base::hand_over(r_ds);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.stage_empty[stage_.slot]));
    stage_.next();
  }

  __device__ __forceinline__ void step(float (&r_dk)[C::kD / 2], float (&r_dv)[C::kDV / 2], const KeyTile& tile,
                                       unsigned done, int row, bool masked, int accumulate) {
    const int slot = stage_.slot;
    const std::uint32_t stats = Base::stats_at(slot);
    float r_s[kScores];  // scores, then dP
    std::uint32_t r_p[kScores / 2], r_ds[kScores / 2];

    // S = K Q^T.
    ptx::mbarrier_wait(ptx::shared_address(&s_.q_full[slot]), stage_.round);
    ptx::keep(r_s);
    ptx::wgmma_fence();
    const std::uint32_t k_low =
        ptx::descriptor_low(ptx::shared_address(s_.k[done % kKSlots])) + half_ * (64 * 128 >> 4);
    const std::uint32_t q_at = ptx::shared_address(s_.q[slot]);
    Base::template across<C::kD>(r_s, k_low, ptx::descriptor_low(q_at));
    ptx::wgmma_commit();
    {
      float r_lse[C::kBlockQ / 4];
      Base::load_lse(r_lse, stats);
      ptx::mbarrier_wait(ptx::shared_address(&s_.grad_out_full[slot]), stage_.round);
      if (accumulate == 0) ptx::mbarrier_wait(ptx::shared_address(&s_.v_full[half_]), done & 1);
      ptx::wgmma_wait<0>();
      ptx::keep(r_s);
      if (masked) Base::hide(r_s, tile, row);
      Base::weigh(r_p, r_s, r_lse);
    }

    // dP = V dO^T, dV += P dO.
    ptx::keep(r_s);
    ptx::keep(r_dv);
    ptx::keep(r_p);
    ptx::wgmma_fence();
    const std::uint32_t v_low = ptx::descriptor_low(ptx::shared_address(s_.v)) + half_ * (64 * 128 >> 4);
    const std::uint32_t do_at = ptx::shared_address(s_.grad_out[slot]);
    Base::template across<C::kDV>(r_s, v_low, ptx::descriptor_low(do_at));
    ptx::wgmma_commit();
    Base::template along<C::kDV>(r_dv, r_p, do_at, accumulate);
    ptx::wgmma_commit();

    // dS = P (dP - D).
    {
      float r_d[2][4];
      Base::load_d(r_d[0], stats, 0);
      Base::load_d(r_d[1], stats, 1);
      ptx::wgmma_wait<1>();
      ptx::keep(r_s);
#pragma unroll
      for (int i = 0; i < C::kBlockQ / 8; ++i) {
        Base::differentiate(r_ds + 2 * i, r_p + 2 * i, r_s + 4 * i, &r_d[i / 2 % 2][i % 2 * 2]);
        if (i % 2 == 1 && i / 2 + 2 < C::kBlockQ / 16) Base::load_d(r_d[i / 2 % 2], stats, i / 2 + 2);
      }
    }

    // dK += dS Q; meanwhile dS goes to the warpgroup of dQ.
    ptx::keep(r_dk);
    ptx::keep(r_ds);
    ptx::wgmma_fence();
    Base::template along<C::kD>(r_dk, r_ds, q_at, accumulate);
    ptx::wgmma_commit();
    Base::hand_over(r_ds);
    ptx::wgmma_wait<0>();
    ptx::keep(r_dk);
    ptx::keep(r_dv);
    ptx::keep(r_p);
    ptx::keep(r_ds);
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.stage_empty[slot]));
    stage_.next();
  }
};

}  // namespace onepass::cuda::sm90
