#include "api/request.h"

#include <cinttypes>

#include "api/options.h"
#include "api/place.h"
#include "api/tensor.h"
#include "core/layout.h"
#include "core/support.h"
#include "cpu/parallel.h"

namespace onepass::api {

namespace {

/// q, k and v, and the sizes they give.
Status read_operands(const DLTensor* q, const DLTensor* k, const DLTensor* v, const char* k_name, const char* v_name,
                     const onepass_options_t& options, bool planning, Problem* problem, Tensor* tq, Tensor* tk,
                     Tensor* tv) {
  Problem& p = *problem;
  const bool packed = options.cu_seqlens_q != nullptr || options.cu_seqlens_k != nullptr;
  p.mask.varlen = packed;
  Parsed pq, pk, pv;
  ONEPASS_RETURN_IF_ERROR(parse_operand({"q", planning}, q, packed, &pq, tq));
  ONEPASS_RETURN_IF_ERROR(parse_operand({k_name, planning}, k, packed, &pk, tk));
  ONEPASS_RETURN_IF_ERROR(parse_operand({v_name, planning}, v, packed, &pv, tv));
  p.dtype = pq.dtype;
  ONEPASS_RETURN_IF_ERROR(require_dtype({k_name}, pk, p.dtype));
  ONEPASS_RETURN_IF_ERROR(require_dtype({v_name}, pv, p.dtype));
  const int rest = packed ? 0 : 1;
  p.batch = packed ? 0 : pq.size[0];
  p.total_q = pq.size[rest];
  p.heads_q = pq.size[rest + 1];
  p.head_dim = pq.size[rest + 2];
  p.total_k = pk.size[rest];
  p.heads_kv = pk.size[rest + 1];
  p.head_dim_v = pv.size[rest + 2];
  if (packed) {
    ONEPASS_RETURN_IF_ERROR(require_shape({k_name}, pk, {p.total_k, p.heads_kv, p.head_dim}));
    ONEPASS_RETURN_IF_ERROR(require_shape({v_name}, pv, {p.total_k, p.heads_kv, p.head_dim_v}));
    if (options.cu_seqlens_q == nullptr || options.cu_seqlens_k == nullptr) {
      return invalid_argument("cu_seqlens_q and cu_seqlens_k go together: one of them is null");
    }
    Parsed offsets;
    ONEPASS_RETURN_IF_ERROR(parse({"cu_seqlens_q", planning}, options.cu_seqlens_q, 1, 1, &offsets));
    if (offsets.size[0] < 1) return invalid_argument("cu_seqlens_q must have batch + 1 entries: got 0");
    p.batch = offsets.size[0] - 1;
    ONEPASS_RETURN_IF_ERROR(
        parse_int32({"cu_seqlens_q", planning}, options.cu_seqlens_q, p.batch + 1, &p.mask.cu_seqlens_q));
    ONEPASS_RETURN_IF_ERROR(
        parse_int32({"cu_seqlens_k", planning}, options.cu_seqlens_k, p.batch + 1, &p.mask.cu_seqlens_k));
    if (min_of(options.max_seqlen_q, options.max_seqlen_k) < 0 ||
        max_of(options.max_seqlen_q, options.max_seqlen_k) > INT32_MAX) {
      return invalid_argument("max_seqlen_q and max_seqlen_k must be between 0 and %d (lengths are int32): got %" PRId64
                              " and %" PRId64,
                              INT32_MAX, options.max_seqlen_q, options.max_seqlen_k);
    }
    p.seq_q = options.max_seqlen_q;
    p.seq_k = options.max_seqlen_k;
  } else {
    ONEPASS_RETURN_IF_ERROR(require_shape({k_name}, pk, {p.batch, p.total_k, p.heads_kv, p.head_dim}));
    ONEPASS_RETURN_IF_ERROR(require_shape({v_name}, pv, {p.batch, p.total_k, p.heads_kv, p.head_dim_v}));
    p.seq_q = p.total_q;
    p.seq_k = p.total_k;
  }
  return {};
}

Status finish(const onepass_options_t& options, bool planning, void* workspace, std::size_t workspace_size,
              std::size_t extra, Request* request) {
  Request& r = *request;
  r.launch.stream = options.stream;
  ONEPASS_RETURN_IF_ERROR(read_flag("deterministic (-1 the kernel's default)", options.deterministic, -1, 1));
  ONEPASS_RETURN_IF_ERROR(read_flag("validate", options.validate, 0, 1));
  r.problem.deterministic = options.deterministic;
  ONEPASS_RETURN_IF_ERROR(check_problem(r.problem));
  if (!r.problem.on_device) {
    ONEPASS_RETURN_IF_ERROR(check_lengths(r.problem));
  } else if (options.validate != 0 && !planning) {
    ONEPASS_RETURN_IF_ERROR(check_device_lengths(r.problem, r.launch));
  }
  ONEPASS_RETURN_IF_ERROR(read_flag("threads (0 means all)", options.threads, 0, kMaxThreads));
  r.launch.threads =
      options.threads > 0 ? options.threads : min_of(cpu::default_threads(), static_cast<int>(kMaxThreads));
  Machine gpu;
  if (r.problem.on_device) ONEPASS_RETURN_IF_ERROR(this_gpu(r.launch.device, &gpu));
  ONEPASS_RETURN_IF_ERROR(select_kernel(r.problem, r.problem.on_device ? gpu : this_cpu(), options.kernel, &r.kernel,
                                        planning ? &r.why : nullptr));
  r.workspace_needed = r.kernel->workspace(r.problem, r.launch.threads) + extra;
  if (planning) return {};
  if (workspace_size < r.workspace_needed || (workspace == nullptr && r.workspace_needed > 0)) {
    return invalid_argument(
        "workspace: this call needs %zu bytes, got %zu; ask onepass_workspace_size with the same "
        "arguments",
        r.workspace_needed, workspace == nullptr ? std::size_t{0} : workspace_size);
  }
  if (reinterpret_cast<std::uintptr_t>(workspace) % 64 != 0) {
    return invalid_argument("workspace must be 64-byte aligned: it is off by %d bytes",
                            static_cast<int>(reinterpret_cast<std::uintptr_t>(workspace) % 64));
  }
  r.launch.workspace = workspace;
  r.launch.workspace_size = workspace_size;
  return {};
}

Status read_out(const DLTensor* out, const Expect& expect, const Problem& p, bool float32_too, Tensor* operand) {
  Parsed parsed;
  ONEPASS_RETURN_IF_ERROR(parse_operand(expect, out, p.mask.varlen, &parsed, operand));
  if (p.mask.varlen) {
    ONEPASS_RETURN_IF_ERROR(require_shape(expect, parsed, {p.total_q, p.heads_q, p.head_dim_v}));
  } else {
    ONEPASS_RETURN_IF_ERROR(require_shape(expect, parsed, {p.batch, p.total_q, p.heads_q, p.head_dim_v}));
  }
  return float32_too && parsed.dtype == DType::f32 ? Status{} : require_dtype(expect, parsed, p.dtype);
}

/// A gradient: shape and dtype of the tensor it belongs to.
Status read_gradient(const DLTensor* gradient, const Expect& expect, const DLTensor* of, const Problem& p,
                     Tensor* operand) {
  Parsed parsed, original;
  Tensor unused;
  ONEPASS_RETURN_IF_ERROR(parse_operand(expect, gradient, p.mask.varlen, &parsed, operand));
  ONEPASS_RETURN_IF_ERROR(parse_operand({expect.name, true}, of, p.mask.varlen, &original, &unused));
  if (parsed.rank == 3) {
    ONEPASS_RETURN_IF_ERROR(require_shape(expect, parsed, {original.size[0], original.size[1], original.size[2]}));
  } else {
    ONEPASS_RETURN_IF_ERROR(
        require_shape(expect, parsed, {original.size[0], original.size[1], original.size[2], original.size[3]}));
  }
  return require_dtype(expect, parsed, p.dtype);
}

/// Whether aligned copies of whole chunks serve: rows that begin at 16 bytes, and out in the inputs' type.
bool aligned_forward(const Problem& p, const ForwardOperands& f) {
  return rows_aligned(f.q) && rows_aligned(f.k) && rows_aligned(f.v) && rows_aligned(f.out) &&
         (!f.out || f.out.dtype == p.dtype);
}

}  // namespace

Status make_request(const onepass_forward_args_t& args, bool planning, Request* request) {
  Request& r = *request;
  onepass_options_t options;
  ONEPASS_RETURN_IF_ERROR(read_options(args.options, &options));
  r.problem.pass = Pass::forward;
  ForwardOperands& f = r.forward;
  ONEPASS_RETURN_IF_ERROR(find_place({{"q", args.q},
                                      {"k", args.k},
                                      {"v", args.v},
                                      {"out", args.out},
                                      {"lse", args.lse},
                                      ONEPASS_OPTION_TENSORS(options)},
                                     &r.problem, &r.launch));
  ONEPASS_RETURN_IF_ERROR(
      read_operands(args.q, args.k, args.v, "k", "v", options, planning, &r.problem, &f.q, &f.k, &f.v));
  ONEPASS_RETURN_IF_ERROR(read_mask(options, planning, &r.problem));
  ONEPASS_RETURN_IF_ERROR(read_scores(options, planning, &r.problem));
  if (!planning || args.out != nullptr)
    ONEPASS_RETURN_IF_ERROR(read_out(args.out, {"out", planning}, r.problem, true, &f.out));
  r.problem.aligned_rows = aligned_forward(r.problem, f);
  if (args.lse != nullptr) ONEPASS_RETURN_IF_ERROR(parse_rows({"lse", planning}, args.lse, r.problem, &f.lse));
  ONEPASS_RETURN_IF_ERROR(finish(options, planning, args.workspace, args.workspace_size, 0, request));
  return planning ? Status{} : check_operands(r.problem, f, {args.workspace, r.workspace_needed});
}

Status make_request(const onepass_backward_args_t& args, bool planning, Request* request) {
  Request& r = *request;
  onepass_options_t options;
  ONEPASS_RETURN_IF_ERROR(read_options(args.options, &options));
  Problem& p = r.problem;
  p.pass = Pass::backward;
  BackwardOperands& o = r.backward;
  ONEPASS_RETURN_IF_ERROR(find_place({{"q", args.q},
                                      {"k", args.k},
                                      {"v", args.v},
                                      {"out", args.out},
                                      {"lse", args.lse},
                                      {"grad_out", args.grad_out},
                                      {"grad_lse", args.grad_lse},
                                      {"grad_q", args.grad_q},
                                      {"grad_k", args.grad_k},
                                      {"grad_v", args.grad_v},
                                      {"grad_bias", args.grad_bias},
                                      {"grad_sinks", args.grad_sinks},
                                      ONEPASS_OPTION_TENSORS(options)},
                                     &p, &r.launch));
  ONEPASS_RETURN_IF_ERROR(read_operands(args.q, args.k, args.v, "k", "v", options, planning, &p, &o.q, &o.k, &o.v));
  ONEPASS_RETURN_IF_ERROR(read_mask(options, planning, &p));
  ONEPASS_RETURN_IF_ERROR(read_scores(options, planning, &p));
  const auto wanted = [&](const DLTensor* tensor) { return !planning || tensor != nullptr; };
  if (wanted(args.out)) ONEPASS_RETURN_IF_ERROR(read_out(args.out, {"out", planning}, p, true, &o.out));
  if (wanted(args.grad_out))
    ONEPASS_RETURN_IF_ERROR(read_out(args.grad_out, {"grad_out", planning}, p, true, &o.grad_out));
  if (wanted(args.lse)) ONEPASS_RETURN_IF_ERROR(parse_rows({"lse", planning}, args.lse, p, &o.lse));
  if (args.grad_lse != nullptr)
    ONEPASS_RETURN_IF_ERROR(parse_rows({"grad_lse", planning}, args.grad_lse, p, &o.grad_lse));
  if (wanted(args.grad_q))
    ONEPASS_RETURN_IF_ERROR(read_gradient(args.grad_q, {"grad_q", planning}, args.q, p, &o.grad_q));
  if (wanted(args.grad_k))
    ONEPASS_RETURN_IF_ERROR(read_gradient(args.grad_k, {"grad_k", planning}, args.k, p, &o.grad_k));
  if (wanted(args.grad_v))
    ONEPASS_RETURN_IF_ERROR(read_gradient(args.grad_v, {"grad_v", planning}, args.v, p, &o.grad_v));
  for (const Tensor* operand : {&o.q, &o.k, &o.v, &o.out, &o.grad_out, &o.grad_q, &o.grad_k, &o.grad_v}) {
    p.aligned_rows = p.aligned_rows && rows_aligned(*operand);
  }
  if (args.grad_bias != nullptr) {
    if (!p.score.bias) return invalid_argument("grad_bias is given, but there is no bias");
    ONEPASS_RETURN_IF_ERROR(parse_bias({"grad_bias", planning}, args.grad_bias, p, &o.grad_bias));
    bool same = args.grad_bias->ndim == options.bias->ndim;
    for (int i = 0; same && i < args.grad_bias->ndim; ++i) same = args.grad_bias->shape[i] == options.bias->shape[i];
    if (!same) return invalid_argument("grad_bias must have the shape of bias");
    for (int i = 0; i < args.grad_bias->ndim && args.grad_bias->strides != nullptr; ++i) {
      if (args.grad_bias->shape[i] > 1 && args.grad_bias->strides[i] == 0) {
        return invalid_argument(
            "grad_bias: an output's elements must not overlap: dimension %d has stride 0; pass a "
            "contiguous tensor",
            i);
      }
    }
  }
  if (args.grad_sinks != nullptr) {
    if (!p.score.sinks) return invalid_argument("grad_sinks is given, but there are no sinks");
    ONEPASS_RETURN_IF_ERROR(parse_heads({"grad_sinks", planning}, args.grad_sinks, p, false, &o.grad_sinks));
  }
  ONEPASS_RETURN_IF_ERROR(finish(options, planning, args.workspace, args.workspace_size, 0, request));
  return planning ? Status{} : check_operands(p, o, {args.workspace, r.workspace_needed});
}

Status make_request(const onepass_decode_args_t& args, bool planning, Request* request) {
  Request& r = *request;
  onepass_options_t options;
  ONEPASS_RETURN_IF_ERROR(read_options(args.options, &options));
  Problem& p = r.problem;
  p.pass = Pass::decode;
  ForwardOperands& f = r.forward;
  ONEPASS_RETURN_IF_ERROR(find_place({{"q", args.q},
                                      {"k_cache", args.k_cache},
                                      {"v_cache", args.v_cache},
                                      {"cache_seqlens", args.cache_seqlens},
                                      {"k_new", args.k_new},
                                      {"v_new", args.v_new},
                                      {"out", args.out},
                                      {"lse", args.lse},
                                      ONEPASS_OPTION_TENSORS(options)},
                                     &p, &r.launch));
  if (options.cu_seqlens_q != nullptr || options.cu_seqlens_k != nullptr || options.k_length != nullptr ||
      options.q_position != nullptr) {
    return invalid_argument(
        "decode takes its lengths from cache_seqlens: leave cu_seqlens, k_length and q_position out");
  }
  ONEPASS_RETURN_IF_ERROR(
      read_operands(args.q, args.k_cache, args.v_cache, "k_cache", "v_cache", options, planning, &p, &f.q, &f.k, &f.v));
  ONEPASS_RETURN_IF_ERROR(read_mask(options, planning, &p));
  ONEPASS_RETURN_IF_ERROR(read_scores(options, planning, &p));
  ONEPASS_RETURN_IF_ERROR(parse_int32({"cache_seqlens", planning}, args.cache_seqlens, p.batch, &r.cache_seqlens));
  if ((args.k_new == nullptr) != (args.v_new == nullptr))
    return invalid_argument("k_new and v_new go together: one of them is null");
  if (args.k_new != nullptr) {
    Parsed k, v;
    ONEPASS_RETURN_IF_ERROR(parse_operand({"k_new", planning}, args.k_new, false, &k, &r.k_new));
    ONEPASS_RETURN_IF_ERROR(parse_operand({"v_new", planning}, args.v_new, false, &v, &r.v_new));
    r.seq_new = k.size[1];
    ONEPASS_RETURN_IF_ERROR(require_shape({"k_new"}, k, {p.batch, r.seq_new, p.heads_kv, p.head_dim}));
    ONEPASS_RETURN_IF_ERROR(require_shape({"v_new"}, v, {p.batch, r.seq_new, p.heads_kv, p.head_dim_v}));
    ONEPASS_RETURN_IF_ERROR(require_dtype({"k_new"}, k, p.dtype));
    ONEPASS_RETURN_IF_ERROR(require_dtype({"v_new"}, v, p.dtype));
  }
  if (!planning || args.out != nullptr) ONEPASS_RETURN_IF_ERROR(read_out(args.out, {"out", planning}, p, true, &f.out));
  if (args.lse != nullptr) ONEPASS_RETURN_IF_ERROR(parse_rows({"lse", planning}, args.lse, p, &f.lse));
  p.aligned_rows = aligned_forward(p, f);
  if (r.cache_seqlens != nullptr && !p.on_device) {
    for (std::int64_t b = 0; b < p.batch; ++b) {
      const std::int64_t limit = min_of<std::int64_t>(p.seq_k, INT32_MAX);  // lengths are int32
      if (r.cache_seqlens[b] < 0 || r.cache_seqlens[b] + r.seq_new > limit) {
        return invalid_argument("cache_seqlens[%" PRId64 "] is %d with %" PRId64
                                " new tokens: the cache holds 0 to %" PRId64,
                                b, r.cache_seqlens[b], r.seq_new, limit);
      }
    }
  }
  // The lengths after the append live at the start of the workspace.
  const std::size_t extra = static_cast<std::size_t>(round_up(p.batch * 4, 64));
  ONEPASS_RETURN_IF_ERROR(finish(options, planning, args.workspace, args.workspace_size, extra, request));
  if (planning) return {};
  return check_operands(p, f, {args.workspace, r.workspace_needed},
                        {"k_cache", "v_cache", r.k_new, r.v_new, r.seq_new, r.cache_seqlens});
}

}  // namespace onepass::api
