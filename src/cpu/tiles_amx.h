// The bfloat16 forward's matrix products on AMX tiles: K rows in place as left operand, V^T packed, 64 query lanes as
// four tiles to the right. One left tile and two right ones feed a pair of accumulators: a unit of work, 16 rows by 32
// lanes of the result. Units alternate between the accumulators {0, 1} and {2, 3}: storing a pair waits for its
// products, so it is stored while the next unit's products run.
#pragma once

#include "cpu/amx.h"
#include "cpu/pack_bf16.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

inline constexpr std::int64_t kTile = 512;             // elements of a packed tile
inline constexpr std::int64_t kRightStep = 4 * kTile;  // from 32 contracted elements of the right operand to the next
inline constexpr std::int64_t kResultStride = 4 * kWidth;

/// Accumulators kPair, kPair + 1 += left (one tile) times right (two tiles side by side).
template <int kPair>
ONEPASS_INLINE void tile_pair_dot(const Bf16* left, std::int64_t left_stride, const Bf16* right) {
  constexpr int kLeft = 4 + kPair / 2;
  tile_load<kLeft>(left, left_stride);
  tile_load<6>(right, 64);
  tile_load<7>(right + kTile, 64);
  tile_dot<kPair, kLeft, 6>();
  tile_dot<kPair + 1, kLeft, 7>();
}
template <int kPair>
ONEPASS_INLINE void tile_pair_store(float* c) {
  tile_store<kPair>(c, kResultStride);
  tile_store<kPair + 1>(c + 16, kResultStride);
}
template <int kPair>
ONEPASS_INLINE void tile_pair_load(const float* c) {
  tile_load<kPair>(c, kResultStride);
  tile_load<kPair + 1>(c + 16, kResultStride);
}

/// What forward_bf16.h needs of a way to multiply.
struct AmxTiles {
  static constexpr std::int64_t kPiece = 32;    // keys whose scores are in float32 at a time: 8 KB
  static constexpr std::int64_t kBlock = 256;   // keys whose weights are kept for one product with V: 32 KB
  static constexpr std::int64_t kKeyRows = 16;  // K is read in whole groups of so many rows
  static constexpr std::int64_t kKeyStep = 32, kDimStep = 32, kDimVStep = 16;  // operands are padded to multiples
  static constexpr int kFewestVectors = 2;                 // narrowest products, for groups of few rows
  static constexpr std::int64_t kFewestRows = 128;         // of a task: packing V costs as much as multiplying 30 rows
  static constexpr double kSmallWork = 8e6;                // multiply-adds not worth a second thread
  static constexpr std::int64_t kCachedElements = 131072;  // of Q and of O, kept by a task in the L2 cache
  static constexpr PairLayout kRight = tile_layout(kWidth);

  using Scope = TileScope;

  /// S[keys][kN vectors] = K[keys][dim] Q^T; reads K and writes S in whole groups of 16 keys.
  template <int kN>
  static ONEPASS_INLINE void scores(const Bf16* k, std::int64_t k_stride, std::int64_t keys, const Bf16* q,
                                    std::int64_t dim, float* s) {
    const std::int64_t steps = dim / 32, units = ceil_div(keys, 16) * (kN / 2);
    std::int64_t unit = 0;
    for (; unit + 2 <= units; unit += 2) {
      score_unit<kN, 0>(k, k_stride, q, s, steps, unit);
      score_unit<kN, 2>(k, k_stride, q, s, steps, unit + 1);
    }
    if (unit < units) {
      score_unit<kN, 0>(k, k_stride, q, s, steps, unit);
      tile_pair_store<0>(result<kN>(s, unit));
    } else {
      tile_pair_store<2>(result<kN>(s, unit - 1));
    }
  }

  /// V^T as [column / 16][key / 32] tiles, for the keys from `begin` on of a block.
  template <class Observer>
  static ONEPASS_INLINE void pack_values(const Bf16* v, std::int64_t v_stride, std::int64_t begin, std::int64_t keys,
                                         std::int64_t dim_v, Bf16* out, Observer&& observe) {
    pack_transposed_tiles(v, v_stride, keys, dim_v, out + begin / 32 * kTile, kStrip, observe);
  }

  /// O^T[dim_v][kN vectors] += V^T P^T over the keys [begin, end) of a block, multiples of 32; dim_v rounded up to 16.
  template <int kN>
  static ONEPASS_INLINE void values(const Bf16* v, const Bf16* p, std::int64_t begin, std::int64_t end,
                                    std::int64_t dim_v, float* out) {
    const std::int64_t steps = (end - begin) / 32, units = ceil_div(dim_v, 16) * (kN / 2);
    v += begin / 32 * kTile;
    p += begin / 32 * kRightStep;
    std::int64_t unit = 0;
    tile_pair_load<0>(out);
    for (; unit + 2 <= units; unit += 2) {
      value_unit<kN, 0>(v, p, out, steps, unit, unit + 1 < units);
      value_unit<kN, 2>(v, p, out, steps, unit + 1, unit + 2 < units);
    }
    if (unit < units) {
      value_unit<kN, 0>(v, p, out, steps, unit, false);
      tile_pair_store<0>(result<kN>(out, unit));
    } else {
      tile_pair_store<2>(result<kN>(out, unit - 1));
    }
  }

 private:
  static constexpr std::int64_t kStrip = kBlock / 32 * kTile;  // V^T: from 16 columns of V to the next

  // Unit u is the 32 lanes u % (kN / 2) of the 16 rows u / (kN / 2).
  template <int kN>
  static ONEPASS_INLINE float* result(float* c, std::int64_t unit) {
    return c + unit / (kN / 2) * 16 * kWidth + unit % (kN / 2) * 32;
  }
  template <int kN>
  static ONEPASS_INLINE const Bf16* right(const Bf16* b, std::int64_t unit) {
    return b + unit % (kN / 2) * 2 * kTile;
  }

  template <int kN, int kPair>
  static ONEPASS_INLINE void score_unit(const Bf16* k, std::int64_t k_stride, const Bf16* q, float* s,
                                        std::int64_t steps, std::int64_t unit) {
    const Bf16 *left = k + unit / (kN / 2) * 16 * k_stride, *lanes = right<kN>(q, unit);
    tile_zero<kPair>();
    tile_zero<kPair + 1>();
    tile_pair_dot<kPair>(left, 2 * k_stride, lanes);
    if (unit > 0) tile_pair_store<2 - kPair>(result<kN>(s, unit - 1));
    for (std::int64_t x = 1; x < steps; ++x) {
      tile_pair_dot<kPair>(left + x * 32, 2 * k_stride, lanes + x * kRightStep);
    }
  }

  /// Finds its accumulators loaded, and loads the next unit's.
  template <int kN, int kPair>
  static ONEPASS_INLINE void value_unit(const Bf16* v, const Bf16* p, float* out, std::int64_t steps, std::int64_t unit,
                                        bool more) {
    const Bf16 *left = v + unit / (kN / 2) * kStrip, *lanes = right<kN>(p, unit);
    tile_pair_dot<kPair>(left, 64, lanes);
    if (unit > 0) tile_pair_store<2 - kPair>(result<kN>(out, unit - 1));
    if (more) tile_pair_load<2 - kPair>(result<kN>(out, unit + 1));
    for (std::int64_t x = 1; x < steps; ++x) {
      tile_pair_dot<kPair>(left + x * kTile, 64, lanes + x * kRightStep);
    }
  }
};

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
