#include "ladder/measure.h"

#include <chrono>

#include "oracle/oracle.h"

namespace onepass::ladder {
namespace {

double distance(const std::vector<float>& got, const std::vector<double>& exact) {
  double worst = 0;
  for (std::size_t n = 0; n < exact.size(); ++n) {
    const double error = std::abs(got[n] - exact[n]);
    worst = error <= worst ? worst : error;  // NaN comes through, and stays
    if (std::isnan(worst)) break;
  }
  return worst;
}

}  // namespace

Status exact_of(const Problem& p, const Arrays& inputs, bool gradients, Exact& exact) {
  onepass::Problem problem;
  problem.batch = problem.heads_q = problem.heads_kv = 1;
  problem.seq_q = problem.seq_k = problem.total_q = problem.total_k = p.N;
  problem.head_dim = problem.head_dim_v = p.d;
  problem.mask.causal = p.causal;
  problem.mask.window_left = p.left;
  problem.mask.window_right = p.right;
  problem.score.scale = 1 / std::sqrt(static_cast<double>(p.d));
  const auto in = [&](Array a) {  // the reference only reads it
    return Tensor{const_cast<float*>(inputs[a].data()), DType::f32, p.N * p.d, p.d, p.d};
  };
  const auto out = [&](std::vector<double>& x) {
    x.assign(static_cast<std::size_t>(p.N * p.d), NAN);
    return Tensor{x.data(), DType::f64, p.N * p.d, p.d, p.d};
  };
  const Tensor o = out(exact.O);
  ONEPASS_RETURN_IF_ERROR(oracle::forward(problem, {in(Array::Q), in(Array::K), in(Array::V), o, {}}));
  if (!gradients) return {};
  problem.pass = Pass::backward;
  std::vector<float> lse(static_cast<std::size_t>(p.N));
  BackwardOperands b{};
  b.q = in(Array::Q);
  b.k = in(Array::K);
  b.v = in(Array::V);
  b.out = o;
  b.grad_out = in(Array::dO);
  b.lse = {lse.data(), p.N, p.N};
  b.grad_q = out(exact.dQ);
  b.grad_k = out(exact.dK);
  b.grad_v = out(exact.dV);
  return oracle::backward(problem, b);
}

Measurement measure(const Rung& rung, const Problem& problem, const Arrays& inputs, const Exact& exact) {
  Measurement result;
  Arrays x = inputs;
  prepare(rung, problem, x);
  rung.run(problem, x, &result.ledger);
  const auto start = std::chrono::steady_clock::now();
  rung.run(problem, x, nullptr);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!rung.backward()) {
    result.max_abs_err = distance(x[Array::O], exact.O);
    return result;
  }
  for (const auto& [array, gradient] :
       {std::pair{Array::dQ, &exact.dQ}, {Array::dK, &exact.dK}, {Array::dV, &exact.dV}}) {
    const double error = distance(x[array], *gradient);
    if (!(error <= result.max_abs_err)) result.max_abs_err = error;
  }
  return result;
}

}  // namespace onepass::ladder
