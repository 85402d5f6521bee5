#include "attention.h"

#include <string_view>

namespace onepass::cli {
namespace {

/// A forced kernel belongs to one pass; forwards of few rows may use decode kernels, so those two share.
const char* kernel_for(const std::string& kernel, onepass_pass_t pass) {
  if (kernel.empty()) return nullptr;
  for (std::int32_t i = 0; i < onepass_kernel_count(); ++i) {
    onepass_kernel_info_t info = ONEPASS_KERNEL_INFO_INIT;
    if (onepass_kernel_info(i, &info) != ONEPASS_OK || kernel != info.name) continue;
    return (info.pass == ONEPASS_BACKWARD) == (pass == ONEPASS_BACKWARD) ? kernel.c_str() : nullptr;
  }
  return kernel.c_str();  // unknown: the library says so
}

}  // namespace

Status status_of(onepass_status_t code) {
  if (code == ONEPASS_OK) return {};
  const char* text = onepass_last_error();
  return {code, *text != '\0' ? text : onepass_status_string(code)};
}

std::vector<std::int64_t> Attention::out_shape() const {
  std::vector<std::int64_t> shape = q.shape();
  if (!shape.empty() && v.rank() > 0) shape.back() = v.shape().back();
  return shape;
}

std::vector<std::int64_t> Attention::lse_shape() const {
  if (q.rank() == 3) return {q.size(1), q.size(0)};
  return q.rank() == 4 ? std::vector<std::int64_t>{q.size(0), q.size(2), q.size(1)} : std::vector<std::int64_t>{};
}

Status Attention::allocate_outputs(onepass_pass_t pass) {
  const auto make = [](Array& target, ElementType type, std::vector<std::int64_t> shape) -> Status {
    ONEPASS_ASSIGN(target, Array::allocate(type, std::move(shape)));
    return {};
  };
  if (pass != ONEPASS_BACKWARD) {
    ONEPASS_RETURN_IF_ERROR(make(out, q.type(), out_shape()));
    return make(lse, ElementType::f32, lse_shape());
  }
  ONEPASS_RETURN_IF_ERROR(make(grad_q, q.type(), q.shape()));
  ONEPASS_RETURN_IF_ERROR(make(grad_k, k.type(), k.shape()));
  ONEPASS_RETURN_IF_ERROR(make(grad_v, v.type(), v.shape()));
  if (bias) ONEPASS_RETURN_IF_ERROR(make(grad_bias, ElementType::f32, bias.shape()));
  if (sinks) ONEPASS_RETURN_IF_ERROR(make(grad_sinks, ElementType::f32, sinks.shape()));
  return {};
}

void Attention::plan_outputs(onepass_pass_t pass) {
  out = Array::planned(q.type(), out_shape());
  lse = Array::planned(ElementType::f32, lse_shape());
  if (pass != ONEPASS_BACKWARD) return;
  grad_out = Array::planned(q.type(), out_shape());
  grad_q = Array::planned(q.type(), q.shape());
  grad_k = Array::planned(k.type(), k.shape());
  grad_v = Array::planned(v.type(), v.shape());
}

Result<nlohmann::ordered_json> Attention::explain(onepass_pass_t pass) const {
  const Call call(*this, pass);
  std::size_t length = 0;
  ONEPASS_RETURN_IF_ERROR(status_of(onepass_explain(pass, call.args(), nullptr, 0, &length)));
  std::string text(length + 1, '\0');
  ONEPASS_RETURN_IF_ERROR(status_of(onepass_explain(pass, call.args(), text.data(), text.size(), &length)));
  text.resize(length);
  nlohmann::ordered_json json = nlohmann::ordered_json::parse(text, nullptr, false);
  if (json.is_discarded()) return device_error("onepass_explain wrote something that is not JSON");
  return json;
}

Call::Call(const Attention& a, onepass_pass_t which) : pass(which) {
  options.causal = a.causal ? 1 : 0;
  options.align = a.align;
  options.window_left = a.window_left;
  options.window_right = a.window_right;
  options.cu_seqlens_q = a.cu_seqlens_q.dl();
  options.cu_seqlens_k = a.cu_seqlens_k.dl();
  options.max_seqlen_q = a.max_seqlen_q;
  options.max_seqlen_k = a.max_seqlen_k;
  options.q_length = a.q_length.dl();
  options.k_start = a.k_start.dl();
  options.k_length = a.k_length.dl();
  options.q_position = a.q_position.dl();
  options.scale = a.scale;
  options.softcap = a.softcap;
  options.alibi_slopes = a.alibi.dl();
  options.bias = a.bias.dl();
  options.sinks = a.sinks.dl();
  options.deterministic = a.deterministic;
  options.threads = a.threads;
  options.kernel = kernel_for(a.kernel, pass);

  forward.options = backward.options = decode.options = &options;
  forward.q = backward.q = decode.q = a.q.dl();
  forward.k = backward.k = decode.k_cache = a.k.dl();
  forward.v = backward.v = decode.v_cache = a.v.dl();
  forward.out = backward.out = decode.out = a.out.dl();
  forward.lse = backward.lse = decode.lse = a.lse.dl();
  backward.grad_out = a.grad_out.dl();
  backward.grad_q = a.grad_q.dl();
  backward.grad_k = a.grad_k.dl();
  backward.grad_v = a.grad_v.dl();
  backward.grad_bias = a.grad_bias.dl();
  backward.grad_sinks = a.grad_sinks.dl();
  decode.cache_seqlens = a.cache_seqlens.dl();
}

const void* Call::args() const {
  switch (pass) {
    case ONEPASS_BACKWARD: return &backward;
    case ONEPASS_DECODE: return &decode;
    default: return &forward;
  }
}

Status Runner::prepare(const Attention& attention, onepass_pass_t pass) {
  call_ = std::make_unique<Call>(attention, pass);
  std::size_t size = 0;
  ONEPASS_RETURN_IF_ERROR(status_of(onepass_workspace_size(pass, call_->args(), &size)));
  if (static_cast<double>(size) < memory_available()) workspace_ = aligned_memory(size);
  if (workspace_ == nullptr) return no_memory(static_cast<double>(size), "the workspace");
  call_->forward.workspace = call_->backward.workspace = call_->decode.workspace = workspace_.get();
  call_->forward.workspace_size = call_->backward.workspace_size = call_->decode.workspace_size = size;
  return {};
}

Status Runner::run() const {
  switch (call_->pass) {
    case ONEPASS_BACKWARD: return status_of(onepass_backward(&call_->backward));
    case ONEPASS_DECODE: return status_of(onepass_decode(&call_->decode));
    default: return status_of(onepass_forward(&call_->forward));
  }
}

}  // namespace onepass::cli
