// P and dS of the bfloat16 backward: one piece of S^T and dP^T, lanes = queries, made into the bfloat16 operands of the
// products for dV, dK and dQ.
#pragma once

#include "cpu/pack_bf16.h"
#include "cpu/score.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Key rows for which S^T and dP^T exist at a time: 8 KB each.
inline constexpr std::int64_t kPairPiece = 32;

/// A row in QueryRows that sees nothing, whatever the mask says.
inline constexpr std::int32_t kDeadRow = -(std::int32_t{1} << 30);

/// kWidth query rows and a piece of the keys.
struct WeighedPiece {
  float *s, *dp;                    // [kPairPiece][kWidth]; s in natural units after modifiers, raw without
  const float *lse, *lse_log2, *d;  // [kWidth]; the second times log2(e)
  const std::int32_t* row;          // [kWidth]: row + hi > key and row + lo <= key where visible
  std::int32_t hi, lo;
  std::int32_t keys;              // that exist
  float scale;                    // to the binary logarithm's units
  const float *cap_slope, *keep;  // [kPairPiece][kWidth]: the softcap's derivative, dropout's factor; or null
  Bf16 *p, *ds;                   // P^T and dS^T, rows `lanes` apart
  std::int64_t lanes;
  Bf16* ds_pairs;  // dS^T again, pairs of keys
  PairLayout layout;
};

/// Two keys by 32 query rows.
template <bool kMasked, bool kModified>
ONEPASS_INLINE void weigh_pair(const WeighedPiece& t, std::int32_t key, std::int64_t lane) {
  __m512i ds[2];
#pragma GCC unroll 2
  for (int u = 0; u < 2; ++u) {
    Vec p[2], gradient[2];
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const std::int64_t i = lane + v * kLanes, x = (key + u) * kWidth + i;
      // With modifiers s and lse may be near the end of float's range: subtracted before the change of base.
      p[v] = exp2<true>(kModified ? (load(t.s + x) - load(t.lse + i)) * kLog2e
                                  : multiply_add(load(t.s + x), broadcast(t.scale), -load(t.lse_log2 + i)));
      Vec dp = load(t.dp + x);
      if (kModified && t.keep != nullptr) dp *= load(t.keep + x);
      gradient[v] = p[v] * (dp - load(t.d + i));
      if (kModified && t.cap_slope != nullptr) gradient[v] *= load(t.cap_slope + x);
      if (kModified && t.keep != nullptr) p[v] *= load(t.keep + x);
      if constexpr (kMasked) {
        const IntVec row = as_int(load(reinterpret_cast<const float*>(t.row + i)));
        const std::int32_t first = key + u < t.keys ? key + u : INT32_MAX;  // padding is after every row's last key
        const IntVec visible = (row + t.hi > first) & (row + t.lo <= key + u);
        p[v] = select(visible, p[v], Vec{});
        gradient[v] = select(visible, gradient[v], Vec{});
      }
    }
    ds[u] = (__m512i)_mm512_cvtne2ps_pbh((__m512)gradient[1], (__m512)gradient[0]);
    _mm512_storeu_si512(t.p + (key + u) * t.lanes + lane, (__m512i)_mm512_cvtne2ps_pbh((__m512)p[1], (__m512)p[0]));
    _mm512_storeu_si512(t.ds + (key + u) * t.lanes + lane, ds[u]);
  }
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  Bf16* pairs = t.ds_pairs + key / 2 * t.layout.row + lane / kLanes * t.layout.lane_group;
  _mm512_storeu_si512(pairs, _mm512_permutex2var_epi16(ds[0], low, ds[1]));
  _mm512_storeu_si512(pairs + t.layout.lane_group, _mm512_permutex2var_epi16(ds[0], high, ds[1]));
}

template <bool kMasked, bool kModified>
inline void weigh_piece(const WeighedPiece& t, std::int32_t padded_keys) {
  for (std::int32_t key = 0; key < padded_keys; key += 2) {
    weigh_pair<kMasked, kModified>(t, key, 0);
    weigh_pair<kMasked, kModified>(t, key, 2 * kLanes);
  }
}

/// The scores of the piece with all modifiers; fills the factors of softcap and dropout. `rows` of the lanes exist.
inline void modify_piece(const HeadScore& h, const WeighedPiece& t, float* cap_slope, float* keep, std::int64_t i0,
                         std::int64_t rows, std::int64_t j0) {
  const float scale = static_cast<float>(h.spec->scale);
  for (std::int64_t x = 0; x < t.keys * kWidth; x += kLanes) store(t.s + x, load(t.s + x) * scale);
  modify_scores(h, t.s, t.keys, i0, rows, j0, cap_slope);
  if (h.spec->dropout.threshold == 0) return;
  for (std::int64_t x = 0; x < t.keys * kWidth; x += kLanes) store(keep + x, broadcast(1));
  drop_tile(h, keep, t.keys, i0, j0);
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
