// The C interface: random problems through it, workspace, struct sizes, explain, the kernel list, errors.
#include <gtest/gtest.h>

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "api/refusal.h"
#include "kit/kit.h"

namespace onepass {
namespace {

TEST(CAbi, RandomProblems) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (std::uint64_t seed = 0; seed < 60; ++seed) {
      check::Limits limits;
      limits.pass = pass;
      limits.work = 3e5;
      const CaseSpec spec = check::random_spec(seed + 5000, limits);
      if (!kit::chosen(spec)) continue;
      Case c(spec);
      const check::Reference reference(c);
      ASSERT_TRUE(reference.status().ok()) << reference.status().text();
      const check::Report report = check::check_abi(c, reference, nullptr, 2);
      EXPECT_TRUE(report.ok()) << report.text();
    }
  }
}

TEST(CAbi, WorkspaceIsAskedForAndChecked) {
  CaseSpec spec = small_spec();
  Case c(spec);
  AbiCall call(c);
  std::size_t bytes = 0;
  ASSERT_EQ(onepass_workspace_size(ONEPASS_FORWARD, &call.forward, &bytes), ONEPASS_OK) << onepass_last_error();
  ASSERT_GT(bytes, 0u);
  expect_refused(
      spec, [&](AbiCall& a) { a.forward.workspace_size = bytes - 1; }, "bytes, got");
  expect_refused(
      spec, [&](AbiCall& a) { a.forward.workspace = nullptr; }, "got 0");
  expect_refused(
      spec, [&](AbiCall& a) { a.forward.workspace = static_cast<char*>(a.forward.workspace) + 8; }, "64-byte aligned");
  EXPECT_EQ(onepass_workspace_size(ONEPASS_FORWARD, &call.forward, nullptr), ONEPASS_INVALID_ARGUMENT);
  EXPECT_EQ(onepass_workspace_size(ONEPASS_FORWARD, nullptr, &bytes), ONEPASS_INVALID_ARGUMENT);
  EXPECT_EQ(onepass_workspace_size(static_cast<onepass_pass_t>(9), &call.forward, &bytes), ONEPASS_INVALID_ARGUMENT);
}

TEST(CAbi, AMaximumFarAboveTheTokensCostsNothing) {
  // Neither memory nor time: a bias that broadcasts has a gradient that sums over all that is declared.
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
      CaseSpec spec = small_spec(pass);
      spec.dtype = dtype;
      spec.bias = true;
      spec.bias_broadcast = {true, true, true, true};
      spec.cu_seqlens_q = {0, 4, 9};
      spec.cu_seqlens_k = {0, 6, 13};
      spec.total_q = 9;
      spec.total_k = 13;
      Case c(spec);
      const check::Reference reference(c);
      ASSERT_TRUE(reference.status().ok()) << reference.status().text();
      const check::Report report = check::check_draws(c, reference, [&](Case& drawn, const check::Reference& exact) {
        const auto run = [&](const auto&...) {
          AbiCall call(drawn);
          call.options.max_seqlen_q = call.options.max_seqlen_k = INT32_MAX;
          return call.run();
        };
        return pass == Pass::forward ? check::check_forward(drawn, exact, run)
                                     : check::check_backward(drawn, exact, run);
      });
      EXPECT_TRUE(report.ok()) << report.text();
    }
  }
}

TEST(CAbi, StridesOfAnEmptyTensorDoNotMatter) {
  // What frameworks write there differs; a gradient expanded from a scalar has zeros.
  CaseSpec spec = small_spec();
  spec.batch = 0;
  Case c(spec);
  AbiCall call(c);
  for (const DLTensor* tensor : {call.forward.q, call.forward.k, call.forward.v, call.forward.out}) {
    for (int i = 0; i < 4; ++i) mutate(tensor).strides[i] = i - 2;
  }
  const Status status = call.run();
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST(CAbi, OldAndNewStructSizes) {
  // A caller built against a later header passes a larger struct, one against an earlier a smaller: both are read.
  Case c(small_spec());
  AbiCall call(c);
  struct Later {
    onepass_forward_args_t args;
    char more[64];
  } later{call.forward, {}};
  later.args.struct_size = sizeof later;
  std::size_t bytes = 0, same = 0;
  ASSERT_EQ(onepass_workspace_size(ONEPASS_FORWARD, &later, &bytes), ONEPASS_OK) << onepass_last_error();
  onepass_forward_args_t earlier = call.forward;
  earlier.struct_size = offsetof(onepass_forward_args_t, workspace);
  ASSERT_EQ(onepass_workspace_size(ONEPASS_FORWARD, &earlier, &same), ONEPASS_OK);
  EXPECT_EQ(bytes, same);
}

TEST(CAbi, ExplainIsJson) {
  Case c(small_spec());
  AbiCall call(c);
  std::size_t length = 0;
  ASSERT_EQ(onepass_explain(ONEPASS_FORWARD, &call.forward, nullptr, 0, &length), ONEPASS_OK);
  std::string text(length + 1, 'x');
  ASSERT_EQ(onepass_explain(ONEPASS_FORWARD, &call.forward, text.data(), text.size(), &length), ONEPASS_OK);
  text.resize(length);
  const auto json = nlohmann::json::parse(text);
  EXPECT_EQ(json["visible_pairs"], 2 * 9 * 13);
  EXPECT_EQ(json["flops"], 2.0 * 2 * 9 * 13 * 4 * (16 + 24));
  EXPECT_NE(find_kernel(json["kernel"].get<std::string>()), nullptr);
  char cut[8];
  ASSERT_EQ(onepass_explain(ONEPASS_FORWARD, &call.forward, cut, sizeof cut, &length), ONEPASS_OK);
  EXPECT_EQ(std::string(cut), text.substr(0, 7));
}

TEST(CAbi, ExplainNeedsNoData) {
  Case c(small_spec());
  AbiCall call(c);
  for (const DLTensor* tensor : {call.forward.q, call.forward.k, call.forward.v}) mutate(tensor).data = nullptr;
  call.forward.out = call.forward.lse = nullptr;
  std::size_t length = 0;
  EXPECT_EQ(onepass_explain(ONEPASS_FORWARD, &call.forward, nullptr, 0, &length), ONEPASS_OK) << onepass_last_error();
}

TEST(CAbi, KernelList) {
  ASSERT_EQ(onepass_kernel_count(), static_cast<std::int32_t>(kernels().size()));
  for (std::int32_t i = 0; i < onepass_kernel_count(); ++i) {
    onepass_kernel_info_t info = ONEPASS_KERNEL_INFO_INIT;
    ASSERT_EQ(onepass_kernel_info(i, &info), ONEPASS_OK);
    EXPECT_STREQ(info.name, kernels()[static_cast<std::size_t>(i)].name);
    EXPECT_NE(std::string(info.dtypes), "");
  }
  onepass_kernel_info_t info = ONEPASS_KERNEL_INFO_INIT;
  EXPECT_EQ(onepass_kernel_info(-1, &info), ONEPASS_INVALID_ARGUMENT);
  EXPECT_EQ(onepass_kernel_info(onepass_kernel_count(), &info), ONEPASS_INVALID_ARGUMENT);
  EXPECT_EQ(onepass_kernel_info(0, nullptr), ONEPASS_INVALID_ARGUMENT);
}

TEST(CAbi, ManyEmptySequencesTakeNoTime) {
  // A file of 200 bytes can say so: no loop may run over what holds no element.
  const std::int64_t many = std::int64_t{1} << 40;
  for (const bool heads : {false, true}) {
    std::int64_t shape[4] = {heads ? 1 : many, 0, heads ? many : 1, 16}, lse_shape[3] = {shape[0], shape[2], 0};
    float nothing = 0;
    DLTensor tensor{&nothing, {kDLCPU, 0}, 4, {kDLFloat, 32, 1}, shape, nullptr, 0}, lse = tensor;
    lse.ndim = 3;
    lse.shape = lse_shape;
    onepass_forward_args_t forward = ONEPASS_FORWARD_ARGS_INIT;
    forward.q = forward.k = forward.v = forward.out = &tensor;
    forward.lse = &lse;
    onepass_backward_args_t backward = ONEPASS_BACKWARD_ARGS_INIT;
    backward.q = backward.k = backward.v = backward.out = backward.grad_out = &tensor;
    backward.grad_q = backward.grad_k = backward.grad_v = &tensor;
    backward.lse = &lse;
    // Sums over rows that there are none of are 0.
    std::int64_t one = 1, ones[4] = {1, 1, 1, 1};
    float sink = 0, zeros[2] = {NAN, NAN}, shift = 0;
    const DLTensor sinks{&sink, {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, &one, nullptr, 0};
    const DLTensor bias{&shift, {kDLCPU, 0}, 4, {kDLFloat, 32, 1}, ones, nullptr, 0};
    DLTensor grad_sinks = sinks, grad_bias = bias;
    grad_sinks.data = &zeros[0], grad_bias.data = &zeros[1];
    if (!heads) backward.grad_sinks = &grad_sinks, backward.grad_bias = &grad_bias;
    const auto run = [&](onepass_pass_t pass, auto& args, auto call) {
      std::size_t bytes = 0;
      ASSERT_EQ(onepass_workspace_size(pass, &args, &bytes), ONEPASS_OK) << onepass_last_error();
      ASSERT_LT(bytes, std::size_t{1} << 28);
      std::vector<char> workspace(bytes + 64);
      args.workspace = workspace.data() + (64 - reinterpret_cast<std::uintptr_t>(workspace.data()) % 64) % 64;
      args.workspace_size = bytes;
      EXPECT_EQ(call(&args), ONEPASS_OK) << onepass_last_error();
    };
    for (const Kernel& kernel : kernels()) {
      const bool takes_f32 = (kernel.dtypes >> static_cast<int>(DType::f32) & 1u) != 0;
      if (!can_run(kernel, this_cpu()) || !takes_f32 || kernel.pass == Pass::decode) continue;
      onepass_options_t options = ONEPASS_OPTIONS_INIT;
      options.kernel = kernel.name;
      if (!heads) options.sinks = &sinks, options.bias = &bias;
      forward.options = backward.options = &options;
      zeros[0] = zeros[1] = NAN;
      if (kernel.pass == Pass::forward) run(ONEPASS_FORWARD, forward, onepass_forward);
      if (kernel.pass == Pass::backward) {
        run(ONEPASS_BACKWARD, backward, onepass_backward);
        EXPECT_TRUE(heads || (zeros[0] == 0 && zeros[1] == 0)) << kernel.name;
      }
    }
  }
}

TEST(CAbi, ErrorsBelongToTheirThread) {
  EXPECT_EQ(onepass_forward(nullptr), ONEPASS_INVALID_ARGUMENT);
  const std::string mine = onepass_last_error();
  EXPECT_NE(mine, "");
  std::thread([] {
    EXPECT_STREQ(onepass_last_error(), "");
    EXPECT_EQ(onepass_merge(nullptr), ONEPASS_INVALID_ARGUMENT);
  }).join();
  EXPECT_EQ(onepass_last_error(), mine);
  EXPECT_STREQ(onepass_status_string(ONEPASS_UNSUPPORTED), "unsupported");
  EXPECT_STREQ(onepass_version(), "0.1.0");
}

}  // namespace
}  // namespace onepass
