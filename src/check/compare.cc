#include "check/compare.h"

#include <algorithm>
#include <cstdio>

namespace onepass::check {
namespace {

double largest_finite(DType dtype) {
  return dtype == DType::f16 ? 65504 : dtype == DType::bf16 ? 0x1.fep127 : dtype == DType::f32 ? 0x1.fffffep127 : 1e308;
}

/// The error of one element; infinite if NaN or Inf are not where they should be. The lse of an empty row is exactly
/// -inf; else one kind of non-finite value stands for all.
double element_error(double got, double exact, DType stored, bool is_lse) {
  if (is_lse && exact == -INFINITY) return got == exact ? 0 : INFINITY;
  if (!std::isfinite(exact)) return std::isfinite(got) ? INFINITY : 0;
  // Within an ulp of overflow a number may round either way.
  if (std::abs(exact) + ulp(stored, exact) > largest_finite(stored) && std::isinf(got) && (got > 0) == (exact > 0)) {
    return 0;
  }
  return std::isfinite(got) ? std::abs(got - exact) : INFINITY;
}

std::string place(const Index& at, double got, double exact) {
  char text[160];
  std::snprintf(text, sizeof text, "at (%lld,%lld,%lld,%lld): %.9g, should be %.9g", static_cast<long long>(at[0]),
                static_cast<long long>(at[1]), static_cast<long long>(at[2]), static_cast<long long>(at[3]), got,
                exact);
  return text;
}

}  // namespace

double ulp(DType dtype, double x) {
  static constexpr int kFraction[] = {23, 10, 7, 52};        // f32 f16 bf16 f64
  static constexpr int kLeast[] = {-126, -14, -126, -1022};  // exponent of the smallest normal number
  const int n = static_cast<int>(dtype);
  const int exponent = x == 0 || !std::isfinite(x) ? kLeast[n] : std::max(std::ilogb(x), kLeast[n]);
  return std::ldexp(1.0, exponent - kFraction[n]);
}

void Comparison::judge(DType dtype) {
  const double unit = std::max(ulp(dtype, largest), least_unit);
  bound = 2 * baseline + unit;
  ok = error <= bound;
  bound_ratio = error / bound;
  ratio = error / std::max(baseline, 0.5 * unit);
}

Reference::Reference(const Case& c) {
  add(c, "out", &Case::out);
  add(c, "lse", &Case::lse);
  add(c, "dq", &Case::grad_q);
  add(c, "dk", &Case::grad_k);
  add(c, "dv", &Case::grad_v);
  add(c, "dbias", &Case::grad_bias);
  add(c, "dsinks", &Case::grad_sinks);
  status_ = run(c, &Part::exact, oracle::Precision::exact, true);
  if (status_.ok()) run_baseline(c);
}

void Reference::add(const Case& c, const char* what, Array Case::*output) {
  const Array& like = c.*output;
  if (!like) return;
  const auto make = [&](DType dtype) {
    if (output != &Case::grad_bias) return Array(dtype, like.size(), true);
    return Array::bias(dtype, like.size(), c.spec().bias_broadcast, true);
  };
  parts_.push_back({what, output, make(output == &Case::lse ? DType::f32 : DType::f64), make(like.dtype()), 0});
}

void Reference::run_baseline(const Case& c) {
  status_ = run(c, &Part::baseline, oracle::Precision::storage, false);
  for (Part& part : parts_) {
    part.exact.each([&](const Index& at, std::int64_t offset) {
      const double exact = part.exact.get(offset), baseline = part.baseline.get(part.baseline.offset(at));
      if (std::isfinite(exact) && std::isfinite(baseline))
        part.error = std::max(part.error, std::abs(baseline - exact));
    });
  }
}

Status Reference::run(const Case& c, Array Part::*target, oracle::Precision precision, bool recompute) {
  const bool packed = c.spec().varlen();
  const Array none;
  const auto array = [&](Array Case::*output) -> const Array& {
    for (const Part& part : parts_) {
      if (part.output == output) return part.*target;
    }
    return none;
  };
  if (c.spec().pass != Pass::backward) {
    ForwardOperands operands = c.forward_operands();
    operands.out = array(&Case::out).tensor(packed);
    operands.lse = array(&Case::lse).row_tensor(packed);
    return oracle::forward(c.problem(), operands, precision);
  }
  BackwardOperands operands = c.backward_operands();
  operands.grad_q = array(&Case::grad_q).tensor(packed);
  operands.grad_k = array(&Case::grad_k).tensor(packed);
  operands.grad_v = array(&Case::grad_v).tensor(packed);
  operands.grad_bias = array(&Case::grad_bias).bias_tensor();
  operands.grad_sinks = array(&Case::grad_sinks).head_tensor();
  return oracle::backward(c.problem(), operands, precision, recompute);
}

void Reference::compare(const Case& c, Report& report) const {
  const DType dtype = c.spec().dtype;
  for (const Part& part : parts_) {
    const Array& got = c.*part.output;
    const bool is_lse = part.output == &Case::lse;
    Comparison result;
    result.what = part.what;
    result.baseline = part.error;
    got.each([&](const Index& at, std::int64_t offset) {
      const double exact = part.exact.get(part.exact.offset(at)), value = got.get(offset);
      if (std::isfinite(exact)) result.largest = std::max(result.largest, std::abs(exact));
      const double error = element_error(value, exact, got.dtype(), is_lse);
      if (error > result.error) {
        result.error = error;
        result.where = place(at, value, exact);
      }
    });
    result.judge(dtype);
    report.parts.push_back(result);
    report.bits = (report.bits ^ got.bits()) * 0x9E3779B97F4A7C15u;
  }
}

bool Report::ok() const {
  return faults.empty() && std::all_of(parts.begin(), parts.end(), [](const Comparison& part) { return part.ok; });
}
double Report::worst_ratio() const {
  double worst = 0;
  for (const Comparison& part : parts) worst = std::max(worst, part.ratio);
  return worst;
}
double Report::worst_bound_ratio() const {
  double worst = 0;
  for (const Comparison& part : parts) worst = std::max(worst, part.bound_ratio);
  return worst;
}

std::string Report::text(bool all) const {
  std::string lines = name;
  for (const std::string& fault : faults) lines += "\n  " + fault;
  for (const Comparison& part : parts) {
    if (part.ok && !all) continue;
    char text[200];
    std::snprintf(text, sizeof text, "\n  %-6s error %.3g, baseline %.3g, bound %.3g, largest %.3g ", part.what.c_str(),
                  part.error, part.baseline, part.bound, part.largest);
    lines += text + part.where;
  }
  return lines;
}

}  // namespace onepass::check
