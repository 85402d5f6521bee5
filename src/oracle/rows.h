// What the oracle's forward and backward share: the contract's mask and scores, worded anew for one query row at a
// time. Nothing here uses core/mask.h's functions or any kernel's arithmetic, so that each checks the other.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

#include "core/half.h"
#include "core/problem.h"

namespace onepass::oracle {

/// One item of the batch: where its rows are and how its queries are aligned with its keys.
struct Item {
  std::int64_t q_row = 0, q_length = 0;  // rows of the operand
  std::int64_t k_row = 0, k_length = 0;
  std::int64_t k_start = 0;     // bias column of key 0
  std::int64_t q_position = 0;  // key position of query 0
};

/// Visible keys lo <= j < hi.
struct Keys {
  std::int64_t lo = 0, hi = 0;
};

Item item_at(const Problem& problem, std::int64_t b);
Keys visible_keys(const MaskSpec& mask, const Item& item, std::int64_t i);
/// The keys that row i of query head h sees: those, or none if the bias of each of them is -inf.
Keys seen_keys(const Problem& problem, const Item& item, std::int64_t b, std::int64_t h, std::int64_t i);

/// Query rows of an operand's batch entry, inside sequences or not, and the number of such entries.
inline std::int64_t operand_rows(std::int64_t seq, std::int64_t total, const MaskSpec& mask) {
  return mask.varlen ? total : seq;
}
inline std::int64_t operand_batch(const Problem& problem) {
  return problem.mask.varlen ? 1 : problem.batch;
}
/// The most keys that an item can hold; max_seqlen_k may promise more than there are tokens.
inline std::int64_t most_keys(const Problem& problem) {
  return problem.mask.varlen ? std::min(problem.seq_k, problem.total_k) : problem.seq_k;
}

void store_real(void* data, DType dtype, std::int64_t index, double x);
/// Zeros in a whole operand, inside sequences or not. Takes no memory: all of it is there before the first write.
void clear_rows(const Problem& problem, const Tensor& t, std::int64_t rows, std::int64_t heads, std::int64_t dim);

/// The arithmetic of one run: Real is double (exact), or float with P and dS rounded to `dtype` (storage).
template <class Real>
struct Rounding {
  DType dtype;

  Real operator()(Real x) const {
    if constexpr (sizeof(Real) == 4) {
      if (dtype == DType::bf16) return bf16_to_float(float_to_bf16(x));
      if (dtype == DType::f16) return f16_to_float(float_to_f16(x));
    }
    return x;
  }
};

/// Four partial sums, as a loop over the narrowest vectors has them. One running sum would round more, and a yardstick
/// that rounds more allows more.
template <class Real>
Real dot(const Real* a, const Real* b, std::int64_t n) {
  Real lane[4] = {};
  std::int64_t c = 0;
  for (; c + 4 <= n; c += 4) {
    for (int l = 0; l < 4; ++l) lane[l] += a[c + l] * b[c + l];
  }
  for (int l = 0; c < n; ++c, ++l) lane[l] += a[c] * b[c];
  return (lane[0] + lane[1]) + (lane[2] + lane[3]);
}

template <class Real>
void add_scaled(Real* sum, Real factor, const Real* x, std::int64_t n) {
  for (std::int64_t c = 0; c < n; ++c) sum[c] += factor * x[c];
}

template <class Real>
void load_row(Real* row, const Tensor& t, std::int64_t b, std::int64_t seq, std::int64_t head, std::int64_t n) {
  const void* source = t.row(b, seq, head);
  for (std::int64_t c = 0; c < n; ++c) row[c] = static_cast<Real>(load_double(source, t.dtype, c));
}

template <class Real>
void store_row(const Tensor& t, std::int64_t b, std::int64_t seq, std::int64_t head, std::int64_t n, const Real* row,
               Real factor = 1) {
  void* target = t.row(b, seq, head);
  for (std::int64_t c = 0; c < n; ++c) store_real(target, t.dtype, c, row[c] * factor);
}

/// Rows of one item and KV head, widened: memory for the longest item is taken here, before anything is written.
template <class Real>
struct HeadRows {
  explicit HeadRows(const Problem& problem) {
    k.reserve(elements(problem, problem.head_dim));
    v.reserve(elements(problem, problem.head_dim_v));
  }
  static std::size_t elements(const Problem& problem, std::int64_t dim) {
    std::int64_t count = 0;
    if (__builtin_mul_overflow(most_keys(problem), dim, &count)) throw std::bad_alloc();
    return static_cast<std::size_t>(count);
  }

  std::vector<Real> k, v;
};

/// K and V of one item and KV head, and the scores of its query rows. Only the keys that some row sees are
/// read.
template <class Real>
class Head {
 public:
  Head(const Problem& problem, const Item& item, std::int64_t b, HeadRows<Real>& rows)
      : problem_(problem), item_(item), b_(b), k_(rows.k), v_(rows.v) {
    first_ = item.k_length;
    for (std::int64_t i = 0; i < item.q_length; ++i) {
      const Keys keys = visible_keys(problem.mask, item, i);
      if (keys.lo == keys.hi) continue;
      first_ = std::min(first_, keys.lo);
      last_ = std::max(last_, keys.hi);
    }
    const DropoutSpec& dropout = problem.score.dropout;
    seed_ = dropout.state != nullptr ? static_cast<std::uint64_t>(dropout.state[0]) : dropout.seed;
    offset_ = dropout.state != nullptr ? static_cast<std::uint32_t>(dropout.state[1]) : dropout.offset;
    keep_scale_ = dropout.threshold < 65536 ? Real(65536.0 / (65536.0 - dropout.threshold)) : Real(0);
  }

  void load_keys(const Tensor& k, const Tensor& v, std::int64_t kv_head) {
    const std::int64_t count = std::max<std::int64_t>(0, last_ - first_);
    k_.resize(count * problem_.head_dim);
    v_.resize(count * problem_.head_dim_v);
    for (std::int64_t j = first_; j < last_; ++j) {
      load_row(k_.data() + (j - first_) * problem_.head_dim, k, b_, item_.k_row + j, kv_head, problem_.head_dim);
      load_row(v_.data() + (j - first_) * problem_.head_dim_v, v, b_, item_.k_row + j, kv_head, problem_.head_dim_v);
    }
  }

  const Real* k(std::int64_t j) const { return k_.data() + (j - first_) * problem_.head_dim; }
  const Real* v(std::int64_t j) const { return v_.data() + (j - first_) * problem_.head_dim_v; }

  /// score[j - lo] for the visible keys of row i of query head h; slope[j - lo] = d score / d (scale q.k).
  void scores(std::int64_t h, std::int64_t i, Keys keys, const Real* q, Real* score, Real* slope) const {
    const ScoreSpec& spec = problem_.score;
    const Real scale = Real(spec.scale), cap = Real(spec.softcap);
    const Real alibi = spec.alibi_slopes ? head_value(spec.alibi_slopes, h) : Real(0);
    const std::int64_t p = i + item_.q_position;
    for (std::int64_t j = keys.lo; j < keys.hi; ++j) {
      Real s = scale * dot(q, k(j), problem_.head_dim);
      Real derivative = 1;
      if (cap != 0) {
        const Real t = std::tanh(s / cap);
        s = cap * t;
        derivative = 1 - t * t;
      }
      if (spec.alibi_slopes) s += alibi * Real(-std::abs(p - j));
      if (spec.bias) {
        s += Real(load_double(spec.bias.data, spec.bias.dtype, spec.bias.offset(b_, h, i, item_.k_start + j)));
      }
      score[j - keys.lo] = s;
      if (slope != nullptr) slope[j - keys.lo] = derivative;
    }
  }

  /// keep[j - lo]: what dropout multiplies the weight of key j with; 1 without dropout.
  void keeps(std::int64_t h, std::int64_t i, Keys keys, Real* keep) const {
    const std::uint32_t threshold = problem_.score.dropout.threshold;
    PhiloxBlock block{};
    for (std::int64_t j = keys.lo; j < keys.hi; ++j) {
      if (threshold == 0) {
        keep[j - keys.lo] = 1;
        continue;
      }
      if (j == keys.lo || j % 8 == 0) {
        block = philox(seed_, static_cast<std::uint32_t>(j / 8), static_cast<std::uint32_t>(i),
                       static_cast<std::uint32_t>(b_ * problem_.heads_q + h), offset_);
      }
      const std::uint32_t word = block.word[j % 8 / 2];
      const std::uint32_t lane = j % 2 == 0 ? word & 0xffff : word >> 16;
      keep[j - keys.lo] = lane >= threshold ? keep_scale_ : Real(0);
    }
  }

  Real head_value(const HeadTensor& t, std::int64_t h) const {
    return Real(load_double(t.data, t.dtype, b_ * t.stride_batch + h * t.stride_head));
  }
  Real sink(std::int64_t h) const {
    return problem_.score.sinks ? head_value(problem_.score.sinks, h) : -std::numeric_limits<Real>::infinity();
  }

 private:
  const Problem& problem_;
  const Item item_;
  const std::int64_t b_;
  std::int64_t first_ = 0, last_ = 0;  // keys loaded
  std::vector<Real>&k_, &v_;
  std::uint64_t seed_ = 0;
  std::uint32_t offset_ = 0;
  Real keep_scale_ = 1;
};

/// Turns scores into softmax weights in place and returns their log-sum-exp, the sink included; -inf (weights 0) for
/// an empty row.
template <class Real>
Real softmax(Real* score, std::int64_t count, Real sink) {
  Real top = sink;
  for (std::int64_t n = 0; n < count; ++n) {
    if (score[n] > top || score[n] != score[n]) top = score[n];  // a NaN stays
  }
  if (top == -std::numeric_limits<Real>::infinity()) {
    std::fill_n(score, count, Real(0));
    return top;
  }
  Real sum = std::exp(sink - top);
  for (std::int64_t n = 0; n < count; ++n) sum += score[n] = std::exp(score[n] - top);
  for (std::int64_t n = 0; n < count; ++n) score[n] /= sum;
  return top + std::log(sum);
}

}  // namespace onepass::oracle
