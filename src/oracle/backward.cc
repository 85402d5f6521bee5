#include <new>

#include "core/work.h"
#include "oracle/oracle.h"
#include "oracle/rows.h"

namespace onepass::oracle {
namespace {

/// The bias gradient, summed over the dimensions that broadcast: a stride of 0 there.
template <class Real>
class BiasSum {
 public:
  BiasSum(const Problem& p, const BiasTensor& t) : t_(t) {
    if (!t) return;
    size_[0] = t.stride_batch != 0 ? p.batch : 1;
    size_[1] = t.stride_head != 0 ? p.heads_q : 1;
    size_[2] = t.stride_q != 0 ? p.seq_q : 1;
    size_[3] = t.stride_k != 0 ? p.seq_k : 1;
    sum_.assign(size_[0] * size_[1] * size_[2] * size_[3], Real(0));
  }
  void add(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t column, Real x) {
    if (!t_) return;
    const std::int64_t ib = t_.stride_batch != 0 ? b : 0, ih = t_.stride_head != 0 ? h : 0;
    const std::int64_t iq = t_.stride_q != 0 ? i : 0, ik = t_.stride_k != 0 ? column : 0;
    sum_[((ib * size_[1] + ih) * size_[2] + iq) * size_[3] + ik] += x;
  }
  void store() const {
    std::int64_t n = 0;
    for (std::int64_t b = 0; b < size_[0]; ++b) {
      for (std::int64_t h = 0; h < size_[1]; ++h) {
        for (std::int64_t i = 0; i < size_[2]; ++i) {
          for (std::int64_t j = 0; j < size_[3]; ++j) store_real(t_.data, t_.dtype, t_.offset(b, h, i, j), sum_[n++]);
        }
      }
    }
  }

 private:
  BiasTensor t_;
  std::int64_t size_[4] = {0, 0, 0, 0};
  std::vector<Real> sum_;
};

template <class Real>
class Backward {
 public:
  Backward(const Problem& problem, const BackwardOperands& operands, bool recompute)
      : p_(problem),
        x_(operands),
        recompute_(recompute),
        rounded_{problem.dtype},
        bias_(problem, operands.grad_bias),
        sinks_(problem.batch * problem.heads_q, Real(0)),
        q_(p_.head_dim),
        dq_(p_.head_dim),
        out_(p_.head_dim_v),
        dout_(p_.head_dim_v),
        weight_(most_keys(p_)),
        slope_(most_keys(p_)),
        keep_(most_keys(p_)),
        rows_(p_),
        sums_(p_) {}

  void run() {
    clear_rows(p_, x_.grad_q, operand_rows(p_.seq_q, p_.total_q, p_.mask), p_.heads_q, p_.head_dim);
    clear_rows(p_, x_.grad_k, operand_rows(p_.seq_k, p_.total_k, p_.mask), p_.heads_kv, p_.head_dim);
    clear_rows(p_, x_.grad_v, operand_rows(p_.seq_k, p_.total_k, p_.mask), p_.heads_kv, p_.head_dim_v);
    for (std::int64_t b = 0; b < p_.batch; ++b) item(b);
    bias_.store();
    store_sinks();
  }

 private:
  void item(std::int64_t b) {
    const Item item = item_at(p_, b);
    Head<Real> head(p_, item, b, rows_);
    for (std::int64_t kv_head = 0; kv_head < p_.heads_kv; ++kv_head) {
      head.load_keys(x_.k, x_.v, kv_head);
      sums_.k.assign(item.k_length * p_.head_dim, Real(0));
      sums_.v.assign(item.k_length * p_.head_dim_v, Real(0));
      for (std::int64_t h = kv_head * p_.group(); h < (kv_head + 1) * p_.group(); ++h) {
        for (std::int64_t i = 0; i < item.q_length; ++i) row(b, item, head, h, i);
      }
      for (std::int64_t j = 0; j < item.k_length; ++j) {
        const Real* dk = sums_.k.data() + j * p_.head_dim;
        const Real* dv = sums_.v.data() + j * p_.head_dim_v;
        if (x_.grad_k) store_row(x_.grad_k, b, item.k_row + j, kv_head, p_.head_dim, dk, Real(p_.score.scale));
        if (x_.grad_v) store_row(x_.grad_v, b, item.k_row + j, kv_head, p_.head_dim_v, dv);
      }
    }
  }

  void row(std::int64_t b, const Item& item, const Head<Real>& head, std::int64_t h, std::int64_t i) {
    const Keys keys = seen_keys(p_, item, b, h, i);
    const std::int64_t count = keys.hi - keys.lo, seq = item.q_row + i;
    if (count == 0 && !p_.score.sinks) return;

    load_row(dout_.data(), x_.grad_out, b, seq, h, p_.head_dim_v);
    if (count != 0) load_row(q_.data(), x_.q, b, seq, h, p_.head_dim);
    head.scores(h, i, keys, q_.data(), weight_.data(), slope_.data());
    head.keeps(h, i, keys, keep_.data());
    const Real lse = weights(b, head, keys, h, seq);
    if (lse == -std::numeric_limits<Real>::infinity()) return;

    // The gradient of a score: P (keep dO.V - D), where D = dO.O, less the gradient that enters through lse.
    // O of a row without keys is 0 whatever V holds: dO does not matter.
    Real d = count == 0 ? Real(0) : row_sum(dout_.data(), out_.data(), p_.head_dim_v);
    if (x_.grad_lse) d -= Real(*x_.grad_lse.row(b, h, seq));
    if (p_.score.sinks) sinks_[b * p_.heads_q + h] -= std::exp(head.sink(h) - lse) * d;

    std::fill(dq_.begin(), dq_.end(), Real(0));
    for (std::int64_t j = keys.lo; j < keys.hi; ++j) {
      const std::int64_t n = j - keys.lo;
      const Real dp = keep_[n] * dot(dout_.data(), head.v(j), p_.head_dim_v);
      const Real ds = weight_[n] * (dp - d);
      bias_.add(b, h, i, item.k_start + j, rounded_(ds));
      const Real ds_raw = rounded_(ds * slope_[n]);
      add_scaled(dq_.data(), ds_raw, head.k(j), p_.head_dim);
      add_scaled(sums_.k.data() + j * p_.head_dim, ds_raw, q_.data(), p_.head_dim);
      add_scaled(sums_.v.data() + j * p_.head_dim_v, rounded_(weight_[n] * keep_[n]), dout_.data(), p_.head_dim_v);
    }
    if (x_.grad_q) store_row(x_.grad_q, b, seq, h, p_.head_dim, dq_.data(), Real(p_.score.scale));
  }

  /// Scores to weights, and the row's out: its own, or by the lse and out given.
  Real weights(std::int64_t b, const Head<Real>& head, Keys keys, std::int64_t h, std::int64_t seq) {
    const std::int64_t count = keys.hi - keys.lo;
    if (!recompute_) {
      load_row(out_.data(), x_.out, b, seq, h, p_.head_dim_v);
      const Real lse = Real(*x_.lse.row(b, h, seq));
      for (std::int64_t n = 0; n < count; ++n) weight_[n] = std::exp(weight_[n] - lse);
      return lse;
    }
    const Real lse = softmax(weight_.data(), count, head.sink(h));
    std::fill(out_.begin(), out_.end(), Real(0));
    for (std::int64_t n = 0; n < count; ++n) {
      add_scaled(out_.data(), rounded_(weight_[n] * keep_[n]), head.v(keys.lo + n), p_.head_dim_v);
    }
    for (Real& x : out_) x = rounded_(x);
    return lse;
  }

  /// D. In float32 in another order than dO.V, as in every kernel: where the two cancel, their errors remain.
  static Real row_sum(const Real* a, const Real* b, std::int64_t n) {
    if constexpr (sizeof(Real) == 8) return dot(a, b, n);
    const std::int64_t run = std::max<std::int64_t>(3, (n + 3) / 4);
    Real sum = 0;
    for (std::int64_t end = n; end > 0; end -= run) {
      Real part = 0;
      for (std::int64_t c = end - 1; c >= std::max<std::int64_t>(0, end - run); --c) part = std::fma(a[c], b[c], part);
      sum += part;
    }
    return sum;
  }

  void store_sinks() {
    const HeadTensor& t = x_.grad_sinks;
    if (!t) return;
    for (std::int64_t h = 0; h < p_.heads_q; ++h) {
      Real sum = 0;
      for (std::int64_t b = 0; b < p_.batch; ++b) {
        if (t.stride_batch != 0) sum = 0;
        sum += sinks_[b * p_.heads_q + h];
        if (t.stride_batch != 0) store_real(t.data, t.dtype, b * t.stride_batch + h * t.stride_head, sum);
      }
      if (t.stride_batch == 0) store_real(t.data, t.dtype, h * t.stride_head, sum);
    }
  }

  const Problem& p_;
  const BackwardOperands& x_;
  const bool recompute_;
  const Rounding<Real> rounded_;
  BiasSum<Real> bias_;
  std::vector<Real> sinks_;                  // (batch, heads_q)
  std::vector<Real> q_, dq_, out_, dout_;    // of one row
  std::vector<Real> weight_, slope_, keep_;  // of one row's visible keys
  HeadRows<Real> rows_, sums_;               // K and V, dK and dV of one item and KV head
};

}  // namespace

Status backward(const Problem& problem, const BackwardOperands& operands, Precision precision, bool recompute) try {
  if (nothing_to_write(problem, operands)) {
    clear_sums(problem, operands);
  } else if (precision == Precision::exact || problem.dtype == DType::f64) {
    Backward<double>(problem, operands, recompute).run();
  } else {
    Backward<float>(problem, operands, recompute).run();
  }
  return {};
} catch (const std::exception&) {  // no memory, or a vector longer than any memory
  return {ONEPASS_OUT_OF_MEMORY, "the reference kernel needs memory for one head's keys and values in float64"};
}

}  // namespace onepass::oracle
