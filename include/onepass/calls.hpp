// The calls of onepass.hpp: from views and options to the C structs. Include onepass.hpp.
#pragma once

namespace onepass {
inline namespace v0 {

/// 64-byte aligned scratch memory, reused from call to call, or memory of the caller's (on any device).
class Workspace {
 public:
  Workspace() = default;
  /// Borrows memory: never grown, never freed.
  Workspace(void* data, std::size_t size) : borrowed_(data), size_(size) {}

  void* data() const { return borrowed_ != nullptr ? borrowed_ : owned_.get(); }
  std::size_t size() const { return size_; }
  /// Makes room for `bytes`; the content is lost. False where memory runs out.
  bool reserve(std::size_t bytes) {
    if (borrowed_ != nullptr || bytes <= size_) return true;
    owned_.reset();
    owned_.reset(static_cast<std::byte*>(::operator new(bytes, kAlign, std::nothrow)));
    size_ = owned_ ? bytes : 0;
    return owned_ != nullptr;
  }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, kAlign); }
  };
  void* borrowed_ = nullptr;
  std::unique_ptr<std::byte, Free> owned_;
  std::size_t size_ = 0;
};

namespace detail {

/// A view's descriptor with an address to hand to C; null for an absent operand.
class Operand {
 public:
  explicit Operand(const View& view) : tensor_(view.descriptor()), present_(view) {}
  operator const DLTensor*() const { return present_ ? &tensor_ : nullptr; }  // NOLINT

 private:
  DLTensor tensor_;
  bool present_;
};

/// onepass_options_t of `options`, and the descriptors it points to.
struct COptions {
  explicit COptions(const Options& o)
      : cu_seqlens_q(o.cu_seqlens_q),
        cu_seqlens_k(o.cu_seqlens_k),
        q_length(o.q_length),
        k_start(o.k_start),
        k_length(o.k_length),
        q_position(o.q_position),
        alibi_slopes(o.alibi_slopes),
        bias(o.bias),
        sinks(o.sinks),
        dropout_state(o.dropout_state) {
    c.causal = o.causal;
    c.align = static_cast<std::int32_t>(o.align);
    c.window_left = o.window_left, c.window_right = o.window_right;
    c.cu_seqlens_q = cu_seqlens_q, c.cu_seqlens_k = cu_seqlens_k;
    c.max_seqlen_q = o.max_seqlen_q, c.max_seqlen_k = o.max_seqlen_k;
    c.q_length = q_length, c.k_start = k_start, c.k_length = k_length, c.q_position = q_position;
    c.scale = o.scale, c.softcap = o.softcap;
    c.alibi_slopes = alibi_slopes, c.bias = bias, c.sinks = sinks;
    c.dropout_p = o.dropout_p, c.dropout_seed = o.dropout_seed, c.dropout_offset = o.dropout_offset;
    c.dropout_state = dropout_state;
    c.deterministic = o.deterministic ? *o.deterministic : -1;
    c.validate = o.validate, c.threads = o.threads, c.kernel = o.kernel, c.stream = o.stream;
  }
  COptions(const COptions&) = delete;

  Operand cu_seqlens_q, cu_seqlens_k, q_length, k_start, k_length, q_position, alibi_slopes, bias, sinks, dropout_state;
  onepass_options_t c = ONEPASS_OPTIONS_INIT;
};

/// One call's C arguments with everything they point to; `use` is handed the struct.
template <class Use>
auto with_args(const Forward& t, const Options& options, Use use) {
  const COptions o(options);
  const Operand q(t.q), k(t.k), v(t.v), out(t.out), lse(t.lse);
  onepass_forward_args_t args = ONEPASS_FORWARD_ARGS_INIT;
  args.options = &o.c;
  args.q = q, args.k = k, args.v = v, args.out = out, args.lse = lse;
  return use(ONEPASS_FORWARD, args, &onepass_forward);
}
template <class Use>
auto with_args(const Backward& t, const Options& options, Use use) {
  const COptions o(options);
  const Operand q(t.q), k(t.k), v(t.v), out(t.out), lse(t.lse), grad_out(t.grad_out), grad_lse(t.grad_lse);
  const Operand grad_q(t.grad_q), grad_k(t.grad_k), grad_v(t.grad_v), grad_bias(t.grad_bias), grad_sinks(t.grad_sinks);
  onepass_backward_args_t args = ONEPASS_BACKWARD_ARGS_INIT;
  args.options = &o.c;
  args.q = q, args.k = k, args.v = v, args.out = out, args.lse = lse;
  args.grad_out = grad_out, args.grad_lse = grad_lse;
  args.grad_q = grad_q, args.grad_k = grad_k, args.grad_v = grad_v;
  args.grad_bias = grad_bias, args.grad_sinks = grad_sinks;
  return use(ONEPASS_BACKWARD, args, &onepass_backward);
}
template <class Use>
auto with_args(const Decode& t, const Options& options, Use use) {
  const COptions o(options);
  const Operand q(t.q), k_cache(t.k_cache), v_cache(t.v_cache), cache_seqlens(t.cache_seqlens);
  const Operand k_new(t.k_new), v_new(t.v_new), out(t.out), lse(t.lse);
  onepass_decode_args_t args = ONEPASS_DECODE_ARGS_INIT;
  args.options = &o.c;
  args.q = q, args.k_cache = k_cache, args.v_cache = v_cache, args.cache_seqlens = cache_seqlens;
  args.k_new = k_new, args.v_new = v_new, args.out = out, args.lse = lse;
  return use(ONEPASS_DECODE, args, &onepass_decode);
}

template <class Call>
Status run(const Call& call, const Options& options, Workspace* workspace) {
  Workspace temporary;
  Workspace& scratch = workspace != nullptr ? *workspace : temporary;
  return with_args(call, options, [&](onepass_pass_t pass, auto& args, auto* function) {
    std::size_t bytes = 0;
    if (const auto code = onepass_workspace_size(pass, &args, &bytes); code != ONEPASS_OK) return Status(code);
    if (!scratch.reserve(bytes)) return Status(ONEPASS_OUT_OF_MEMORY, "no memory for the workspace");
    args.workspace = scratch.data();
    args.workspace_size = scratch.size();
    return Status(function(&args));
  });
}

}  // namespace detail

/// out (and lse, where given) = attention(q, k, v).
inline Status forward(const Forward& call, const Options& options = {}, Workspace* workspace = nullptr) {
  return detail::run(call, options, workspace);
}

/// The gradients of a forward call with the same options.
inline Status backward(const Backward& call, const Options& options = {}, Workspace* workspace = nullptr) {
  return detail::run(call, options, workspace);
}

/// Attention of a few new queries over a key-value cache, appended to first where k_new and v_new are given.
inline Status decode(const Decode& call, const Options& options = {}, Workspace* workspace = nullptr) {
  return detail::run(call, options, workspace);
}

/// The result over two disjoint sets of keys from the results over each.
inline Status merge(const Merge& call, int threads = 0, void* stream = nullptr) {
  const detail::Operand out_a(call.out_a), lse_a(call.lse_a), out_b(call.out_b), lse_b(call.lse_b);
  const detail::Operand out(call.out), lse(call.lse);
  onepass_merge_args_t args = ONEPASS_MERGE_ARGS_INIT;
  args.out_a = out_a, args.lse_a = lse_a, args.out_b = out_b, args.lse_b = lse_b, args.out = out, args.lse = lse;
  args.threads = threads, args.stream = stream;
  return Status(onepass_merge(&args));
}

/// Bytes of workspace of a Forward, Backward or Decode, to reserve ahead.
template <class Call>
Status workspace_size(const Call& call, const Options& options, std::size_t* bytes) {
  return detail::with_args(call, options, [&](onepass_pass_t pass, auto& args, auto*) {
    return Status(onepass_workspace_size(pass, &args, bytes));
  });
}

/// What would run for a Forward, Backward or Decode and why, as JSON.
template <class Call>
Status explain(const Call& call, const Options& options, std::string* json) {
  return detail::with_args(call, options, [&](onepass_pass_t pass, auto& args, auto*) {
    std::size_t length = 0;
    if (const auto code = onepass_explain(pass, &args, nullptr, 0, &length); code != ONEPASS_OK) return Status(code);
    json->resize(length);
    return Status(onepass_explain(pass, &args, json->data(), length + 1, &length));
  });
}

/// Every kernel compiled in, in order of preference.
inline std::vector<onepass_kernel_info_t> kernels() {
  std::vector<onepass_kernel_info_t> list(static_cast<std::size_t>(onepass_kernel_count()));
  for (std::size_t i = 0; i < list.size(); ++i) {
    list[i] = ONEPASS_KERNEL_INFO_INIT;
    if (onepass_kernel_info(static_cast<std::int32_t>(i), &list[i]) != ONEPASS_OK) list.resize(i);
  }
  return list;
}

inline const char* version() {
  return onepass_version();
}

}  // namespace v0
}  // namespace onepass
