// dQ without passes of its own: of the key tiles that visit a query tile the first stores its part, the last adds the
// sums to its own and writes dQ. A deterministic call's visits come one after another, those of later keys first.
//
// Whoever waits for the answer of the L2 cache loses a microsecond, and a release waits for it too, so the warpgroup of
// dQ neither asks nor tells: a thread of the loading warpgroup, the keeper, goes ahead of it, begins its visits, lets
// each go on when it may, and reports those whose sums are in memory. Each visit waits only for some begun before it,
// so none waits in a circle; of a deterministic call, for those of tiles that were taken before its own: rows upwards
// from the first one that sees the keys give tiles that begin together different query tiles under a causal mask, the
// later keys ahead; without one a tile begins as the one before it leaves the first rows.
#pragma once

#include "cuda/ptx/reduce.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_loader.cuh"
#include "cuda/sm90/backward_plan.cuh"
#include "cuda/sm90/backward_query.cuh"
#include "cuda/sm90/backward_write.cuh"

namespace onepass::cuda::sm90 {

/// One thread of the loading warpgroup.
template <class C>
class VisitKeeper {
 public:
  __device__ __forceinline__ VisitKeeper(BackwardShared<C>& shared, const BackwardParams& params)
      : s_(shared), p_(params) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (unsigned done = 0;; ++done) {
      while (!ptx::mbarrier_test(ptx::shared_address(&s_.tile_full[done % 2]), done / 2 & 1)) report();
      const KeyTile& tile = s_.tiles[done % 2];
      if (tile.steps == 0) break;
#pragma unroll 1
      for (int head = tile.kv_head * p_.group; head < (tile.kv_head + 1) * p_.group; ++head) {
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) begin(tile, head, tile.first_row + step * C::kBlockQ);
      }
      ptx::mbarrier_arrive(ptx::shared_address(&s_.tile_empty[done % 2]));
    }
    while (reported_ != begun_) report();
  }

 private:
  /// Begins a visit, and lets it go on when those before it have done what it needs: the first has stored, of a last
  /// one and in deterministic calls all have reported.
  __device__ __forceinline__ void begin(const KeyTile& tile, int head, int row) {
    while (begun_ - reported_ == kVisitSlots) report();
    const int index = head * static_cast<int>(p_.tiles) + tile.q_tile + row / C::kBlockQ;
    unsigned long long* const g_count = &p_.visits[index].word;
    VisitCount count = {p_.ordered ? ptx::load_acquire(g_count) : ptx::fetch_add_acquire(g_count, VisitCount::kBegin)};
    const unsigned before = p_.ordered ? turn_of<C>(tile, row) : count.begun(), others = count.all() - 1;
    Visit visit = before == 0 ? Visit::first : Visit::between;
    if (before == others) visit = before == 0 ? Visit::only : Visit::last;
    const unsigned slot = begun_ % kVisitSlots;
    s_.visits[slot] = visit;
    s_.visited[slot] = before == others ? -1 : index;  // nobody waits for the last one
    // The first one reports before all others.
    const unsigned needed = p_.ordered || before == others ? before : min(before, 1u);
    while (count.reports() < needed) {
      report();
      count = {ptx::load_acquire(g_count)};
    }
    ptx::fence_async_global();
    ptx::mbarrier_arrive(ptx::shared_address(&s_.visit_full[slot]));
    ++begun_;
  }

  /// Reports the oldest visit that is not reported, if its sums are in memory.
  __device__ __forceinline__ void report() {
    const unsigned slot = reported_ % kVisitSlots;
    if (reported_ == begun_ ||
        !ptx::mbarrier_test(ptx::shared_address(&s_.sums_full[slot]), reported_ / kVisitSlots & 1)) {
      return;
    }
    const int index = s_.visited[slot];
    if (index >= 0) ptx::reduce_add_release(&p_.visits[index].word, VisitCount::kReport);
    ++reported_;
  }

  BackwardShared<C>& s_;
  const BackwardParams& p_;
  unsigned begun_ = 0, reported_ = 0;
};

/// One of the four warps of dQ. Each looks after its quarter of every piece of dQ alone; its lane 0 copies and reports.
template <class C>
class QueryWarp {
 public:
  using T = typename C::T;

  __device__ __forceinline__ QueryWarp(BlockShared<C>& shared, const BackwardParams& params) : s_(shared), p_(params) {}

  __device__ __forceinline__ void run() {
    constexpr int kKSlots = C::kTile.k_slots;
#pragma unroll 1
    for (unsigned done = 0;; ++done) {
      ptx::mbarrier_wait(ptx::shared_address(&s_.tile_full[done % 2]), done / 2 & 1);
      const KeyTile& tile = s_.tiles[done % 2];
      const int steps = uniform(tile.steps);
      if (steps == 0) break;
      const int first_row = uniform(tile.first_row), end_row = first_row + steps * C::kBlockQ;
      const int q_tile = uniform(tile.q_tile);
      int head = uniform(tile.kv_head) * p_.group, row = first_row;
      ptx::mbarrier_wait(ptx::shared_address(&s_.k_full[done % kKSlots]), done / kKSlots & 1);
#pragma unroll 1
      for (int left = steps * p_.group; left > 0; --left) {
        step(tile, done % kKSlots, head, row, head * static_cast<int>(p_.tiles) + q_tile + row / C::kBlockQ);
        ++visit_, untold_ = true;
        row += C::kBlockQ;
        if (row == end_row) row = first_row, ++head;
      }
      __syncwarp();
      if (lane_ == 0) {
        ptx::mbarrier_arrive(ptx::shared_address(&s_.k_empty[done % kKSlots]));
        ptx::mbarrier_arrive(ptx::shared_address(&s_.tile_empty[done % 2]));
        report();
      }
    }
    if (lane_ == 0) ptx::bulk_wait();
  }

 private:
  static constexpr int kColumns = C::kTile.dq_columns, kSlots = C::kTile.dq_slots;
  static constexpr int kWarpFloats = C::kPieceFloats / 4, kPiecesOfRows = C::kD / C::kPiece;
  static constexpr int kParts = kColumns / C::kPiece;  // of a product
  static constexpr int kProducts = C::kDqFloats / (64 * kColumns);

  __device__ __forceinline__ float* sums(int index, int piece) const {
    return p_.dq + index * static_cast<std::int64_t>(C::kDqFloats) + piece * C::kPieceFloats + warp_ * kWarpFloats;
  }
  __device__ __forceinline__ std::uint32_t staging(int piece) const {
    return ptx::shared_address(s_.dq[piece % kSlots]) + warp_ * kWarpFloats * 4;
  }
  __device__ __forceinline__ std::uint32_t parts_full(int piece) const {
    return ptx::shared_address(&s_.parts_full[piece % kSlots][warp_]);
  }

  /// Lane 0: tells the keeper of the visit before, if it has not, when its part is in memory.
  __device__ __forceinline__ void report() {
    if (!untold_) return;
    ptx::bulk_wait();
    ptx::mbarrier_arrive(ptx::shared_address(&s_.sums_full[(visit_ - 1) % kVisitSlots]));
    untold_ = false;
  }

  /// The kind of the next step's visit, when it may go on. Whoever waits reports before, so that none waits in a
  /// circle.
  __device__ __forceinline__ Visit begin() {
    const std::uint32_t full = ptx::shared_address(&s_.visit_full[visit_ % kVisitSlots]);
    const unsigned parity = visit_ / kVisitSlots & 1;
    if (lane_ == 0 && !ptx::mbarrier_test(full, parity)) report();
    ptx::mbarrier_wait(full, parity);
    return static_cast<Visit>(uniform(static_cast<int>(s_.visits[visit_ % kVisitSlots])));
  }

  /// Lane 0: the sums of a piece to its slot.
  __device__ __forceinline__ void fetch(int index, int piece) const {
    ptx::mbarrier_arrive_expect(parts_full(piece), kWarpFloats * 4);
    ptx::bulk_load(staging(piece), sums(index, piece), kWarpFloats * 4, parts_full(piece));
  }

  /// `index`: of the query tile in the workspace. What few steps do is apart from what most do, which thus stays small.
  __device__ __forceinline__ void step(const KeyTile& tile, unsigned k_slot, int head, int row, int index) {
    const Visit kind = begin();
    if (kind == Visit::first || kind == Visit::between) {
      await_ds();
#pragma unroll
      for (int product = 0; product < kProducts; ++product) {
        float r_dq[kColumns / 2];
        multiply(r_dq, k_slot, product);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          send(r_dq + part * (C::kPiece / 2), sums(index, product * kParts + part), product * kParts + part, kind);
        }
      }
    } else {
      if (kind == Visit::last && lane_ == 0) {
        ptx::bulk_wait_read_but<0>();
#pragma unroll 1
        for (int piece = 0; piece < kSlots; ++piece) fetch(index, piece);
      }
      await_ds();
#pragma unroll 1
      for (int product = 0; product < kProducts; ++product) {
        float r_dq[kColumns / 2];
        multiply(r_dq, k_slot, product);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int piece = product * kParts + part;
          float* const r = r_dq + part * (C::kPiece / 2);
          if (kind == Visit::last) add_sums(r, index, piece);
          write(r, tile, head, row + piece / kPiecesOfRows * 64, piece % kPiecesOfRows * C::kPiece);
        }
      }
      if (kind == Visit::last) fetched_ += C::kPieces / kSlots;
    }
    ds_.next();
  }

  /// Waits for dS. By then the sums of the step before have reached memory.
  __device__ __forceinline__ void await_ds() {
    ptx::mbarrier_wait(ptx::shared_address(&s_.ds_full[ds_.slot]), ds_.round);
    if (lane_ == 0) report();
    __syncwarp();
  }

  /// A product of the step; the last one gives dS back.
  __device__ __forceinline__ void multiply(float (&r)[kColumns / 2], unsigned k_slot, int product) {
    const std::uint32_t k_low = ptx::descriptor_low(ptx::shared_address(s_.k[k_slot]), C::kBlockK * 128);
    const std::uint32_t ds_low = ptx::descriptor_low(ptx::shared_address(s_.ds[ds_.slot]));
    multiply_ds<C>(r, ds_low, k_low, product);
    if (product == kProducts - 1 && lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&s_.ds_empty[ds_.slot]));
  }

  /// The warp's quarter of a piece to the sums g_sums.
  __device__ __forceinline__ void send(const float* r, float* g_sums, int piece, Visit kind) const {
    if (lane_ == 0) ptx::bulk_wait_read_but<kSlots - 1>();
    __syncwarp();
    stage_sums<C>(r, staging(piece), lane_);
    if (lane_ != 0) return;
    if (kind == Visit::first) {
      ptx::bulk_store(g_sums, staging(piece), kWarpFloats * 4);
    } else {
      ptx::bulk_reduce_add(g_sums, staging(piece), kWarpFloats * 4);
    }
    ptx::bulk_commit();
  }

  /// r += the sums of a piece; those of a later piece take their place.
  __device__ __forceinline__ void add_sums(float* r, int index, int piece) const {
    ptx::mbarrier_wait(parts_full(piece), (fetched_ + piece / kSlots) & 1);
#pragma unroll
    for (int i = 0; i < C::kPiece / 8; ++i) {
      float x[4];
      ptx::load_shared(staging(piece) + (i * 32 + lane_) * 16, x[0], x[1], x[2], x[3]);
#pragma unroll
      for (int k = 0; k < 4; ++k) r[4 * i + k] += x[k];
    }
    if (piece + kSlots >= C::kPieces) return;
    __syncwarp();
    if (lane_ == 0) fetch(index, piece + kSlots);
  }

  /// dQ of the warp's 16 of 64 rows, `row` the first, and the columns from `column` on.
  __device__ __forceinline__ void write(const float* r, const KeyTile& tile, int head, int row, int column) const {
    row += warp_ * 16 + lane_ / 4;
    const Tensor& grad = p_.operands.grad_q;
    const bool inside[2] = {row < tile.q_rows, row + 8 < tile.q_rows};
    write_rows<T, C::kPiece>(r, grad.row(tile.batch, tile.q_row + row, head) + column * 2, grad.stride_seq * 16, inside,
                             p_.head_dim - column, p_.scale, lane_);
  }

  BlockShared<C>& s_;
  const BackwardParams& p_;
  const int lane_ = threadIdx.x % 32, warp_ = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  RingPlace<C::kTile.ds_slots> ds_;
  int fetched_ = 0;      // rounds in which sums have come to each slot
  unsigned visit_ = 0;   // those done
  bool untold_ = false;  // lane 0's: the keeper has not been told of the last of these
};

}  // namespace onepass::cuda::sm90
