#include "check/case.h"

#include <cfloat>
#include <limits>

#include "core/layout.h"
#include "oracle/oracle.h"

namespace onepass::check {

Case::Case(const CaseSpec& spec) : spec_(spec) {
  Random random(spec.seed ^ 0x6f6e6570617373u);
  make_problem();
  make_operands();
  make_modifiers(random);
  fill_values(*this, random);
  poison_invisible(*this);
  if (spec.pass == Pass::backward) save_forward();
  const bool packed = spec.varlen();
  for (const Array* array : {&q, &k, &v, &out, &saved_out, &grad_out, &grad_q, &grad_k, &grad_v}) {
    const bool aligned = !*array || (rows_aligned(array->tensor(packed)) && array->tensor(packed).dtype == spec.dtype);
    problem_.aligned_rows = problem_.aligned_rows && aligned;
  }
  for (Array* array : inputs()) array->seal();
  for (Array* array : outputs()) array->seal();
}

void Case::make_problem() {
  const CaseSpec& s = spec_;
  Problem& p = problem_;
  p.pass = s.pass;
  p.dtype = s.dtype;
  p.batch = s.batch;
  p.seq_q = s.seq_q;
  p.seq_k = s.seq_k;
  p.total_q = s.varlen() ? s.total_q : s.seq_q;
  p.total_k = s.varlen() ? s.total_k : s.seq_k;
  p.heads_q = s.heads_q;
  p.heads_kv = s.heads_kv;
  p.head_dim = s.head_dim;
  p.head_dim_v = s.head_dim_v;
  p.deterministic = s.deterministic;

  cu_seqlens_q = IntArray(s.cu_seqlens_q);
  cu_seqlens_k = IntArray(s.cu_seqlens_k);
  q_length = IntArray(s.q_length);
  k_start = IntArray(s.k_start);
  k_length = IntArray(s.k_length);
  q_position = IntArray(s.q_position);
  p.mask = {
      s.causal,        s.align,        s.window_left,   s.window_right,    cu_seqlens_q.data(), cu_seqlens_k.data(),
      q_length.data(), k_start.data(), k_length.data(), q_position.data(), s.varlen()};

  p.score.scale = !std::isnan(s.scale) ? s.scale : s.head_dim > 0 ? 1 / std::sqrt(static_cast<double>(s.head_dim)) : 1;
  p.score.softcap = s.softcap;
  const auto threshold = static_cast<std::uint32_t>(std::lround(65536 * s.dropout_p));
  p.score.dropout = {threshold, threshold < 65536 ? 65536.0f / static_cast<float>(65536 - threshold) : 0.0f,
                     s.dropout_seed, s.dropout_offset, nullptr};
  if (s.dropout_state && threshold != 0) {
    dropout_state = {static_cast<std::int64_t>(s.dropout_seed), static_cast<std::int64_t>(s.dropout_offset)};
    p.score.dropout.state = dropout_state.data();
    p.score.dropout.seed = ~s.dropout_seed;  // must not be looked at
    p.score.dropout.offset = ~s.dropout_offset;
  }
}

void Case::make_operands() {
  const CaseSpec& s = spec_;
  const std::int64_t items = s.varlen() ? 1 : s.batch;
  const Index size_q = {items, problem_.total_q, s.heads_q, s.head_dim};
  const Index size_k = {items, problem_.total_k, s.heads_kv, s.head_dim};
  const Index size_v = {items, problem_.total_k, s.heads_kv, s.head_dim_v};
  const Index size_out = {items, problem_.total_q, s.heads_q, s.head_dim_v};
  q = Array(s.dtype, size_q, s.layout_q, false);
  k = Array(s.dtype, size_k, s.layout_k, false);
  v = Array(s.dtype, size_v, s.layout_v, false);
  if (s.pass != Pass::backward) {
    out = Array(s.out_f32 ? DType::f32 : s.dtype, size_out, s.layout_out, true);
    if (s.lse) lse = Array::rows(items, s.heads_q, problem_.total_q, s.row_gap, true);
    return;
  }
  Layout layout_out = s.layout_out;
  layout_out.broadcast = {false, false, false};
  saved_out = Array(s.dtype, size_out, layout_out, false);
  saved_lse = Array::rows(items, s.heads_q, problem_.total_q, s.row_gap, false);
  grad_out = Array(s.dtype, size_out, s.layout_q, false);
  if (s.grad_lse) grad_lse = Array::rows(items, s.heads_q, problem_.total_q, 0, false);
  grad_q = Array(s.dtype, size_q, s.layout_out, true);
  grad_k = Array(s.dtype, size_k, s.layout_k, true);
  grad_v = Array(s.dtype, size_v, s.layout_v, true);
}

void Case::make_modifiers(Random& random) {
  const CaseSpec& s = spec_;
  const double infinity = std::numeric_limits<double>::infinity();
  if (s.alibi != 0) {
    alibi = Array(DType::f32, {s.alibi == 2 ? s.batch : 1, s.heads_q, 1, 1});
    alibi.each([&](const Index&, std::int64_t at) { alibi.set(at, random.uniform() * 0.5); });
    problem_.score.alibi_slopes = alibi.head_tensor();
  }
  if (s.bias) {
    const Index size = {s.batch, s.heads_q, s.seq_q, s.seq_k};
    bias = Array::bias(s.bias_dtype, size, s.bias_broadcast, false);
    const double lowest = s.bias_dtype == DType::f16 ? -65504.0 : s.bias_dtype == DType::bf16 ? -0x1.fep127 : -FLT_MAX;
    double row = 0;  // what a whole row holds, if not 0
    bias.each([&](const Index& i, std::int64_t at) {
      if (s.bias_extreme && i[3] == 0) {
        const double kind = random.uniform();
        row = kind < 0.04 ? -infinity : kind < 0.08 && s.seq_k > 1 ? lowest : 0;
      }
      const double x = random.normal();
      bias.set(at, row != 0 ? row : s.bias_extreme && random.chance(0.1) ? -infinity : x);
    });
    problem_.score.bias = bias.bias_tensor();
    if (s.pass == Pass::backward && s.grad_bias) {
      grad_bias = Array::bias(s.bias_dtype == s.dtype ? s.dtype : DType::f32, size, s.bias_broadcast, true);
    }
  }
  if (s.sinks) {
    sinks = Array(s.sinks_dtype, {1, s.heads_q, 1, 1});
    sinks.each([&](const Index&, std::int64_t at) {
      const double x = 2 * random.normal();
      sinks.set(at, s.sinks_none && random.chance(0.5) ? -infinity : x);
    });
    problem_.score.sinks = sinks.head_tensor();
    if (s.pass == Pass::backward && s.grad_sinks) grad_sinks = Array(s.sinks_dtype, {1, s.heads_q, 1, 1}, true);
  }
}

void Case::save_forward() {
  ForwardOperands operands = forward_operands();
  operands.out = saved_out.tensor(spec_.varlen());
  operands.lse = saved_lse.row_tensor(spec_.varlen());
  const Status status = oracle::forward(problem_, operands);
  if (!status.ok()) return;  // the reference of the backward fails too and says so
  // Rows outside the sequences are not for a backward to read.
  poison_invisible(*this);
}

ForwardOperands Case::forward_operands() const {
  const bool packed = spec_.varlen();
  return {q.tensor(packed), k.tensor(packed), v.tensor(packed), out.tensor(packed), lse.row_tensor(packed)};
}

BackwardOperands Case::backward_operands() const {
  const bool packed = spec_.varlen();
  return {q.tensor(packed),
          k.tensor(packed),
          v.tensor(packed),
          saved_out.tensor(packed),
          grad_out.tensor(packed),
          saved_lse.row_tensor(packed),
          grad_lse.row_tensor(packed),
          grad_q.tensor(packed),
          grad_k.tensor(packed),
          grad_v.tensor(packed),
          grad_bias.bias_tensor(),
          grad_sinks.head_tensor()};
}

std::vector<Array*> Case::inputs() {
  return {&q, &k, &v, &grad_out, &grad_lse, &alibi, &bias, &sinks, &saved_out, &saved_lse};
}
std::vector<Array*> Case::outputs() {
  return {&out, &lse, &grad_q, &grad_k, &grad_v, &grad_bias, &grad_sinks};
}

std::vector<Block> Case::memory() {
  std::vector<Block> blocks;
  for (Array* array : inputs()) blocks.push_back(array->memory());
  for (Array* array : outputs()) blocks.push_back(array->memory());
  for (IntArray* array : {&cu_seqlens_q, &cu_seqlens_k, &q_length, &k_start, &k_length, &q_position}) {
    blocks.push_back(array->memory());
  }
  blocks.push_back({dropout_state.data(), 8 * dropout_state.size()});
  std::erase_if(blocks, [](const Block& block) { return block.bytes == 0; });
  return blocks;
}

void Case::reset() {
  for (Array* array : outputs()) array->reset();
}

bool Case::as_drawn() const {
  Case drawn(spec_);
  const std::vector<Array*> theirs = drawn.inputs(), mine = const_cast<Case*>(this)->inputs();
  for (std::size_t n = 0; n < mine.size(); ++n) {
    if (static_cast<bool>(*mine[n]) != static_cast<bool>(*theirs[n])) return false;
    if (*mine[n] && mine[n]->bits() != theirs[n]->bits()) return false;
  }
  return true;
}

std::vector<std::string> Case::faults() const {
  static constexpr const char* kInputs[] = {"q",     "k",    "v",     "grad_out", "grad_lse",
                                            "alibi", "bias", "sinks", "out",      "lse"};
  static constexpr const char* kOutputs[] = {"out", "lse", "grad_q", "grad_k", "grad_v", "grad_bias", "grad_sinks"};
  std::vector<std::string> lines;
  auto* self = const_cast<Case*>(this);
  int n = 0;
  for (const Array* array : self->inputs()) {
    if (!array->unchanged()) lines.push_back(std::string("input ") + kInputs[n] + " was written");
    ++n;
  }
  n = 0;
  for (const Array* array : self->outputs()) {
    if (!array->unchanged_outside()) lines.push_back(std::string("written outside output ") + kOutputs[n]);
    ++n;
  }
  return lines;
}

}  // namespace onepass::check
