#include "oracle/rows.h"

namespace onepass::oracle {
namespace {

std::int64_t within(std::int64_t x, std::int64_t least, std::int64_t most) {
  return std::max(least, std::min(x, most));
}

}  // namespace

Item item_at(const Problem& problem, std::int64_t b) {
  const MaskSpec& mask = problem.mask;
  Item item;
  item.q_length = problem.seq_q;
  item.k_length = problem.seq_k;
  // Values from memory are cut to what the operands hold.
  if (mask.cu_seqlens_q != nullptr) {
    item.q_row = within(mask.cu_seqlens_q[b], 0, problem.total_q);
    const std::int64_t end = within(mask.cu_seqlens_q[b + 1], item.q_row, problem.total_q);
    item.q_length = std::min(end - item.q_row, problem.seq_q);
  }
  if (mask.cu_seqlens_k != nullptr) {
    item.k_row = within(mask.cu_seqlens_k[b], 0, problem.total_k);
    const std::int64_t end = within(mask.cu_seqlens_k[b + 1], item.k_row, problem.total_k);
    item.k_length = std::min(end - item.k_row, problem.seq_k);
  }
  if (mask.q_length != nullptr) item.q_length = within(mask.q_length[b], 0, item.q_length);
  if (mask.k_start != nullptr) item.k_start = within(mask.k_start[b], 0, item.k_length);
  const std::int64_t room = item.k_length - item.k_start;
  item.k_length = mask.k_length != nullptr ? within(mask.k_length[b], 0, room) : room;
  item.k_row += item.k_start;

  item.q_position = mask.align == Align::bottom_right ? item.k_length - item.q_length : 0;
  if (mask.q_position != nullptr) item.q_position = mask.q_position[b];
  return item;
}

Keys visible_keys(const MaskSpec& mask, const Item& item, std::int64_t i) {
  constexpr std::int64_t kWide = std::int64_t{1} << 61;  // windows are cut to this, so that p + window fits
  const std::int64_t p = i + item.q_position;
  std::int64_t lo = 0, last = item.k_length - 1;  // lo <= j <= last
  if (mask.causal) last = std::min(last, p);
  if (mask.window_left != -1) lo = std::max(lo, p - std::min(mask.window_left, kWide));
  if (mask.window_right != -1) last = std::min(last, p + std::min(mask.window_right, kWide));
  if (last < lo) return {};
  return {lo, last + 1};
}

Keys seen_keys(const Problem& problem, const Item& item, std::int64_t b, std::int64_t h, std::int64_t i) {
  const Keys keys = visible_keys(problem.mask, item, i);
  const BiasTensor& bias = problem.score.bias;
  bool finite = !bias;
  for (std::int64_t j = keys.lo; j < keys.hi && !finite; ++j) {
    const double x = load_double(bias.data, bias.dtype, bias.offset(b, h, i, item.k_start + j));
    finite = x != -std::numeric_limits<double>::infinity();
  }
  return finite ? keys : Keys{};
}

void store_real(void* data, DType dtype, std::int64_t index, double x) {
  if (dtype == DType::f64) {
    static_cast<double*>(data)[index] = x;
  } else {
    store_float(data, dtype, index, static_cast<float>(x));
  }
}

void clear_rows(const Problem& problem, const Tensor& t, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  if (!t) return;
  for (std::int64_t b = 0; b < operand_batch(problem); ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t c = 0; c < dim; ++c) store_real(t.row(b, i, h), t.dtype, c, 0);
      }
    }
  }
}

}  // namespace onepass::oracle
