// Scores of one packed row, lanes = keys: modifiers, softmax, dropout. Keys count from the tile's first key, j0.
#pragma once

#include "cpu/pack.h"
#include "cpu/score.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Running softmax of a row: maximum and sum of exp(score - maximum).
struct RowState {
  float m = -kInf, l = 0;
};

/// What scores are subtracted from: 0 for a row that has seen only -inf, which keeps its weights 0.
ONEPASS_INLINE float softmax_base(float m) {
  return m == -kInf ? 0.0f : m;
}
ONEPASS_INLINE float exp_of(float x) {
  return exp(broadcast(x))[0];
}

ONEPASS_INLINE float max_of_lanes(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x);
#else
  float result = x[0];
  for (int i = 1; i < kLanes; ++i) result = max_of(result, static_cast<float>(x[i]));
  return result;
#endif
}

template <class Store>
ONEPASS_INLINE void add_bias(const void* data, std::int64_t at, float* s, std::int64_t n) {
  const auto* p = static_cast<const typename Store::Element*>(data) + at;
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) store(s + j, load(s + j) + load_as_float<Store>(p + j));
  if (j < n) store(s + j, load(s + j) + load_part<Store>(p + j, n - j));
}

/// Softcap, ALiBi and bias of row i on the keys [begin, end); may change what lies up to a vector around them.
inline void modify_row(const HeadScore& h, float* s, std::int64_t i, std::int64_t j0, std::int64_t begin,
                       std::int64_t end) {
  const ScoreSpec& spec = *h.spec;
  const std::int64_t first = begin / kLanes * kLanes;
  if (spec.softcap != 0) {
    const float cap = static_cast<float>(spec.softcap), inverse = static_cast<float>(1 / spec.softcap);
    for (std::int64_t j = first; j < end; j += kLanes) store(s + j, cap * tanh(load(s + j) * inverse));
  }
  if (h.slope != 0) {
    for (std::int64_t j = first; j < end; j += kLanes) {
      // Distances past 2^24 are rounded, as any float32 formula does.
      const Vec distance =
          static_cast<float>(i + h.sequence->position - (j0 + j)) - __builtin_convertvector(lane_index(), Vec);
      store(s + j, multiply_add(broadcast(-h.slope), as_float(as_int(distance) & 0x7fffffff), load(s + j)));
    }
  }
  if (spec.bias) {
    const BiasTensor& bias = spec.bias;
    const std::int64_t at = bias.offset(h.batch, h.head, i, h.sequence->k_start + j0 + begin);
    if (bias.stride_k == 1 && bias.dtype != DType::f64) {
      with_storage(bias.dtype,
                   [&](auto storage) { add_bias<decltype(storage)>(bias.data, at, s + begin, end - begin); });
    } else {
      for (std::int64_t j = begin; j < end; ++j) {
        s[j] += load_float(bias.data, bias.dtype, at + (j - begin) * bias.stride_k);
      }
    }
  }
}

/// Scores of the visible keys [begin, end) become weights exp(s - m), 0 in the rest of their vectors. Returns the
/// factor of what was summed before.
inline float softmax_row(RowState& state, float* s, std::int64_t begin, std::int64_t end) {
  const std::int64_t first = begin / kLanes * kLanes, last = round_up(end, kLanes);
  for (std::int64_t j = first; j < begin; ++j) s[j] = -kInf;
  for (std::int64_t j = end; j < last; ++j) s[j] = -kInf;
  Vec largest = broadcast(state.m);
  for (std::int64_t j = first; j < last; j += kLanes) largest = max(load(s + j), largest);
  const float m = max_of_lanes(largest), base = softmax_base(m);
  Vec sum{};
  for (std::int64_t j = first; j < last; j += kLanes) {
    const Vec weight = exp(load(s + j) - base);
    sum += weight;
    store(s + j, weight);
  }
  const float factor = exp_of(state.m - base);
  state.l = state.l * factor + sum_of(sum);
  state.m = m;
  return factor;
}

/// Multiplies weights by dropout's factor: 0, or the keep scale.
inline void drop_row(const HeadScore& h, float* s, std::int64_t i, std::int64_t j0, std::int64_t begin,
                     std::int64_t end) {
  const DropoutSpec& spec = h.spec->dropout;
  PhiloxBlock block{};
  for (std::int64_t j = begin; j < end; ++j) {
    const std::int64_t key = j0 + j;
    if (j == begin || (key & 7) == 0) block = dropout_block(h.seed, h.offset, h.batch_head, i, key);
    s[j] *= dropout_lane(block, key) >= spec.threshold ? spec.keep_scale : 0.0f;
  }
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
