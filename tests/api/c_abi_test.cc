// The C interface: random problems through it, and every refusal, with nothing written.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "check/abi.h"

namespace onepass {
namespace {

using check::AbiCall;
using check::Case;
using check::CaseSpec;

CaseSpec small_spec(Pass pass = Pass::forward) {
  CaseSpec spec;
  spec.pass = pass;
  spec.batch = 2;
  spec.seq_q = 9;
  spec.seq_k = 13;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.head_dim = 16;
  spec.head_dim_v = 24;
  return spec;
}

TEST(CAbi, RandomProblems) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (std::uint64_t seed = 0; seed < 60; ++seed) {
      check::Limits limits;
      limits.pass = pass;
      limits.work = 3e5;
      Case c(check::random_spec(seed + 5000, limits));
      const check::Reference reference(c);
      ASSERT_TRUE(reference.status().ok()) << reference.status().text();
      const check::Report report = check::check_abi(c, reference, nullptr, 2);
      EXPECT_TRUE(report.ok()) << report.text();
    }
  }
}

/// Changes one thing of a good request; the call must refuse it, say `part`, and write nothing.
void expect_refused(const CaseSpec& spec, const std::function<void(AbiCall&)>& change, const char* part,
                    onepass_status_t code = ONEPASS_INVALID_ARGUMENT) {
  Case c(spec);
  AbiCall call(c);
  std::vector<char> workspace(1 << 22, 'w');
  void* aligned = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(workspace.data()) + 63) / 64 * 64);
  call.forward.workspace = call.backward.workspace = aligned;
  call.forward.workspace_size = call.backward.workspace_size = workspace.size() - 64;
  change(call);
  c.reset();
  const std::vector<char> workspace_before = workspace;
  const onepass_status_t status =
      spec.pass == Pass::backward ? onepass_backward(&call.backward) : onepass_forward(&call.forward);
  EXPECT_EQ(status, code) << part << " | " << onepass_last_error();
  const std::string text = onepass_last_error();
  EXPECT_NE(text.find(part), std::string::npos) << "said: " << text << "\nwanted: " << part;
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_EQ(workspace, workspace_before);
  for (const std::string& fault : c.faults()) ADD_FAILURE() << part << ": " << fault;
  const auto expect_untouched = [&](const check::Array& array) {
    bool written = false;
    array.each([&](const check::Index&, std::int64_t offset) { written |= !std::isnan(array.get(offset)); });
    EXPECT_FALSE(written) << part << ": an output was written";
  };
  expect_untouched(spec.pass == Pass::backward ? c.grad_q : c.out);
}

DLTensor& mutate(const DLTensor* tensor) {
  return *const_cast<DLTensor*>(tensor);
}

TEST(CAbi, RefusesBadTensors) {
  const CaseSpec spec = small_spec();
  expect_refused(
      spec, [](AbiCall& a) { a.forward.q = nullptr; }, "q is null");
  expect_refused(
      spec, [](AbiCall& a) { a.forward.out = nullptr; }, "out is null");
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.forward.k).data = nullptr; }, "k: its data pointer is null");
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.forward.k).shape = nullptr; }, "k: its shape is null");
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.forward.v).ndim = 3; }, "v must have 4 dimensions: got 3");
  expect_refused(
      spec,
      [](AbiCall& a) {
        mutate(a.forward.q).dtype = {kDLInt, 8, 1};
      },
      "unknown dtype");
  expect_refused(
      spec,
      [](AbiCall& a) {
        mutate(a.forward.q).dtype = {kDLFloat, 32, 4};
      },
      "unknown dtype");
  expect_refused(
      spec,
      [](AbiCall& a) {
        mutate(a.forward.k).dtype = {kDLInt, 32, 1};
      },
      "k must be float32");
  expect_refused(
      spec,
      [](AbiCall& a) {
        mutate(a.forward.k).dtype = {kDLFloat, 16, 1};
      },
      "k must be of dtype f32");
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.forward.q).shape[1] = -1; }, "got -1");
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.forward.q).strides[3] = 2; }, "stride 1");
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.forward.v).strides[1] = -24; }, "negative strides");
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.forward.v).strides[1] = std::int64_t{1} << 62; }, "2^60");
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.forward.q).byte_offset += 2; }, "off by 2 of 4 bytes");
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.forward.k).shape[2] = 1; }, "v must have shape (2, 13, 1, any)");
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.forward.k).shape[3] = 15; }, "k must have shape (2, 13, 2, 16)");
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.forward.out).shape[3] = 16; }, "out must have shape");
  expect_refused(
      spec,
      [](AbiCall& a) {
        mutate(a.forward.lse).dtype = {kDLFloat, 16, 1};
      },
      "lse must be float32");
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.forward.lse).shape[1] = 9; }, "lse must have shape (2, 4, 9)");
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.forward.out).strides[1] = 0; }, "must not overlap");
  expect_refused(
      spec, [](AbiCall& a) { a.forward.out = a.forward.v; }, "out must have shape");
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.forward.q).device.device_type = kDLCUDA; }, "CPU (1) only", ONEPASS_UNSUPPORTED);
}

TEST(CAbi, RefusesOverlap) {
  CaseSpec spec = small_spec();
  spec.head_dim_v = spec.head_dim;
  spec.seq_q = spec.seq_k;
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.forward.out).data = a.forward.q->data; }, "out overlaps the input q");
  spec.pass = Pass::backward;
  expect_refused(
      spec,
      [](AbiCall& a) {
        mutate(a.backward.grad_k).data = a.backward.grad_v->data;
        mutate(a.backward.grad_k).byte_offset = a.backward.grad_v->byte_offset;
      },
      "grad_v overlaps the output grad_k");
}

TEST(CAbi, RefusesBadOptions) {
  const CaseSpec spec = small_spec();
  const auto option = [&](const std::function<void(onepass_options_t&)>& change, const char* part,
                          onepass_status_t code = ONEPASS_INVALID_ARGUMENT) {
    expect_refused(
        spec, [&](AbiCall& a) { change(a.options); }, part, code);
  };
  option([](auto& o) { o.struct_size = 3; }, "options.struct_size");
  option([](auto& o) { o.causal = 2; }, "causal must be between 0 and 1: got 2");
  option([](auto& o) { o.align = 7; }, "align");
  option([](auto& o) { o.window_left = -5; }, "(-5, -1)");
  option([](auto& o) { o.scale = INFINITY; }, "scale must be finite");
  option([](auto& o) { o.softcap = -1; }, "softcap");
  option([](auto& o) { o.dropout_p = 1.5; }, "dropout_p must be between 0 and 1");
  option([](auto& o) { o.dropout_p = NAN; }, "dropout_p");
  option([](auto& o) { o.dropout_offset = std::uint64_t{1} << 32; }, "dropout_offset");
  option([](auto& o) { o.deterministic = 2; }, "deterministic");
  option([](auto& o) { o.threads = -1; }, "threads");
  option([](auto& o) { o.kernel = "fwd_gpu"; }, "'fwd_gpu'");
  option([](auto& o) { o.kernel = "bwd_cpu_portable"; }, "another pass", ONEPASS_UNSUPPORTED);
  expect_refused(
      spec, [](AbiCall& a) { a.forward.struct_size = 0; }, "args.struct_size");
  CaseSpec big = spec;
  big.head_dim = 1025;
  expect_refused(
      big, [](AbiCall&) {}, "1024", ONEPASS_UNSUPPORTED);
}

TEST(CAbi, RefusesBadLengths) {
  CaseSpec spec = small_spec();
  spec.k_length = {13, 14};
  expect_refused(
      spec, [](AbiCall&) {}, "k_length[1] must be between 0 and 13: got 14");
  spec.k_length = {-1, 3};
  expect_refused(
      spec, [](AbiCall&) {}, "k_length[0]");
  spec = small_spec();
  spec.cu_seqlens_q = {0, 4, 9};
  spec.cu_seqlens_k = {0, 6, 13};
  spec.total_q = 9;
  spec.total_k = 13;
  const auto entry = [&](int index, std::int32_t value) {
    return [=](AbiCall& a) { static_cast<std::int32_t*>(a.options.cu_seqlens_k->data)[index] = value; };
  };
  expect_refused(spec, entry(0, 1), "cu_seqlens_k must start at 0: got 1");
  expect_refused(spec, entry(1, -4), "must not decrease");
  expect_refused(spec, entry(2, 14), "14 of 13");
  expect_refused(
      spec, [](AbiCall& a) { a.options.cu_seqlens_k = nullptr; }, "go together");
  expect_refused(
      spec, [](AbiCall& a) { a.options.max_seqlen_q = 4; }, "declared maximum 4");
  expect_refused(
      spec,
      [](AbiCall& a) {
        mutate(a.options.cu_seqlens_k).dtype = {kDLInt, 64, 1};
      },
      "int32");
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.options.cu_seqlens_k).shape[0] = 2; }, "(3)");
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
