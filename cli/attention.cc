#include "attention.h"

#include <chrono>
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
  const auto tensor = [&](const Array& array) -> const DLTensor* {
    const DLTensor* given = array.dl();
    if (given == nullptr || !a.on_device) return given;
    DLTensor& placed = placed_.emplace_back(*given);
    placed.device = {kDLCUDA, 0};
    return &placed;
  };
  options.causal = a.causal ? 1 : 0;
  options.align = a.align;
  options.window_left = a.window_left;
  options.window_right = a.window_right;
  options.cu_seqlens_q = tensor(a.cu_seqlens_q);
  options.cu_seqlens_k = tensor(a.cu_seqlens_k);
  options.max_seqlen_q = a.max_seqlen_q;
  options.max_seqlen_k = a.max_seqlen_k;
  options.q_length = tensor(a.q_length);
  options.k_start = tensor(a.k_start);
  options.k_length = tensor(a.k_length);
  options.q_position = tensor(a.q_position);
  options.scale = a.scale;
  options.softcap = a.softcap;
  options.alibi_slopes = tensor(a.alibi);
  options.bias = tensor(a.bias);
  options.sinks = tensor(a.sinks);
  options.deterministic = a.deterministic;
  options.threads = a.threads;
  options.kernel = kernel_for(a.kernel, pass);

  forward.options = backward.options = decode.options = &options;
  forward.q = backward.q = decode.q = tensor(a.q);
  forward.k = backward.k = decode.k_cache = tensor(a.k);
  forward.v = backward.v = decode.v_cache = tensor(a.v);
  forward.out = backward.out = decode.out = tensor(a.out);
  forward.lse = backward.lse = decode.lse = tensor(a.lse);
  backward.grad_out = tensor(a.grad_out);
  backward.grad_q = tensor(a.grad_q);
  backward.grad_k = tensor(a.grad_k);
  backward.grad_v = tensor(a.grad_v);
  backward.grad_bias = tensor(a.grad_bias);
  backward.grad_sinks = tensor(a.grad_sinks);
  decode.cache_seqlens = tensor(a.cache_seqlens);
}

const void* Call::args() const {
  switch (pass) {
    case ONEPASS_BACKWARD: return &backward;
    case ONEPASS_DECODE: return &decode;
    default: return &forward;
  }
}

std::vector<check::Block> Call::blocks() const {
  std::vector<check::Block> list;
  for (const DLTensor& tensor : placed_) {
    std::size_t bytes = tensor.dtype.bits / 8u;
    for (int i = 0; i < tensor.ndim; ++i) bytes *= static_cast<std::size_t>(tensor.shape[i]);
    if (tensor.data != nullptr && bytes > 0) list.push_back({tensor.data, bytes});
  }
  return list;
}

void Call::move(const std::function<void*(void*)>& place) {
  for (DLTensor& tensor : placed_) tensor.data = place(tensor.data);
}

Status Runner::prepare(const Attention& attention, onepass_pass_t pass,
                       std::shared_ptr<const check::DeviceMirror> shared) {
  call_ = std::make_unique<Call>(attention, pass);
  std::size_t size = 0;
  ONEPASS_RETURN_IF_ERROR(status_of(onepass_workspace_size(pass, call_->args(), &size)));
  if (attention.on_device) {
    workspace_ = check::device_memory(size);
    shared_ = std::move(shared);
    std::vector<check::Block> blocks = call_->blocks();
    if (shared_) std::erase_if(blocks, [&](const check::Block& block) { return shared_->holds(block.data); });
    own_ = std::make_shared<check::DeviceMirror>(blocks);
    ONEPASS_RETURN_IF_ERROR(own_->status());
    call_->move([&](void* host) { return own_->holds(host) || !shared_ ? own_->at(host) : shared_->at(host); });
  } else if (static_cast<double>(size) < memory_available()) {
    workspace_ = aligned_memory(size);
  }
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

Status Runner::fetch() const {
  return own_ ? own_->download() : Status{};
}

Result<double> Runner::seconds(int calls) const {
  if (own_) {
    double seconds = 0;
    ONEPASS_RETURN_IF_ERROR(check::time_on_device(
        [this](void* stream) {
          call_->options.stream = stream;
          const Status status = run();
          call_->options.stream = nullptr;
          return status;
        },
        calls, &seconds));
    return seconds;
  }
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) ONEPASS_RETURN_IF_ERROR(run());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / calls;
}

}  // namespace onepass::cli
