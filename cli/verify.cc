#include "verify.h"

#include <atomic>
#include <cmath>
#include <mutex>

#include "api/request.h"
#include "check/compare.h"
#include "core/work.h"
#include "cpu/parallel.h"
#include "oracle/oracle.h"
#include "report.h"

namespace onepass::cli {
namespace {

/// A compact stand-in for an output, (items, rows, heads, dim), in another type.
struct StandIn {
  Array memory;
  Tensor tensor;
};

struct Output {
  const char* what;
  Tensor written;
  std::int64_t items, rows, heads, dim;
  DType stored;  // of the stand-in for the baseline
  bool is_lse = false;
  StandIn exact = {}, baseline = {};
};

ElementType element_type(DType type) {
  static constexpr ElementType kTypes[] = {ElementType::f32, ElementType::f16, ElementType::bf16, ElementType::f64};
  return kTypes[static_cast<int>(type)];
}

Result<StandIn> stand_in(const Output& o, DType type) {
  StandIn result;
  ONEPASS_ASSIGN(result.memory, Array::allocate(element_type(type), {o.items, o.rows, o.heads, o.dim}));
  // Packed operands are one item, whose sequences all begin at its first row.
  const std::int64_t stride_batch = o.items > 1 ? o.rows * o.heads * o.dim : 0;
  result.tensor = {result.memory.data(), type, stride_batch, o.heads * o.dim, o.dim};
  if (o.is_lse) result.tensor = {result.memory.data(), type, stride_batch, 1, o.rows};
  return result;
}

/// Rows of float32 as an operand with one element a row.
Tensor as_tensor(const RowTensor& rows) {
  return {rows.data, DType::f32, rows.stride_batch, 1, rows.stride_head};
}
RowTensor as_rows(const Tensor& tensor) {
  return {static_cast<float*>(tensor.data), tensor.stride_batch, tensor.stride_head};
}
/// A bias gradient's place (b, h, i, j): broadcast dimensions have one entry.
Tensor as_tensor(const BiasTensor& bias) {
  return {bias.data, bias.dtype, bias.stride_batch, bias.stride_q, bias.stride_head};
}
BiasTensor as_bias(const Tensor& tensor, const BiasTensor& like) {
  const auto stride = [](std::int64_t of, std::int64_t own) { return of == 0 ? 0 : own; };
  return {tensor.data,
          tensor.dtype,
          stride(like.stride_batch, tensor.stride_batch),
          stride(like.stride_head, tensor.stride_head),
          stride(like.stride_q, tensor.stride_seq),
          stride(like.stride_k, 1)};
}

void advance(Tensor& tensor, std::int64_t heads) {
  if (tensor) tensor.data = tensor.row(0, 0, heads);
}
void advance(RowTensor& rows, std::int64_t heads) {
  if (rows) rows.data = rows.row(0, heads, 0);
}
void advance(BiasTensor& bias, std::int64_t heads) {
  if (bias) bias.data = static_cast<char*>(bias.data) + heads * bias.stride_head * dtype_size(bias.dtype);
}
void advance(HeadTensor& tensor, std::int64_t heads) {
  if (tensor) tensor.data = static_cast<char*>(tensor.data) + heads * tensor.stride_head * dtype_size(tensor.dtype);
}

/// The problem of one KV head and its query heads.
Problem slice(Problem p, std::int64_t head) {
  const std::int64_t group = p.group();
  p.heads_kv = 1;
  p.heads_q = group;
  advance(p.score.alibi_slopes, head * group);
  advance(p.score.bias, head * group);
  advance(p.score.sinks, head * group);
  return p;
}
ForwardOperands slice(ForwardOperands f, const Problem& p, std::int64_t head) {
  for (Tensor* t : {&f.q, &f.out}) advance(*t, head * p.group());
  for (Tensor* t : {&f.k, &f.v}) advance(*t, head);
  advance(f.lse, head * p.group());
  return f;
}
BackwardOperands slice(BackwardOperands b, const Problem& p, std::int64_t head) {
  for (Tensor* t : {&b.q, &b.out, &b.grad_out, &b.grad_q}) advance(*t, head * p.group());
  for (Tensor* t : {&b.k, &b.v, &b.grad_k, &b.grad_v}) advance(*t, head);
  for (RowTensor* t : {&b.lse, &b.grad_lse}) advance(*t, head * p.group());
  advance(b.grad_bias, head * p.group());
  advance(b.grad_sinks, head * p.group());
  return b;
}

/// Runs body(head) -> Status for every head on all threads.
template <class Body>
Status each_head(std::int64_t heads, const Body& body) {
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  Status first;
  cpu::parallel(cpu::default_threads(), [&](int) {
    for (std::int64_t head = next++; head < heads; head = next++) {
      Status status = body(head);
      const std::lock_guard lock(mutex);
      if (!status.ok() && first.ok()) first = std::move(status);
    }
  });
  return first;
}

Status run_reference(const api::Request& request, const std::vector<Output>& outputs, oracle::Precision precision) {
  const Problem& p = request.problem;
  const bool exact = precision == oracle::Precision::exact;
  const auto target = [&](const char* what) -> Tensor {
    for (const Output& o : outputs) {
      if (std::string_view(o.what) == what) return exact ? o.exact.tensor : o.baseline.tensor;
    }
    return {};
  };
  if (p.pass != Pass::backward) {
    ForwardOperands f = request.forward;
    f.out = target("out");
    f.lse = as_rows(target("lse"));
    return each_head(nothing_to_write(p, f) ? 0 : p.heads_kv,
                     [&](std::int64_t h) { return oracle::forward(slice(p, h), slice(f, p, h), precision); });
  }
  BackwardOperands b = request.backward;
  b.grad_q = target("grad_q");
  b.grad_k = target("grad_k");
  b.grad_v = target("grad_v");
  if (b.grad_bias) b.grad_bias = as_bias(target("grad_bias"), b.grad_bias);
  if (b.grad_sinks) {
    const Tensor sinks = target("grad_sinks");
    b.grad_sinks = {sinks.data, sinks.dtype, 0, sinks.stride_head};
  }
  // The baseline starts from the out and lse that the kernel was given, the reference from the truth.
  if (b.grad_bias && b.grad_bias.stride_head == 0) return oracle::backward(p, b, precision, exact);
  return each_head(nothing_to_write(p, b) ? 0 : p.heads_kv,
                   [&](std::int64_t h) { return oracle::backward(slice(p, h), slice(b, p, h), precision, exact); });
}

/// The error of one element; infinite if NaN or Inf are not where they should be.
double element_error(double got, double exact, bool is_lse) {
  if (is_lse && exact == -INFINITY) return got == exact ? 0 : INFINITY;
  if (!std::isfinite(exact)) return std::isfinite(got) ? INFINITY : 0;
  return std::isfinite(got) ? std::abs(got - exact) : INFINITY;
}

Verdict judge(const Output& o, DType input) {
  Verdict verdict;
  verdict.what = o.what;
  double largest = 0;
  const auto at = [&](const Tensor& t, std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t d) {
    return load_double(t.data, t.dtype, t.offset(b, i, h) + d);
  };
  for (std::int64_t b = 0; b < o.items && o.rows > 0; ++b) {
    for (std::int64_t i = 0; i < o.rows; ++i) {
      for (std::int64_t h = 0; h < o.heads; ++h) {
        for (std::int64_t d = 0; d < o.dim; ++d) {
          const double exact = at(o.exact.tensor, b, i, h, d), formula = at(o.baseline.tensor, b, i, h, d);
          verdict.error = std::max(verdict.error, element_error(at(o.written, b, i, h, d), exact, o.is_lse));
          if (!std::isfinite(exact)) continue;
          largest = std::max(largest, std::abs(exact));
          if (std::isfinite(formula)) verdict.baseline = std::max(verdict.baseline, std::abs(formula - exact));
        }
      }
    }
  }
  const double unit = check::ulp(input, largest);
  verdict.bound = 2 * verdict.baseline + unit;
  verdict.ratio = verdict.error / std::max(verdict.baseline, 0.5 * unit);
  verdict.ok = verdict.error <= verdict.bound;
  return verdict;
}

std::vector<Output> outputs_of(const api::Request& r) {
  const Problem& p = r.problem;
  const std::int64_t items = p.mask.varlen ? 1 : p.batch;
  if (p.pass != Pass::backward) {
    std::vector<Output> outputs = {
        {"out", r.forward.out, items, p.total_q, p.heads_q, p.head_dim_v, r.forward.out.dtype}};
    if (r.forward.lse) {
      outputs.push_back({"lse", as_tensor(r.forward.lse), items, p.total_q, p.heads_q, 1, DType::f32, true});
    }
    return outputs;
  }
  const BackwardOperands& b = r.backward;
  std::vector<Output> outputs = {{"grad_q", b.grad_q, items, p.total_q, p.heads_q, p.head_dim, p.dtype},
                                 {"grad_k", b.grad_k, items, p.total_k, p.heads_kv, p.head_dim, p.dtype},
                                 {"grad_v", b.grad_v, items, p.total_k, p.heads_kv, p.head_dim_v, p.dtype}};
  if (b.grad_bias) {
    const auto size = [](std::int64_t stride, std::int64_t full) { return stride == 0 ? 1 : full; };
    const BiasTensor& g = b.grad_bias;
    outputs.push_back({"grad_bias", as_tensor(g), size(g.stride_batch, p.batch), size(g.stride_q, p.seq_q),
                       size(g.stride_head, p.heads_q), size(g.stride_k, p.seq_k), g.dtype});
  }
  if (b.grad_sinks) {
    const HeadTensor& g = b.grad_sinks;
    outputs.push_back({"grad_sinks", {g.data, g.dtype, 0, 0, g.stride_head}, 1, 1, p.heads_q, 1, g.dtype});
  }
  return outputs;
}

}  // namespace

Result<std::vector<Verdict>> verify(const Attention& attention, onepass_pass_t pass) {
  Attention on_host = attention;
  on_host.on_device = false;
  on_host.kernel.clear();
  const Call call(on_host, pass);
  api::Request request;  // planned: its operands are all that the reference needs
  ONEPASS_RETURN_IF_ERROR(pass == ONEPASS_BACKWARD ? api::make_request(call.backward, true, &request)
                                                   : api::make_request(call.forward, true, &request));
  std::vector<Output> outputs = outputs_of(request);
  for (Output& o : outputs) {
    ONEPASS_ASSIGN(o.exact, stand_in(o, o.is_lse ? DType::f32 : DType::f64));
    ONEPASS_ASSIGN(o.baseline, stand_in(o, o.stored));
  }
  ONEPASS_RETURN_IF_ERROR(run_reference(request, outputs, oracle::Precision::exact));
  ONEPASS_RETURN_IF_ERROR(run_reference(request, outputs, oracle::Precision::storage));
  std::vector<Verdict> verdicts;
  for (const Output& o : outputs) verdicts.push_back(judge(o, request.problem.dtype));
  return verdicts;
}

}  // namespace onepass::cli
