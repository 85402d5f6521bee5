// The bfloat16 backward's matrix products on AMX tiles. Where few products go into a sum, one left tile and two right
// ones feed a pair of accumulators, and pairs alternate: storing one waits for its products, so it is stored while the
// other's run. dQ^T sums over many keys: there 2 x 2 tiles, which load less.
#pragma once

#include "cpu/amx.h"
#include "cpu/backward_plan_bf16.h"
#include "cpu/pack.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Left operand: tile (m, k) at m row_step + k depth_step, its rows `row` elements apart. Right one: tile (k, n) at
/// k depth_step + n kTileElements.
struct LeftTiles {
  const Bf16* at;
  std::int64_t row, row_step, depth_step;
};
struct RightTiles {
  const Bf16* at;
  std::int64_t depth_step;
};
inline constexpr std::int64_t kTileElements = 512;

/// A pair of accumulators still to be stored, with the distance of C's rows; c null: none.
struct PendingPair {
  float* c = nullptr;
  std::int64_t row = 0;
};
template <int kPair>
ONEPASS_INLINE void store_pair(PendingPair& pending) {
  if (pending.c == nullptr) return;
  tile_store<kPair>(pending.c, 4 * pending.row);
  tile_store<kPair + 1>(pending.c + 16, 4 * pending.row);
  pending.c = nullptr;
}

/// One unit: 16 rows by 32 columns of C in the accumulators kPair, kPair + 1. Stores the unit before it, which is in
/// the other two.
template <int kPair, bool kAccumulate>
ONEPASS_INLINE void tile_unit(float* c, std::int64_t c_row, const LeftTiles& a, std::int64_t m, const RightTiles& b,
                              std::int64_t n, std::int64_t steps, PendingPair& pending) {
  constexpr int kLeft = 4 + kPair / 2;
  const Bf16 *left = a.at + m * a.row_step, *right = b.at + n * 2 * kTileElements;
  c += m * 16 * c_row + n * 32;
  if constexpr (kAccumulate) {
    tile_load<kPair>(c, 4 * c_row);
    tile_load<kPair + 1>(c + 16, 4 * c_row);
  } else {
    tile_zero<kPair>();
    tile_zero<kPair + 1>();
  }
  for (std::int64_t k = 0; k < steps; ++k) {
    tile_load<kLeft>(left + k * a.depth_step, 2 * a.row);
    tile_load<6>(right + k * b.depth_step, 64);
    tile_load<7>(right + k * b.depth_step + kTileElements, 64);
    tile_dot<kPair, kLeft, 6>();
    tile_dot<kPair + 1, kLeft, 7>();
    if (k == 0) store_pair<2 - kPair>(pending);
  }
  pending = {c, c_row};
}

/// C[16 row_tiles][32 columns] (+)= A B over 32 `steps`, steps > 0. Starts with a pending pair in the accumulators 2
/// and 3 and may leave one there.
template <bool kAccumulate>
ONEPASS_INLINE void tile_product(float* c, std::int64_t c_row, const LeftTiles& a, const RightTiles& b,
                                 std::int64_t row_tiles, std::int64_t columns, std::int64_t steps,
                                 PendingPair& pending) {
  const std::int64_t units = row_tiles * columns;
  std::int64_t m = 0, n = 0;
  const auto next = [&] {
    if (++m == row_tiles) m = 0, ++n;
  };
  for (std::int64_t unit = 0; unit + 2 <= units; unit += 2) {
    tile_unit<0, kAccumulate>(c, c_row, a, m, b, n, steps, pending);
    next();
    tile_unit<2, kAccumulate>(c, c_row, a, m, b, n, steps, pending);
    next();
  }
  if (units % 2 == 1) {
    tile_unit<0, kAccumulate>(c, c_row, a, m, b, n, steps, pending);
    store_pair<0>(pending);
  }
}

/// C[32 rows][16 kColumns] (+)= A B, 2 x kColumns tiles.
template <bool kAccumulate, int kColumns>
ONEPASS_INLINE void square_unit(float* c, std::int64_t c_row, const Bf16* left, const LeftTiles& a, const Bf16* right,
                                const RightTiles& b, std::int64_t steps) {
  float* below = c + 16 * c_row;
  if constexpr (kAccumulate) {
    tile_load<0>(c, 4 * c_row);
    tile_load<2>(below, 4 * c_row);
    if constexpr (kColumns == 2) tile_load<1>(c + 16, 4 * c_row);
    if constexpr (kColumns == 2) tile_load<3>(below + 16, 4 * c_row);
  } else {
    tile_zero<0>();
    tile_zero<2>();
    if constexpr (kColumns == 2) tile_zero<1>();
    if constexpr (kColumns == 2) tile_zero<3>();
  }
  for (std::int64_t k = 0; k < steps; ++k) {
    tile_load<4>(left + k * a.depth_step, 2 * a.row);
    tile_load<6>(right + k * b.depth_step, 64);
    if constexpr (kColumns == 2) tile_load<7>(right + k * b.depth_step + kTileElements, 64);
    tile_dot<0, 4, 6>();
    tile_load<5>(left + a.row_step + k * a.depth_step, 2 * a.row);
    if constexpr (kColumns == 2) tile_dot<1, 4, 7>();
    tile_dot<2, 5, 6>();
    if constexpr (kColumns == 2) tile_dot<3, 5, 7>();
  }
  tile_store<0>(c, 4 * c_row);
  if constexpr (kColumns == 2) tile_store<1>(c + 16, 4 * c_row);
  tile_store<2>(below, 4 * c_row);
  if constexpr (kColumns == 2) tile_store<3>(below + 16, 4 * c_row);
}

/// C[32 rows][16 columns] (+)= A B over 32 `steps`. The part of C that follows is prefetched: another core wrote it
/// last, and loads of tiles wait for one another.
template <bool kAccumulate>
ONEPASS_INLINE void square_product(float* c, std::int64_t c_row, const LeftTiles& a, const RightTiles& b,
                                   std::int64_t rows, std::int64_t columns, std::int64_t steps) {
  for (std::int64_t n = 0; n < columns; n += 2) {
    const Bf16* right = b.at + n * kTileElements;
    for (std::int64_t m = 0; m < rows; ++m) {
      const Bf16* left = a.at + 2 * m * a.row_step;
      float* out = c + m * 32 * c_row + n * 16;
      if constexpr (kAccumulate) {
        const float* next = m + 1 < rows ? out + 32 * c_row : c + min_of(n + 2, columns - 1) * 16;
        for (std::int64_t r = 0; r < 32; ++r) {
          __builtin_prefetch(next + r * c_row, 1, 3);
          __builtin_prefetch(next + r * c_row + 16, 1, 3);
        }
      }
      if (n + 1 < columns) {
        square_unit<kAccumulate, 2>(out, c_row, left, a, right, b, steps);
      } else {
        square_unit<kAccumulate, 1>(out, c_row, left, a, right, b, steps);
      }
    }
  }
}

/// What backward_bf16.h needs of a way to multiply; meanings in products_dot.h.
struct AmxProducts {
  using Scope = TileScope;
  static constexpr std::int64_t kDepth = 32, kColumns = 32;
  static constexpr std::int64_t kBlockQ = 128;
  static constexpr std::int64_t kMostKeys = 512, kFewestKeys = 128;
  static constexpr std::int64_t kCachedElements = 131072;
  static constexpr double kSmallWork = 4e6;

  static constexpr PairLayout right_layout(std::int64_t lanes) { return tile_layout(lanes); }

  static ONEPASS_INLINE void scores(const ScoreOperands& x, std::int64_t lanes, std::int64_t keys) {
    const std::int64_t row_tiles = ceil_div(keys, 16);
    PendingPair pending;
    tile_product<false>(x.s, kWidth, {x.k, x.dim, 16 * x.dim, 32}, {x.q, 32 * lanes}, row_tiles, kWidth / 32,
                        x.depth / 32, pending);
    tile_product<false>(x.dp, kWidth, {x.v, x.dim_v, 16 * x.dim_v, 32}, {x.dout, 32 * lanes}, row_tiles, kWidth / 32,
                        x.depth_v / 32, pending);
    store_pair<2>(pending);
  }

  static ONEPASS_INLINE void add_key_gradients(const KeyGradientOperands& x, std::int64_t lanes, std::int64_t keys,
                                               std::int64_t begin, std::int64_t end) {
    const std::int64_t row_tiles = ceil_div(keys, 16), steps = (end - begin) / 32;
    PendingPair pending;
    tile_product<true>(x.dv, x.dim_v, {x.p + begin, lanes, 16 * lanes, 32}, {x.dout + begin * x.dim_v, 32 * x.dim_v},
                       row_tiles, x.dim_v / 32, steps, pending);
    tile_product<true>(x.dk, x.dim, {x.ds + begin, lanes, 16 * lanes, 32}, {x.q + begin * x.dim, 32 * x.dim}, row_tiles,
                       x.dim / 32, steps, pending);
    store_pair<2>(pending);
  }

  /// K^T, [dim / 16][keys / 32][16][32].
  static void pack_keys(const Bf16* k, std::int64_t keys, std::int64_t dim, Bf16* out) {
    pack_transposed_tiles(k, dim, keys, dim, out, keys / 32 * kTileElements);
  }

  /// dQ lies transposed, [dim][width].
  static constexpr std::int64_t query_at(std::int64_t lane, std::int64_t) { return lane; }
  static ONEPASS_INLINE void add_query_gradient(float* dq, std::int64_t width, std::int64_t dim, const Bf16* k,
                                                std::int64_t keys, const Bf16* ds, std::int64_t lanes,
                                                std::int64_t lane, std::int64_t rows, std::int64_t begin,
                                                std::int64_t end, bool accumulate) {
    const LeftTiles a{k + begin * 16, 32, keys * 16, kTileElements};
    const RightTiles b{ds + begin * lanes + lane * 32, 32 * lanes};
    const std::int64_t tiles = ceil_div(rows, 16), steps = (end - begin) / 32;
    if (accumulate) {
      square_product<true>(dq, width, a, b, dim / 32, tiles, steps);
    } else {
      square_product<false>(dq, width, a, b, dim / 32, tiles, steps);
    }
  }
  static void clear_query_gradient(float* dq, std::int64_t width, std::int64_t dim, std::int64_t rows) {
    for (std::int64_t c = 0; c < dim; ++c) {
      for (std::int64_t i = 0; i < rows; i += kLanes) store(dq + c * width + i, Vec{});
    }
  }
  static void store_query_gradient(const Tensor& to, std::int64_t b, std::int64_t seq, std::int64_t head,
                                   std::int64_t rows, std::int64_t dim, const float* dq, std::int64_t width,
                                   std::int64_t, float scale) {
    alignas(64) float factor[kBlockQ];
    for (float& x : factor) x = scale;
    store_transposed(to, b, seq, head, rows, dim, dq, width, factor);
  }
};

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
