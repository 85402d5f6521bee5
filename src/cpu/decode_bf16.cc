// A forward of few query rows from bfloat16: scores by dot products of pairs (vdpbf16ps), the rest in float32.
#include "cpu/decode_tasks.h"
#include "cpu/kernel.h"
#include "cpu/pack_bf16.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Policy of decode_tasks.h.
struct PairScores {
  using Store = StoreBf16;
  using Element = Bf16;
  using Query = Bf16;

  static inline void load_query(Bf16* to, std::int64_t pitch, const Tensor& q, std::int64_t b, std::int64_t seq,
                                std::int64_t head, std::int64_t dim) {
    const Bf16* row = row_as<StoreBf16>(q, b, seq, head);
    for (std::int64_t c = 0; c < pitch; c += 32) _mm512_storeu_si512(to + c, load_row32(row + c, dim - c));
  }

  template <int kR>
  static ONEPASS_INLINE void step(const Bf16* const* k, const Bf16* q, std::int64_t pitch, std::int64_t dim,
                                  float scale, float* s) {
    constexpr int kKeys = kLanes / kR;
    Vec acc[kLanes] = {};
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
          c, [](const Bf16* p) __attribute__((always_inline)) { return _mm512_loadu_si512(p); });
    }
    if (rest != 0) {
      const __mmask32 counted = static_cast<__mmask32>((std::uint32_t{1} << rest) - 1);
      add(
          whole, [counted](const Bf16* p)
                     __attribute__((always_inline)) { return _mm512_maskz_loadu_epi16(counted, p); });
    }
    store_scores<kR>(s, acc, scale);
  }
};

}  // namespace

std::size_t decode_workspace(const Problem& problem, int threads) {
  return static_cast<std::size_t>(plan_decode(problem, threads).bytes);
}

void decode(const Problem& problem, const ForwardOperands& operands, const Launch& launch) {
  run_decode<PairScores>(problem, operands, launch);
}

}  // namespace onepass::cpu::ONEPASS_ISA
