#include "check/abi.h"

#include <algorithm>

namespace onepass::check {
namespace {

DLDataType dl_type(DType dtype) {
  const auto bits = static_cast<std::uint8_t>(8 * dtype_size(dtype));
  return {static_cast<std::uint8_t>(dtype == DType::bf16 ? kDLBfloat : kDLFloat), bits, 1};
}

}  // namespace

AbiCall::AbiCall(Case& c) : pass_(c.spec().pass), packed_(c.spec().varlen()) {
  set_options(c);
  if (pass_ != Pass::backward) {
    forward.options = &options;
    forward.q = operand(c.q);
    forward.k = operand(c.k);
    forward.v = operand(c.v);
    forward.out = operand(c.out);
    forward.lse = rows(c.lse);
    return;
  }
  backward.options = &options;
  backward.q = operand(c.q);
  backward.k = operand(c.k);
  backward.v = operand(c.v);
  backward.out = operand(c.saved_out);
  backward.lse = rows(c.saved_lse);
  backward.grad_out = operand(c.grad_out);
  backward.grad_lse = rows(c.grad_lse);
  backward.grad_q = operand(c.grad_q);
  backward.grad_k = operand(c.grad_k);
  backward.grad_v = operand(c.grad_v);
  backward.grad_bias = bias(c.grad_bias);
  backward.grad_sinks = heads(c.grad_sinks);
}

void AbiCall::set_options(Case& c) {
  const CaseSpec& s = c.spec();
  options.causal = s.causal ? 1 : 0;
  options.align = s.align == Align::top_left ? ONEPASS_TOP_LEFT : ONEPASS_BOTTOM_RIGHT;
  options.window_left = s.window_left;
  options.window_right = s.window_right;
  options.cu_seqlens_q = ints(c.cu_seqlens_q);
  options.cu_seqlens_k = ints(c.cu_seqlens_k);
  options.max_seqlen_q = packed_ ? s.seq_q : 0;
  options.max_seqlen_k = packed_ ? s.seq_k : 0;
  options.q_length = ints(c.q_length);
  options.k_start = ints(c.k_start);
  options.k_length = ints(c.k_length);
  options.q_position = ints(c.q_position);
  options.scale = s.scale;
  options.softcap = s.softcap;
  options.alibi_slopes = heads(c.alibi);
  options.bias = bias(c.bias);
  options.sinks = heads(c.sinks);
  options.dropout_p = s.dropout_p;
  options.dropout_seed = s.dropout_seed;
  options.dropout_offset = s.dropout_offset;
  if (!c.dropout_state.empty()) {
    options.dropout_state = describe(c.dropout_state.data(), {kDLInt, 64, 1}, {2}, {1});
  }
  options.deterministic = s.deterministic;
}

const DLTensor* AbiCall::describe(const void* data, DLDataType type, std::initializer_list<std::int64_t> shape,
                                  std::initializer_list<std::int64_t> stride) {
  Described& described = tensors_.emplace_back();
  std::copy(shape.begin(), shape.end(), described.shape);
  std::copy(stride.begin(), stride.end(), described.stride);
  described.tensor = {const_cast<void*>(data),
                      {kDLCPU, 0},
                      static_cast<std::int32_t>(shape.size()),
                      type,
                      described.shape,
                      described.stride,
                      0};
  return &described.tensor;
}

const DLTensor* AbiCall::operand(const Array& array) {
  if (!array) return nullptr;
  const Index &n = array.size(), &stride = array.stride();
  const DLDataType type = dl_type(array.dtype());
  if (packed_) return describe(array.data(), type, {n[1], n[2], n[3]}, {stride[1], stride[2], stride[3]});
  return describe(array.data(), type, {n[0], n[1], n[2], n[3]}, {stride[0], stride[1], stride[2], stride[3]});
}

const DLTensor* AbiCall::rows(const Array& array) {
  if (!array) return nullptr;
  const Index &n = array.size(), &stride = array.stride();
  const DLDataType type = dl_type(DType::f32);
  if (packed_) return describe(array.data(), type, {n[1], n[2]}, {stride[1], stride[2]});
  return describe(array.data(), type, {n[0], n[1], n[2]}, {stride[0], stride[1], stride[2]});
}

const DLTensor* AbiCall::bias(const Array& array) {
  if (!array) return nullptr;
  const Index &n = array.size(), &stride = array.stride();
  return describe(array.data(), dl_type(array.dtype()), {n[0], n[1], n[2], n[3]},
                  {stride[0], stride[1], stride[2], stride[3]});
}

const DLTensor* AbiCall::heads(const Array& array) {
  if (!array) return nullptr;
  const Index &n = array.size(), &stride = array.stride();
  if (n[0] == 1) return describe(array.data(), dl_type(array.dtype()), {n[1]}, {stride[1]});
  return describe(array.data(), dl_type(array.dtype()), {n[0], n[1]}, {stride[0], stride[1]});
}

const DLTensor* AbiCall::ints(const IntArray& array) {
  if (array.data() == nullptr) return nullptr;
  return describe(array.data(), {kDLInt, 32, 1}, {array.count()}, {1});
}

void AbiCall::move(const DeviceMirror& mirror, int device) {
  for (Described& described : tensors_) {
    described.tensor.data = mirror.at(described.tensor.data);
    described.tensor.device = {kDLCUDA, device};
  }
}

Status AbiCall::run() {
  const bool is_backward = pass_ == Pass::backward;
  const void* args = is_backward ? static_cast<const void*>(&backward) : &forward;
  const onepass_pass_t pass = is_backward ? ONEPASS_BACKWARD : ONEPASS_FORWARD;
  std::size_t size = 0;
  onepass_status_t status = onepass_workspace_size(pass, args, &size);
  std::vector<std::uint64_t> memory(size / 8 + 17, ~std::uint64_t{0});
  if (status == ONEPASS_OK) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    void* workspace = reinterpret_cast<char*>(memory.data()) + (64 - address % 64) % 64;
    (is_backward ? backward.workspace : forward.workspace) = workspace;
    (is_backward ? backward.workspace_size : forward.workspace_size) = size;
    status = is_backward ? onepass_backward(&backward) : onepass_forward(&forward);
  }
  return status == ONEPASS_OK ? Status() : Status(status, onepass_last_error());
}

namespace {

Report run_abi(Case& c, const Reference& reference, const char* kernel, int threads) {
  AbiCall call(c);
  call.options.kernel = kernel;
  call.options.threads = threads;
  Report report =
      c.spec().pass == Pass::backward
          ? check_backward(c, reference, [&](const Problem&, const BackwardOperands&) { return call.run(); })
          : check_forward(c, reference, [&](const Problem&, const ForwardOperands&) { return call.run(); });
  report.name = "C interface, threads=" + std::to_string(threads) + " " + report.name;
  return report;
}

}  // namespace

Report check_abi(Case& c, const Reference& reference, const char* kernel, int threads) {
  return check_draws(c, reference, [&](Case& x, const Reference& r) { return run_abi(x, r, kernel, threads); });
}

}  // namespace onepass::check
