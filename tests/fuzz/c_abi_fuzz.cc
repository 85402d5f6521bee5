// Any descriptors through the C interface: a status with one line of text, nothing written by a refusal, no input
// changed, no byte touched outside what the descriptors name.
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "descriptors.h"

using namespace onepass::fuzz;

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void check_status(onepass_status_t status) {
  require(status >= ONEPASS_OK && status <= ONEPASS_OUT_OF_MEMORY);  // a CPU has no device errors
  const std::string_view text = onepass_last_error();
  require(text.find('\n') == std::string_view::npos);
  if (status == ONEPASS_INVALID_ARGUMENT || status == ONEPASS_UNSUPPORTED) require(!text.empty());
}

Shape draw_shape(Bytes& b) {
  Shape s = {b.below(4), b.below(10), b.below(10), b.below(4), 0, b.below(10), b.below(10)};
  s.heads_q = s.heads_kv * b.below(4);
  if (b.rarely(8)) s.dim = b.pick({16, 33, 64, 65});
  if (b.rarely(8)) s.seq_k = b.pick({64, 129});
  if (b.rarely(40)) s.heads_q += 1;
  return s;
}

DLDataType draw_type(Bytes& b) {
  return b.pick<DLDataType>({{kDLFloat, 32, 1}, {kDLFloat, 16, 1}, {kDLBfloat, 16, 1}, {kDLFloat, 64, 1}});
}

std::vector<std::int32_t> draw_ints(Bytes& b, std::int64_t count, std::int64_t limit, bool rising) {
  std::vector<std::int32_t> values;
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t value =
        b.rarely(30) ? b.pick<std::int64_t>({-1, INT32_MAX, INT32_MIN, 1000000}) : b.next() % (limit + 1);
    if (rising && i > 0) sum += value;
    values.push_back(static_cast<std::int32_t>(rising ? sum : value));
  }
  return values;
}

struct Request {
  Request(const std::uint8_t* data, std::size_t size) : bytes(data, size), tensors(bytes) {}

  Bytes bytes;
  Tensors tensors;
  Shape shape = {};
  DLDataType type = {};
  bool packed = false;
  std::string kernel;
  onepass_options_t options = ONEPASS_OPTIONS_INIT;

  const DLTensor* operand(DLDataType of, std::int64_t seq, std::int64_t heads, std::int64_t dim) {
    return tensors.floats(of, packed ? std::vector{seq, heads, dim} : std::vector{shape.batch, seq, heads, dim});
  }
  const DLTensor* rows() {
    const DLDataType f32 = {kDLFloat, 32, 1};
    return tensors.floats(
        f32, packed ? std::vector{shape.heads_q, shape.seq_q} : std::vector{shape.batch, shape.heads_q, shape.seq_q});
  }

  void draw_options() {
    Bytes& b = bytes;
    const Shape& s = shape;
    options.causal = b.rarely(50) ? b.next() - 128 : b.below(2);
    options.align = b.rarely(50) ? b.next() - 128 : b.below(2);
    if (b.rarely(3)) options.window_left = b.rarely(10) ? b.any_size() : b.below(6) - 1;
    if (b.rarely(3)) options.window_right = b.rarely(10) ? b.any_size() : b.below(6) - 1;
    if (packed) {
      options.cu_seqlens_q = tensors.ints(draw_ints(b, s.batch + 1, s.batch > 0 ? s.seq_q / s.batch : 0, true));
      options.cu_seqlens_k = tensors.ints(draw_ints(b, s.batch + 1, s.batch > 0 ? s.seq_k / s.batch : 0, true));
      options.max_seqlen_q = b.rarely(20) ? b.any_size() : s.seq_q;
      options.max_seqlen_k = b.rarely(20) ? b.any_size() : s.seq_k;
    }
    if (b.rarely(5)) options.q_length = tensors.ints(draw_ints(b, s.batch, s.seq_q, false));
    if (b.rarely(5)) options.k_start = tensors.ints(draw_ints(b, s.batch, s.seq_k / 2, false));
    if (b.rarely(5)) options.k_length = tensors.ints(draw_ints(b, s.batch, s.seq_k / 2, false));
    if (b.rarely(5)) options.q_position = tensors.ints(draw_ints(b, s.batch, s.seq_k, false));
    if (b.rarely(8)) options.scale = b.any_number();
    if (b.rarely(6)) options.softcap = b.any_number();
    if (b.rarely(6))
      options.alibi_slopes =
          tensors.floats({kDLFloat, 32, 1}, b.rarely(3) ? std::vector{s.batch, s.heads_q} : std::vector{s.heads_q});
    if (b.rarely(5)) options.bias = bias();
    if (b.rarely(6)) options.sinks = tensors.floats({kDLFloat, 32, 1}, {s.heads_q});
    if (b.rarely(6)) options.dropout_p = b.any_number();
    options.dropout_seed = b.next();
    options.dropout_offset = b.rarely(20) ? UINT64_MAX : b.next();
    if (b.rarely(20)) options.dropout_state = tensors.floats({kDLInt, 64, 1}, {2});
    options.deterministic = b.rarely(20) ? b.next() - 128 : -1;
    options.validate = b.rarely(20) ? b.next() - 128 : 0;
    options.threads = b.rarely(20) ? b.pick({-1, 1025, INT32_MAX, INT32_MIN, 64}) : b.below(3);
    if (b.rarely(4)) draw_kernel();
    if (b.rarely(60))
      options.struct_size =
          b.pick<std::size_t>({0, 1, 8, 12, 16, sizeof options - 8, sizeof options - 4, sizeof options + 8, SIZE_MAX});
  }
  const DLTensor* bias() {
    const auto side = [&](std::int64_t full) { return bytes.rarely(3) ? std::int64_t{1} : full; };
    std::vector<std::int64_t> sizes = {side(shape.batch), side(shape.heads_q), side(shape.seq_q), side(shape.seq_k)};
    if (bytes.rarely(8)) sizes.erase(sizes.begin());
    return tensors.floats(bytes.rarely(3) ? type : DLDataType{kDLFloat, 32, 1}, sizes);
  }
  void draw_kernel() {
    onepass_kernel_info_t info = ONEPASS_KERNEL_INFO_INIT;
    if (onepass_kernel_info(bytes.next() - 4, &info) == ONEPASS_OK) kernel = info.name;
    if (bytes.rarely(10)) kernel = "no such kernel\n";
    options.kernel = kernel.c_str();
  }
};

/// Plans, explains, and runs `call` with a workspace of exactly the size asked for, or a wrong one.
template <class Args>
void exercise(Request& r, onepass_pass_t pass, Args& args, onepass_status_t (*call)(const Args*)) {
  if (r.bytes.rarely(60))
    args.struct_size = r.bytes.pick<std::size_t>({0, 8, 12, 16, 20, sizeof args - 8, sizeof args + 8, SIZE_MAX});
  args.options = r.bytes.rarely(30) ? nullptr : &r.options;
  std::size_t size = 0, length = 0;
  const onepass_status_t planned = onepass_workspace_size(pass, &args, &size);
  check_status(planned);
  char text[100];
  const onepass_status_t explained = onepass_explain(pass, &args, text, sizeof text, &length);
  check_status(explained);
  require((explained == ONEPASS_OK) == (planned == ONEPASS_OK));
  if (explained == ONEPASS_OK) require(std::strlen(text) == std::min(length, sizeof text - 1));
  if (!r.tensors.runnable || (planned == ONEPASS_OK && size > (1u << 26))) return;

  if (planned != ONEPASS_OK) size = 0;
  if (r.bytes.rarely(40) && size > 0) --size;
  std::size_t padded = (size + 63) / 64 * 64;
  std::unique_ptr<void, decltype(&std::free)> workspace(std::aligned_alloc(64, std::max<std::size_t>(padded, 64)),
                                                        &std::free);
  args.workspace = r.bytes.rarely(40) ? nullptr : static_cast<char*>(workspace.get()) + (r.bytes.rarely(40) ? 4 : 0);
  args.workspace_size = size;
  const auto before = r.tensors.snapshot();
  const onepass_status_t status = call(&args);
  check_status(status);
  if (status != ONEPASS_OK) require(r.tensors.snapshot() == before);
}

void fuzz_merge(Request& r) {
  onepass_merge_args_t args = ONEPASS_MERGE_ARGS_INIT;
  const Shape& s = r.shape;
  args.out_a = r.operand(r.type, s.seq_q, s.heads_q, s.dim_v);
  args.lse_a = r.rows();
  args.out_b = r.operand(r.type, s.seq_q, s.heads_q, s.dim_v);
  args.lse_b = r.rows();
  args.out = r.bytes.rarely(6) ? args.out_a : r.operand(r.type, s.seq_q, s.heads_q, s.dim_v);
  args.lse = r.bytes.rarely(6) ? args.lse_a : r.rows();
  args.threads = r.bytes.rarely(20) ? r.bytes.next() - 128 : 1;
  if (!r.tensors.runnable) return;
  const auto before = r.tensors.snapshot();
  const onepass_status_t status = onepass_merge(&args);
  check_status(status);
  if (status != ONEPASS_OK) require(r.tensors.snapshot() == before);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Request r(data, size);
  const int pass = r.bytes.below(4);
  r.shape = draw_shape(r.bytes);
  r.type = draw_type(r.bytes);
  r.packed = pass != 2 && r.bytes.rarely(3);
  const Shape& s = r.shape;
  if (pass == 3) {
    fuzz_merge(r);
    return 0;
  }
  r.draw_options();
  const DLTensor* q = r.operand(r.type, s.seq_q, s.heads_q, s.dim);
  const DLTensor* k = r.operand(r.type, s.seq_k, s.heads_kv, s.dim);
  const DLTensor* v = r.operand(r.type, s.seq_k, s.heads_kv, s.dim_v);
  const DLTensor* out =
      r.operand(r.bytes.rarely(6) ? DLDataType{kDLFloat, 32, 1} : r.type, s.seq_q, s.heads_q, s.dim_v);
  const DLTensor* lse = r.bytes.rarely(4) ? nullptr : r.rows();
  if (pass == 0) {
    onepass_forward_args_t args = ONEPASS_FORWARD_ARGS_INIT;
    args.q = q, args.k = k, args.v = v, args.out = out, args.lse = lse;
    exercise(r, ONEPASS_FORWARD, args, &onepass_forward);
  } else if (pass == 1) {
    onepass_backward_args_t args = ONEPASS_BACKWARD_ARGS_INIT;
    args.q = q, args.k = k, args.v = v, args.out = out, args.lse = lse;
    args.grad_out = r.operand(r.type, s.seq_q, s.heads_q, s.dim_v);
    if (r.bytes.rarely(4)) args.grad_lse = r.rows();
    args.grad_q = r.operand(r.type, s.seq_q, s.heads_q, s.dim);
    args.grad_k = r.operand(r.type, s.seq_k, s.heads_kv, s.dim);
    args.grad_v = r.operand(r.type, s.seq_k, s.heads_kv, s.dim_v);
    if (r.bytes.rarely(4)) args.grad_bias = r.bias();
    if (r.bytes.rarely(4)) args.grad_sinks = r.tensors.floats({kDLFloat, 32, 1}, {s.heads_q});
    exercise(r, ONEPASS_BACKWARD, args, &onepass_backward);
  } else {
    onepass_decode_args_t args = ONEPASS_DECODE_ARGS_INIT;
    args.q = q, args.k_cache = k, args.v_cache = v, args.out = out, args.lse = lse;
    args.cache_seqlens = r.tensors.ints(draw_ints(r.bytes, s.batch, s.seq_k, false));
    if (r.bytes.rarely(3)) {
      const std::int64_t fresh = r.bytes.below(3);
      args.k_new = r.operand(r.type, fresh, s.heads_kv, s.dim);
      args.v_new = r.operand(r.type, fresh, s.heads_kv, s.dim_v);
    }
    exercise(r, ONEPASS_DECODE, args, &onepass_decode);
  }
  return 0;
}
