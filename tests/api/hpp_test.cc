// The C++ face: what it passes on, what it allocates, what it returns. Numbers are the C interface's business.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "onepass/onepass.hpp"

namespace {

using onepass::Tensor;
using onepass::View;

constexpr float kInf = std::numeric_limits<float>::infinity();

/// A small problem with every operand of a forward and backward call.
struct Small {
  Tensor<float> q{{2, 3, 4, 8}}, k{{2, 5, 2, 8}}, v{{2, 5, 2, 6}}, out{{2, 3, 4, 6}}, lse{{2, 4, 3}};
  Tensor<float> grad_out{{2, 3, 4, 6}}, grad_q{{2, 3, 4, 8}}, grad_k{{2, 5, 2, 8}}, grad_v{{2, 5, 2, 6}};

  Small() {
    int seed = 1;
    for (Tensor<float>* t : {&q, &k, &v, &grad_out}) {
      for (float& x : *t) x = static_cast<float>((seed = seed * 75 % 65537) - 32768) / 32768;
    }
  }
  onepass::Forward forward() const { return {.q = q, .k = k, .v = v, .out = out, .lse = lse}; }
  onepass::Backward backward() const {
    return {.q = q,
            .k = k,
            .v = v,
            .out = out,
            .lse = lse,
            .grad_out = grad_out,
            .grad_q = grad_q,
            .grad_k = grad_k,
            .grad_v = grad_v};
  }
};

TEST(Hpp, ViewDescribesCompactAndStridedArrays) {
  float data[64] = {};
  const View compact(data, {2, 3, 4});
  EXPECT_EQ(compact.dims(), 3);
  EXPECT_EQ(compact.stride(0), 12);
  EXPECT_EQ(compact.stride(2), 1);
  const View strided(data, {2, 3, 4}, {4, 16, 1});
  EXPECT_EQ(strided.stride(1), 16);
  const View copy = strided;  // a descriptor points into the view it came from
  const DLTensor t = copy.descriptor();
  EXPECT_EQ(t.data, data);
  EXPECT_EQ(t.ndim, 3);
  EXPECT_EQ(t.strides[1], 16);
  EXPECT_EQ(t.dtype.bits, 32);
  EXPECT_TRUE(copy);
  EXPECT_FALSE(View());
}

TEST(Hpp, StridesAreOneADimension) {
  float x[8] = {};
  EXPECT_THROW(View(x, {2, 2, 2}, {4, 2}), std::invalid_argument);  // never taken for compact
  EXPECT_THROW(View(x, {2, 2}, {4, 2, 1}), std::invalid_argument);
  EXPECT_EQ(View(x, {2, 2}, {4, 1}).stride(0), 4);
}

TEST(Hpp, TensorIndexesRowMajor) {
  Tensor<std::int32_t> t({2, 3, 4});
  std::iota(t.begin(), t.end(), 0);
  EXPECT_EQ(t(1, 2, 3), 23);
  EXPECT_EQ(t(0, 1, 0), 4);
  EXPECT_EQ(Tensor<float>({3, 0, 2}).size(), 0u);
}

TEST(Hpp, EveryOptionReachesC) {
  Tensor<std::int32_t> lengths({2});
  Tensor<float> floats({2});
  Tensor<std::int64_t> state({2});
  int stream = 0;
  const onepass::Options o{.causal = true,
                           .align = onepass::Align::top_left,
                           .window_left = 3,
                           .window_right = 4,
                           .cu_seqlens_q = lengths,
                           .cu_seqlens_k = lengths,
                           .max_seqlen_q = 5,
                           .max_seqlen_k = 6,
                           .q_length = lengths,
                           .k_start = lengths,
                           .k_length = lengths,
                           .q_position = lengths,
                           .scale = 0.5,
                           .softcap = 7,
                           .alibi_slopes = floats,
                           .bias = floats,
                           .sinks = floats,
                           .dropout_p = 0.25,
                           .dropout_seed = 8,
                           .dropout_offset = 9,
                           .dropout_state = state,
                           .deterministic = true,
                           .validate = true,
                           .threads = 10,
                           .kernel = "k",
                           .stream = &stream};
  const onepass::detail::COptions options(o);
  const onepass_options_t& c = options.c;
  EXPECT_EQ(c.struct_size, sizeof c);
  EXPECT_EQ(c.causal, 1);
  EXPECT_EQ(c.align, ONEPASS_TOP_LEFT);
  EXPECT_EQ(c.window_left, 3);
  EXPECT_EQ(c.window_right, 4);
  EXPECT_EQ(c.max_seqlen_q, 5);
  EXPECT_EQ(c.max_seqlen_k, 6);
  for (const DLTensor* t : {c.cu_seqlens_q, c.cu_seqlens_k, c.q_length, c.k_start, c.k_length, c.q_position}) {
    EXPECT_EQ(t->data, lengths.data());
  }
  for (const DLTensor* t : {c.alibi_slopes, c.bias, c.sinks}) EXPECT_EQ(t->data, floats.data());
  EXPECT_EQ(c.dropout_state->data, state.data());
  EXPECT_EQ(c.scale, 0.5);
  EXPECT_EQ(c.softcap, 7);
  EXPECT_EQ(c.dropout_p, 0.25);
  EXPECT_EQ(c.dropout_seed, 8u);
  EXPECT_EQ(c.dropout_offset, 9u);
  EXPECT_EQ(c.deterministic, 1);
  EXPECT_EQ(c.validate, 1);
  EXPECT_EQ(c.threads, 10);
  EXPECT_STREQ(c.kernel, "k");
  EXPECT_EQ(c.stream, &stream);
}

TEST(Hpp, DefaultOptionsAreTheCDefaults) {
  const onepass::detail::COptions options{onepass::Options{}};
  onepass_options_t c = options.c;
  const onepass_options_t expected = ONEPASS_OPTIONS_INIT;
  EXPECT_TRUE(std::isnan(c.scale));
  c.scale = expected.scale;
  EXPECT_EQ(std::memcmp(&c, &expected, sizeof c), 0);
}

TEST(Hpp, WorkspaceGrowsAndIsReused) {
  Small s;
  onepass::Workspace workspace;
  std::size_t bytes = 0;
  ASSERT_TRUE(onepass::workspace_size(s.backward(), {}, &bytes));
  onepass::forward(s.forward(), {}, &workspace).or_throw();
  onepass::backward(s.backward(), {}, &workspace).or_throw();
  EXPECT_GE(workspace.size(), bytes);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(workspace.data()) % 64, 0u);
  const void* const before = workspace.data();
  onepass::backward(s.backward(), {}, &workspace).or_throw();
  EXPECT_EQ(workspace.data(), before);

  const Tensor<float> grad_q = s.grad_q;
  for (float& x : s.grad_q) x = kInf;
  onepass::backward(s.backward()).or_throw();  // with a workspace of its own
  EXPECT_TRUE(std::equal(grad_q.begin(), grad_q.end(), s.grad_q.begin()));
}

TEST(Hpp, BorrowedWorkspaceIsNeverGrown) {
  Small s;
  onepass::forward(s.forward()).or_throw();
  std::size_t bytes = 0;
  ASSERT_TRUE(onepass::workspace_size(s.backward(), {}, &bytes));
  ASSERT_GT(bytes, 0u);
  alignas(64) std::byte memory[64];
  onepass::Workspace small(memory, 0);
  const onepass::Status status = onepass::backward(s.backward(), {}, &small);
  EXPECT_EQ(status.code(), ONEPASS_INVALID_ARGUMENT);
  EXPECT_NE(status.text().find("workspace"), std::string::npos) << status.text();
}

TEST(Hpp, DecodeAppendsAndMergeJoins) {
  Small s;
  Tensor<std::int32_t> none({2});
  Tensor<float> k_cache({2, 5, 2, 8}), v_cache({2, 5, 2, 6}), out({2, 3, 4, 6});
  onepass::decode(
      {.q = s.q, .k_cache = k_cache, .v_cache = v_cache, .cache_seqlens = none, .out = out, .k_new = s.k, .v_new = s.v},
      {.causal = true})
      .or_throw();
  EXPECT_TRUE(std::equal(s.k.begin(), s.k.end(), k_cache.begin()));
  onepass::forward(s.forward(), {.causal = true}).or_throw();  // a cache's queries are its last tokens
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], s.out[i], 1e-5f) << i;

  Tensor<float> empty({2, 3, 4, 6}), empty_lse({2, 4, 3}), merged({2, 3, 4, 6}), merged_lse({2, 4, 3});
  for (float& x : empty_lse) x = -kInf;
  onepass::merge({.out_a = empty, .lse_a = empty_lse, .out_b = s.out, .lse_b = s.lse, .out = merged, .lse = merged_lse})
      .or_throw();
  EXPECT_TRUE(std::equal(s.out.begin(), s.out.end(), merged.begin()));
}

TEST(Hpp, FailuresCarryTheirText) {
  Small s;
  const onepass::Forward odd{.q = s.q, .k = s.k, .v = s.v, .out = s.k};
  const onepass::Status status = onepass::forward(odd);
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), ONEPASS_INVALID_ARGUMENT);
  EXPECT_FALSE(status.text().empty());
  try {
    status.or_throw();
    FAIL() << "nothing thrown";
  } catch (const onepass::Error& error) {
    EXPECT_EQ(error.code(), ONEPASS_INVALID_ARGUMENT);
    EXPECT_EQ(error.what(), status.text());
  }
  EXPECT_EQ(onepass::forward({}).code(), ONEPASS_INVALID_ARGUMENT);  // operands left out
  onepass::forward(s.forward()).or_throw();
  EXPECT_EQ(onepass::Status(ONEPASS_OUT_OF_MEMORY).text(), "out of memory");  // the library has no memory for a line
}

TEST(Hpp, ExplainAndTheKernelList) {
  Small s;
  std::string json;
  onepass::explain(s.forward(), {.kernel = "fwd_cpu_oracle"}, &json).or_throw();
  EXPECT_NE(json.find("fwd_cpu_oracle"), std::string::npos) << json;
  EXPECT_EQ(json.find('\0'), std::string::npos);
  EXPECT_EQ(onepass::kernels().size(), static_cast<std::size_t>(onepass_kernel_count()));
  EXPECT_STREQ(onepass::version(), onepass_version());
}

}  // namespace
