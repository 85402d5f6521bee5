// Causal self-attention of 3 tokens that all look alike, then its gradients; a refused call; the kernel list.
#include <cmath>
#include <cstdio>
#include <onepass/onepass.hpp>

int main() {
  using Tensor = onepass::Tensor<float>;
  const std::vector<std::int64_t> shape{1, 3, 2, 8};
  Tensor q(shape), k(shape), v(shape), out(shape), lse({1, 2, 3});
  for (int s = 0; s < 3; ++s) v(0, s, 1, 4) = static_cast<float>(s);
  const onepass::Options options{.causal = true};
  onepass::Workspace workspace;
  onepass::forward({.q = q, .k = k, .v = v, .out = out, .lse = lse}, options, &workspace).or_throw();
  std::printf("%g %g %g\n", out(0, 0, 1, 4), out(0, 1, 1, 4), out(0, 2, 1, 4));
  if (out(0, 1, 1, 4) != 0.5f || out(0, 2, 1, 4) != 1.0f) return 1;

  Tensor grad_out(shape), grad_q(shape), grad_k(shape), grad_v(shape);
  for (float& x : grad_out) x = 1;
  onepass::backward({.q = q,
                     .k = k,
                     .v = v,
                     .out = out,
                     .lse = lse,
                     .grad_out = grad_out,
                     .grad_q = grad_q,
                     .grad_k = grad_k,
                     .grad_v = grad_v},
                    options, &workspace)
      .or_throw();
  if (std::abs(grad_v(0, 0, 0, 0) - (1 + 1 / 2.f + 1 / 3.f)) > 1e-6f) return 2;

  const onepass::Status refused = onepass::forward({.q = q, .k = k, .v = v, .out = q}, options);
  std::printf("refused: %s\n", refused.text().c_str());
  if (refused.code() != ONEPASS_INVALID_ARGUMENT || refused.text().empty()) return 3;
  std::printf("onepass %s, %zu kernels\n", onepass::version(), onepass::kernels().size());
  return onepass::kernels().empty() ? 4 : 0;
}
