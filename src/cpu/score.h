// Score modifiers, mask and dropout on one tile S[key][kWidth]: lane = query row, in natural units (scale applied).
// A tile may be a panel of a wider one: `row` is the distance of its keys.
#pragma once

#include "core/problem.h"
#include "cpu/dropout.h"
#include "cpu/pack.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// What the modifiers of one (batch item, query head) need.
struct HeadScore {
  const ScoreSpec* spec;
  const Sequence* sequence;
  std::int64_t batch, head, batch_head;
  float slope = 0;
  std::uint64_t seed = 0;
  std::uint32_t offset = 0;
};

ONEPASS_INLINE HeadScore head_score(const Problem& problem, const Sequence& sequence, std::int64_t b,
                                    std::int64_t head) {
  const ScoreSpec& spec = problem.score;
  HeadScore h{&spec, &sequence, b, head, b * problem.heads_q + head};
  if (spec.alibi_slopes) {
    h.slope = load_float(spec.alibi_slopes.data, spec.alibi_slopes.dtype,
                         b * spec.alibi_slopes.stride_batch + head * spec.alibi_slopes.stride_head);
  }
  const DropoutSpec& dropout = spec.dropout;
  h.seed = dropout.state != nullptr ? static_cast<std::uint64_t>(dropout.state[0]) : dropout.seed;
  h.offset = dropout.state != nullptr ? static_cast<std::uint32_t>(dropout.state[1]) : dropout.offset;
  return h;
}

/// The sink of a head, -inf if there is none.
ONEPASS_INLINE float sink_of(const Problem& problem, std::int64_t head) {
  const HeadTensor& sinks = problem.score.sinks;
  return sinks ? load_float(sinks.data, sinks.dtype, head * sinks.stride_head) : -kInf;
}

/// Adds the bias to the keys [j0, j0 + keys) of `rows` rows from i0; `row` floats between the keys of s.
inline void add_bias(const HeadScore& h, float* s, std::int64_t keys, std::int64_t i0, std::int64_t rows,
                     std::int64_t j0, std::int64_t row) {
  const BiasTensor& bias = h.spec->bias;
  const std::int64_t at = bias.offset(h.batch, h.head, i0, h.sequence->k_start + j0);
  if (bias.stride_q == 0) {  // the same for all rows
    for (std::int64_t j = 0; j < keys; ++j) {
      const float x = load_float(bias.data, bias.dtype, at + j * bias.stride_k);
      for (float* p = s + j * row; p < s + j * row + kWidth; p += kLanes) store(p, load(p) + x);
    }
  } else if (bias.stride_k == 1 && bias.dtype != DType::f64) {  // rows in memory: transposed a block at a time
    with_storage(
        bias.dtype, [&](auto storage) __attribute__((always_inline)) {
          using Store = decltype(storage);
          const auto* data = static_cast<const typename Store::Element*>(bias.data) + at;
          for (std::int64_t i = 0; i < rows; i += kLanes) {
            for (std::int64_t j = 0; j < keys; j += kLanes) {
              const std::int64_t count = min_of<std::int64_t>(kLanes, keys - j);
              Vec in[kLanes], out[kLanes];
              for (int r = 0; r < kLanes; ++r) {
                const auto* p = data + (i + r) * bias.stride_q + j;
                in[r] = i + r >= rows ? Vec{} : count == kLanes ? load_as_float<Store>(p) : load_part<Store>(p, count);
              }
              transpose_block(in, out);
              for (std::int64_t c = 0; c < count; ++c) {
                float* p = s + (j + c) * row + i;
                store(p, load(p) + out[c]);
              }
            }
          }
        });
  } else {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < keys; ++j) {
        s[j * row + i] += load_float(bias.data, bias.dtype, at + i * bias.stride_q + j * bias.stride_k);
      }
    }
  }
}

/// True if row i sees no key, or a bias of -inf on every key that it sees: nothing of Q, K, V and dO reaches it then,
/// NaN neither. A bias that is not -inf everywhere is found at once, as a rule.
inline bool is_empty_row(const Problem& problem, const Sequence& sequence, std::int64_t b, std::int64_t head,
                         std::int64_t i) {
  const BiasTensor& bias = problem.score.bias;
  const Interval keys = sequence.visible(i);
  if (keys.size() == 0 || !bias) return keys.size() == 0;
  const std::int64_t at = bias.offset(b, head, i, sequence.k_start + keys.begin);
  for (std::int64_t j = 0; j < keys.size(); ++j) {
    if (load_float(bias.data, bias.dtype, at + j * bias.stride_k) != -kInf) return false;
  }
  return true;
}

/// Softcap, ALiBi and bias on the keys [j0, j0 + keys) of the rows i0 ... i0 + kWidth - 1; what lanes at or past
/// `rows` get does not matter, and nothing is read for them. `cap_slope`, if given, gets d(capped)/d(score), the factor
/// of the backward.
inline void modify_scores(const HeadScore& h, float* s, std::int64_t keys, std::int64_t i0, std::int64_t rows,
                          std::int64_t j0, float* cap_slope = nullptr, std::int64_t row = kWidth) {
  const ScoreSpec& spec = *h.spec;
  if (spec.softcap != 0) {
    const float cap = static_cast<float>(spec.softcap), inverse = static_cast<float>(1 / spec.softcap);
    for (std::int64_t j = 0; j < keys; ++j) {
      for (std::int64_t x = j * row; x < j * row + kWidth; x += kLanes) {
        const Vec t = tanh(load(s + x) * inverse);
        store(s + x, cap * t);
        if (cap_slope != nullptr) store(cap_slope + x, multiply_add(-t, t, broadcast(1)));
      }
    }
  }
  if (h.slope != 0) {
    for (std::int64_t j = 0; j < keys; ++j) {
      for (int v = 0; v < kVectors; ++v) {
        // Distances past 2^24 are rounded, as any float32 formula does.
        const float distance0 = static_cast<float>(i0 + v * kLanes + h.sequence->position - (j0 + j));
        const Vec distance = distance0 + __builtin_convertvector(lane_index(), Vec);
        const Vec magnitude = as_float(as_int(distance) & 0x7fffffff);
        float* p = s + j * row + v * kLanes;
        store(p, multiply_add(broadcast(-h.slope), magnitude, load(p)));
      }
    }
  }
  if (spec.bias) add_bias(h, s, keys, i0, rows, j0, row);
}

/// Sets scores that the mask hides to -inf (`hidden`); keys [j0, j0 + keys), rows from i0.
inline void mask_scores(const Sequence& sequence, float* s, std::int64_t keys, std::int64_t i0, std::int64_t j0,
                        float hidden = -kInf) {
  // Row i0 + lane sees key j0 + j if lane + hi > j and lane + lo <= j.
  constexpr std::int64_t kLimit = std::int64_t{1} << 30;
  const std::int32_t hi =
      static_cast<std::int32_t>(clamp_to<std::int64_t>(i0 + sequence.hi_shift - j0, -kLimit, kLimit));
  const std::int32_t lo =
      static_cast<std::int32_t>(clamp_to<std::int64_t>(i0 + sequence.lo_shift - j0, -kLimit, kLimit));
  const IntVec lane = lane_index();
  for (std::int64_t j = 0; j < keys; ++j) {
    const std::int32_t key = static_cast<std::int32_t>(j);
    for (int v = 0; v < kVectors; ++v) {
      const IntVec row = lane + v * kLanes;
      float* p = s + j * kWidth + v * kLanes;
      store(p, select((row + hi > key) & (row + lo <= key), load(p), broadcast(hidden)));
    }
  }
}

/// Multiplies p[key][kWidth] by dropout's factor: 0, or the keep scale.
ONEPASS_INLINE void drop_tile(const HeadScore& h, float* p, std::int64_t keys, std::int64_t i0, std::int64_t j0,
                              std::int64_t row = kWidth) {
  drop_tile(h.spec->dropout, h.seed, h.offset, h.batch_head, p, keys, i0, j0, row);
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
