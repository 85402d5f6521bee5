#include <exception>

#include "core/work.h"
#include "oracle/oracle.h"
#include "oracle/rows.h"

namespace onepass::oracle {
namespace {

void clear(const Problem& problem, const ForwardOperands& operands) {
  const std::int64_t rows = operand_rows(problem.seq_q, problem.total_q, problem.mask);
  clear_rows(problem, operands.out, rows, problem.heads_q, problem.head_dim_v);
  if (!operands.lse) return;
  for (std::int64_t b = 0; b < operand_batch(problem); ++b) {
    for (std::int64_t h = 0; h < problem.heads_q; ++h) {
      for (std::int64_t i = 0; i < rows; ++i) {
        *operands.lse.row(b, h, i) = -std::numeric_limits<float>::infinity();
      }
    }
  }
}

template <class Real>
void run(const Problem& problem, const ForwardOperands& operands, const std::function<void()>& ready) {
  const Rounding<Real> rounded{problem.dtype};
  std::vector<Real> q(problem.head_dim), out(problem.head_dim_v), weight(most_keys(problem)), keep(most_keys(problem));
  HeadRows<Real> rows(problem);
  ready();
  clear(problem, operands);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const Item item = item_at(problem, b);
    Head<Real> head(problem, item, b, rows);
    for (std::int64_t h = 0; h < problem.heads_q; ++h) {
      if (h % problem.group() == 0) head.load_keys(operands.k, operands.v, problem.kv_head(h));
      for (std::int64_t i = 0; i < item.q_length; ++i) {
        const Keys keys = seen_keys(problem, item, b, h, i);
        if (keys.lo < keys.hi) load_row(q.data(), operands.q, b, item.q_row + i, h, problem.head_dim);
        head.scores(h, i, keys, q.data(), weight.data(), nullptr);
        const Real lse = softmax(weight.data(), keys.hi - keys.lo, head.sink(h));
        head.keeps(h, i, keys, keep.data());
        std::fill(out.begin(), out.end(), Real(0));
        if (lse != -std::numeric_limits<Real>::infinity()) {
          for (std::int64_t j = keys.lo; j < keys.hi; ++j) {
            add_scaled(out.data(), rounded(weight[j - keys.lo] * keep[j - keys.lo]), head.v(j), problem.head_dim_v);
          }
        }
        store_row(operands.out, b, item.q_row + i, h, problem.head_dim_v, out.data());
        if (operands.lse) *operands.lse.row(b, h, item.q_row + i) = static_cast<float>(lse);
      }
    }
  }
}

}  // namespace

Status forward(const Problem& problem, const ForwardOperands& operands, Precision precision,
               const std::function<void()>& ready) try {
  // float64 has no narrower arithmetic to compare with.
  if (nothing_to_write(problem, operands)) {
    ready();
  } else if (precision == Precision::exact || problem.dtype == DType::f64) {
    run<double>(problem, operands, ready);
  } else {
    run<float>(problem, operands, ready);
  }
  return {};
} catch (const std::exception&) {  // no memory, or a vector longer than any memory
  return {ONEPASS_OUT_OF_MEMORY, "the reference kernel needs memory for one head's keys and values in float64"};
}

}  // namespace onepass::oracle
