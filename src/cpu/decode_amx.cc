// A forward of few query rows for processors that have AMX: they multiply and add float32 twice as fast as vdpbf16ps
// does pairs of bfloat16, and a prefetch costs them more than a load.
#include "cpu/decode_tasks.h"
#include "cpu/kernel.h"
#include "cpu/pack_bf16.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// float32 arithmetic from bfloat16, 32 columns at a time: those of even number are 16 bits to the left of where a
/// float32 has them, those of odd number in place. Policy of decode_tasks.h.
struct WidePairs : FloatProducts<StoreBf16>, ValueBlocks<WidePairs, Bf16, float> {
  static constexpr bool kColumnPairs = true;

  static ONEPASS_INLINE Vec even(__m512i x) { return as_float((IntVec)_mm512_slli_epi32(x, 16)); }
  static ONEPASS_INLINE Vec odd(__m512i x) { return as_float((IntVec)x & static_cast<std::int32_t>(0xffff0000u)); }

  /// A row of Q as [dim / 32][even, odd][16], zeros behind its end.
  static inline void load_query(float* to, std::int64_t pitch, const Tensor& q, std::int64_t b, std::int64_t seq,
                                std::int64_t head, std::int64_t dim) {
    const Bf16* row = row_as<StoreBf16>(q, b, seq, head);
    for (std::int64_t c = 0; c < pitch; c += 32) {
      const __m512i x = load_row32(row + c, dim - c);
      store(to + c, even(x));
      store(to + c + 16, odd(x));
    }
  }

  template <int kR>
  static ONEPASS_INLINE void dot(const Bf16* const* k, std::int64_t near, std::int64_t far, const float* q,
                                 std::int64_t pitch, std::int64_t dim, Vec (&acc)[kLanes]) {
    constexpr int kKeys = kLanes / kR;
    const auto add = [&](std::int64_t c, auto load_k) __attribute__((always_inline)) {
      Vec query[kR][2];
#pragma GCC unroll 4
      for (int r = 0; r < kR; ++r) {
        query[r][0] = load(q + r * pitch + c);
        query[r][1] = load(q + r * pitch + c + 16);
      }
#pragma GCC unroll 16
      for (int e = 0; e < kKeys; ++e) {
        const __m512i key = load_k(k[e] + c);
        const Vec part[2] = {even(key), odd(key)};
#pragma GCC unroll 2
        for (int x = 0; x < 2; ++x) {
#pragma GCC unroll 4
          for (int r = 0; r < kR; ++r) {
            acc[r * kKeys + e] = multiply_add(part[x], query[r][x], acc[r * kKeys + e]);
          }
        }
      }
    };
    const std::int64_t whole = dim / 32 * 32;
    for (std::int64_t c = 0; c < whole; c += 32) {
      add(
          c, [ near, far ](const Bf16* p) __attribute__((always_inline)) {
            prefetch<3>(p, near, far);
            return _mm512_loadu_si512(p);
          });
    }
    if (whole < dim) {
      add(
          whole, [rest = dim - whole](const Bf16* p) __attribute__((always_inline)) { return load_row32(p, rest); });
    }
  }

  /// O[kR][32 kN] += P V for a part of the runs.
  template <int kR, int kN, int kPass>
  static ONEPASS_INLINE void value_tile(const Bf16* v, std::int64_t stride, const KeyRuns& part, const float* p,
                                        float* o, std::int64_t o_row, const Ahead& ahead) {
    const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odds = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i second = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
    Vec acc[kR][kN][2];
#pragma GCC unroll 2
    for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < kN; ++n) {
        const float* from = o + r * o_row + 32 * n;
        const __m512 x = (__m512)load(from), y = (__m512)load(from + 16);
        acc[r][n][0] = (Vec)_mm512_permutex2var_ps(x, evens, y);
        acc[r][n][1] = (Vec)_mm512_permutex2var_ps(x, odds, y);
      }
    }
    for (std::int64_t j = part.first; j < part.first + part.keys; ++j) {
      const std::int64_t near = ahead.near, far = ahead.far(j) + (kPass == 1 ? 64 : 0);
      for (std::int64_t key = j, n_run = 0; n_run < kRuns; ++n_run, key += part.apart) {
        const Bf16* row = v + key * stride;
        Vec weight[kR];
#pragma GCC unroll 2
        for (int r = 0; r < kR; ++r) weight[r] = broadcast(p[r * kScoreRow + key]);
#pragma GCC unroll 4
        for (int n = 0; n < kN; ++n) {
          const __m512i x = _mm512_loadu_si512(row + 32 * n);
          if (kPass != 1) prefetch<1>(row + 32 * n, near, far);
          if (kPass < 0 || n % 2 == 0) prefetch<2>(row + 32 * n, near, far);
          const Vec value[2] = {even(x), odd(x)};
#pragma GCC unroll 2
          for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 2
            for (int u = 0; u < 2; ++u) acc[r][n][u] = multiply_add(weight[r], value[u], acc[r][n][u]);
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < kN; ++n) {
        float* to = o + r * o_row + 32 * n;
        const __m512 x = (__m512)acc[r][n][0], y = (__m512)acc[r][n][1];
        store(to, (Vec)_mm512_permutex2var_ps(x, first, y));
        store(to + 16, (Vec)_mm512_permutex2var_ps(x, second, y));
      }
    }
  }
};

}  // namespace

std::size_t decode_workspace(const Problem& problem, int threads) {
  return static_cast<std::size_t>(plan_decode(problem, threads).bytes);
}

void decode(const Problem& problem, const ForwardOperands& operands, const Launch& launch) {
  switch (problem.dtype) {
    case DType::f16: return run_decode<FloatProducts<StoreF16>>(problem, operands, launch);
    case DType::bf16: return run_decode<WidePairs>(problem, operands, launch);
    default: return run_decode<FloatProducts<StoreF32>>(problem, operands, launch);
  }
}

}  // namespace onepass::cpu::ONEPASS_ISA
