// Attention from C++: forward, backward, and what ran.
//
//   g++ -std=c++20 examples/attention.cc $(pkg-config --cflags --libs onepass)
#include <cstdint>
#include <cstdio>
#include <onepass/onepass.hpp>

namespace {

/// A tensor of pseudo-random values in [-1, 1).
onepass::Tensor<float> values(std::int64_t seq, std::int64_t heads, std::int64_t dim, std::uint32_t seed) {
  onepass::Tensor<float> t({1, seq, heads, dim});
  for (std::int64_t i = 0; i < seq * heads * dim; ++i) {
    seed = seed * 1664525u + 1013904223u;
    t.data()[i] = static_cast<float>(seed >> 8) / static_cast<float>(1 << 23) - 1;
  }
  return t;
}

}  // namespace

int main() {
  const std::int64_t seq = 512, heads_q = 8, heads_kv = 2, dim = 64;
  auto q = values(seq, heads_q, dim, 1), k = values(seq, heads_kv, dim, 2), v = values(seq, heads_kv, dim, 3);
  onepass::Tensor<float> out({1, seq, heads_q, dim}), lse({1, heads_q, seq});
  const onepass::Options options{.causal = true};
  onepass::forward({.q = q, .k = k, .v = v, .out = out, .lse = lse}, options).or_throw();
  std::printf("out[0] %.6f, lse of the last row %.6f\n", static_cast<double>(out.data()[0]),
              static_cast<double>(lse.data()[heads_q * seq - 1]));

  onepass::Tensor<float> grad_q({1, seq, heads_q, dim}), grad_k({1, seq, heads_kv, dim}),
      grad_v({1, seq, heads_kv, dim});
  onepass::backward({.q = q,
                     .k = k,
                     .v = v,
                     .out = out,
                     .lse = lse,
                     .grad_out = out,
                     .grad_q = grad_q,
                     .grad_k = grad_k,
                     .grad_v = grad_v},
                    options)
      .or_throw();
  std::printf("grad_v[0] %.6f\n", static_cast<double>(grad_v.data()[0]));
}
