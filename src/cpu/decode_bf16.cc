// A forward of few query rows from bfloat16, by dot products of pairs (vdpbf16ps).
#include "cpu/decode_tasks.h"
#include "cpu/kernel.h"
#include "cpu/pack_bf16.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Scores from pairs of columns; O from pairs of keys, unless it is wanted in float32: the weights are rounded for it.
/// Policy of decode_tasks.h.
struct PairProducts : ValueBlocks<PairProducts, Bf16, std::uint32_t> {
  static constexpr bool kPairs = true, kColumnPairs = false;
  static constexpr std::int64_t kPairRun = kTileKeys / kRuns;
  using Store = StoreBf16;
  using Element = Bf16;
  using Query = Bf16;

  static inline void load_query(Bf16* to, std::int64_t pitch, const Tensor& q, std::int64_t b, std::int64_t seq,
                                std::int64_t head, std::int64_t dim) {
    const Bf16* row = row_as<StoreBf16>(q, b, seq, head);
    for (std::int64_t c = 0; c < pitch; c += 32) _mm512_storeu_si512(to + c, load_row32(row + c, dim - c));
  }

  template <int kR>
  static ONEPASS_INLINE void dot(const Bf16* const* k, std::int64_t near, std::int64_t far, const Bf16* q,
                                 std::int64_t pitch, std::int64_t dim, Vec (&acc)[kLanes]) {
    constexpr int kKeys = kLanes / kR;
    const auto add = [&](std::int64_t c, auto load_k) __attribute__((always_inline)) {
      __m512bh query[kR];
#pragma GCC unroll 4
      for (int r = 0; r < kR; ++r) query[r] = (__m512bh)_mm512_loadu_si512(q + r * pitch + c);
#pragma GCC unroll 16
      for (int e = 0; e < kKeys; ++e) {
        const __m512bh key = (__m512bh)load_k(k[e] + c);
#pragma GCC unroll 4
        for (int r = 0; r < kR; ++r) {
          Vec& sum = acc[r * kKeys + e];
          sum = (Vec)_mm512_dpbf16_ps((__m512)sum, key, query[r]);
        }
      }
    };
    const std::int64_t whole = dim / 32 * 32, rest = dim - whole;
    for (std::int64_t c = 0; c < whole; c += 32) {
      add(
          c, [ near, far ](const Bf16* p) __attribute__((always_inline)) {
            prefetch<3>(p, near, far);
            return _mm512_loadu_si512(p);
          });
    }
    if (rest != 0) {
      const __mmask32 counted = static_cast<__mmask32>((std::uint32_t{1} << rest) - 1);
      add(
          whole, [counted](const Bf16* p)
                     __attribute__((always_inline)) { return _mm512_maskz_loadu_epi16(counted, p); });
    }
  }

  /// Weights as pairs[run / 2][key of the run] of the runs 0 and 1, 2 and 3.
  static inline void pack_weights(const float* s, const KeyRuns& keys, std::uint32_t* pairs) {
    for (std::int64_t run = 0; run < kRuns; run += 2) {
      for (std::int64_t j = 0; j < keys.keys; j += kLanes) {
        const float* even = s + keys.first + run * keys.apart + j;
        _mm512_storeu_si512(pairs + run / 2 * kPairRun + j, round_to_pairs(load(even), load(even + keys.apart)));
      }
    }
  }

  /// O[kR][32 kN] += P V for a part of the runs, whose weights begin at `pairs`.
  template <int kR, int kN, int kPass>
  static ONEPASS_INLINE void value_tile(const Bf16* v, std::int64_t stride, const KeyRuns& part,
                                        const std::uint32_t* pairs, float* o, std::int64_t o_row, const Ahead& ahead) {
    // lo[0], hi[0], lo[1], ...: columns 0 to 15 of two rows, columns 16 to 31.
    const __m512i left = interleaved(0), right = interleaved(16);
    Vec acc[kR][2 * kN];
#pragma GCC unroll 2
    for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < 2 * kN; ++n) acc[r][n] = load(o + r * o_row + n * kLanes);
    }
    for (std::int64_t j = part.first; j < part.first + part.keys; ++j) {
      const std::int64_t near = ahead.near, far = ahead.far(j) + (kPass == 1 ? 64 : 0);
      for (std::int64_t run = 0; run < kRuns; run += 2) {
        const Bf16 *row = v + (run * part.apart + j) * stride, *other = row + part.apart * stride;
        __m512bh weight[kR];
#pragma GCC unroll 2
        for (int r = 0; r < kR; ++r) {
          const std::uint32_t pair = pairs[r * (kTileKeys / 2) + run / 2 * kPairRun + j - part.first];
          weight[r] = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair));
        }
#pragma GCC unroll 4
        for (int n = 0; n < kN; ++n) {
          const __m512i a = _mm512_loadu_si512(row + 32 * n), b = _mm512_loadu_si512(other + 32 * n);
          constexpr int kNear = kPass != 1 ? 1 : 0;
          prefetch<kNear>(row + 32 * n, near, far);
          prefetch<kNear>(other + 32 * n, near, far);
          if (kPass < 0 || n % 2 == 0) {
            prefetch<2>(row + 32 * n, near, far);
            prefetch<2>(other + 32 * n, near, far);
          }
          const __m512bh value[2] = {(__m512bh)_mm512_permutex2var_epi16(a, left, b),
                                     (__m512bh)_mm512_permutex2var_epi16(a, right, b)};
#pragma GCC unroll 2
          for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 2
            for (int x = 0; x < 2; ++x)
              acc[r][2 * n + x] = (Vec)_mm512_dpbf16_ps((__m512)acc[r][2 * n + x], value[x], weight[r]);
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < 2 * kN; ++n) store(o + r * o_row + n * kLanes, acc[r][n]);
    }
  }

 private:
  static ONEPASS_INLINE __m512i interleaved(int first) {
    alignas(64) std::uint16_t index[32];
    for (int i = 0; i < 16; ++i) {
      index[2 * i] = static_cast<std::uint16_t>(first + i);
      index[2 * i + 1] = static_cast<std::uint16_t>(32 + first + i);
    }
    return _mm512_load_si512(index);
  }
};

}  // namespace

std::size_t decode_workspace(const Problem& problem, int threads) {
  return static_cast<std::size_t>(plan_decode(problem, threads).bytes);
}

void decode(const Problem& problem, const ForwardOperands& operands, const Launch& launch) {
  run_decode<PairProducts>(problem, operands, launch);
}

}  // namespace onepass::cpu::ONEPASS_ISA
