// Every refusal of the C interface: code, text, and nothing written.
#include "api/refusal.h"

namespace onepass {
namespace {

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
      spec, [](AbiCall& a) { mutate(a.forward.v).ndim = 3; },
      "v must have 4 dimensions (batch, seq, heads, dim): got 3; packed sequences need cu_seqlens");
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
      spec, [](AbiCall& a) { mutate(a.forward.k).shape[2] = 1; }, "v must have shape (2, 13, 1, 24)");
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
  // A queue in the workspace that results overwrite would hand out tasks for ever. What lies behind `out` in memory,
  // and is named first if the workspace reaches it, is the allocator's choice.
  expect_refused(
      spec,
      [](AbiCall& a) {
        auto out = reinterpret_cast<std::uintptr_t>(a.forward.out->data) + a.forward.out->byte_offset;
        a.forward.workspace = reinterpret_cast<void*>(out / 64 * 64);
      },
      "workspace overlaps the ");
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
  for (const std::size_t size : {std::size_t{3}, offsetof(onepass_options_t, kernel) + 4, sizeof(onepass_options_t) - 1,
                                 sizeof(onepass_options_t) + 1}) {
    option([size](auto& o) { o.struct_size = size; }, "options.struct_size");  // would cut a field in two
  }
  option([](auto& o) { o.causal = 2; }, "causal must be between 0 and 1: got 2");
  option([](auto& o) { o.align = 7; }, "align");
  option([](auto& o) { o.window_left = -5; }, "(-5, -1)");
  option([](auto& o) { o.scale = INFINITY; }, "scale must be between");
  option([](auto& o) { o.softcap = -1; }, "softcap");
  option([](auto& o) { o.dropout_p = 1.5; }, "dropout_p must be between 0 and 1");
  option([](auto& o) { o.dropout_p = NAN; }, "dropout_p");
  option([](auto& o) { o.dropout_offset = std::uint64_t{1} << 32; }, "dropout_offset");
  for (const std::int64_t offset : {std::int64_t{-1}, std::int64_t{1} << 32}) {
    std::int64_t state[2] = {7, offset}, two = 2;
    const DLTensor tensor{state, {kDLCPU, 0}, 1, {kDLInt, 64, 1}, &two, nullptr, 0};
    option([&](auto& o) { o.dropout_p = 0.5, o.dropout_state = &tensor; }, "dropout_state[1], the offset,");
  }
  option([](auto& o) { o.deterministic = 2; }, "deterministic");
  option([](auto& o) { o.threads = -1; }, "threads");
  option([](auto& o) { o.kernel = "fwd_gpu"; }, "'fwd_gpu'");
  option([](auto& o) { o.kernel = "bwd_cpu_portable"; }, "another pass", ONEPASS_UNSUPPORTED);
  for (const std::size_t size : {0, 9, 12, 20}) {
    expect_refused(
        spec, [size](AbiCall& a) { a.forward.struct_size = size; }, "args.struct_size");
  }
  CaseSpec big = spec;
  big.head_dim = 1025;
  expect_refused(
      big, [](AbiCall&) {}, "1024", ONEPASS_UNSUPPORTED);
}

TEST(CAbi, RefusesABiasGradientThatOverlapsItself) {
  CaseSpec spec = small_spec(Pass::backward);
  spec.bias = true;
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.backward.grad_bias).strides[2] = 0; }, "grad_bias");
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
      spec, [](AbiCall& a) { a.options.max_seqlen_q = std::int64_t{INT32_MAX} + 1; }, "between 0 and 2147483647");
  expect_refused(
      spec,
      [](AbiCall& a) {
        mutate(a.options.cu_seqlens_k).dtype = {kDLInt, 64, 1};
      },
      "int32");
  expect_refused(
      spec, [](AbiCall& a) { mutate(a.options.cu_seqlens_k).shape[0] = 2; }, "(3)");
}

}  // namespace
}  // namespace onepass
