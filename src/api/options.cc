#include "api/options.h"

#include <cinttypes>
#include <cmath>
#include <cstring>

#include "api/tensor.h"

namespace onepass::api {

template <class Args>
Status read_args(const void* given, const Args& defaults, const char* name, Args* args) {
  if (given == nullptr) return invalid_argument("%s is null: pass a struct made with its INIT macro", name);
  std::size_t size = 0;
  std::memcpy(&size, given, sizeof size);
  // Every version of a struct is a whole number of its alignment; any other size would cut a pointer in two.
  if (size < sizeof size || size % alignof(Args) != 0 || size > (std::size_t{1} << 16)) {
    return invalid_argument("%s.struct_size must be sizeof the struct: got %zu; nearest: %zu, from its INIT macro",
                            name, size, sizeof(Args));
  }
  *args = defaults;
  std::memcpy(static_cast<void*>(args), given, min_of(size, sizeof(Args)));
  return {};
}
template Status read_args(const void*, const onepass_options_t&, const char*, onepass_options_t*);
template Status read_args(const void*, const onepass_forward_args_t&, const char*, onepass_forward_args_t*);
template Status read_args(const void*, const onepass_backward_args_t&, const char*, onepass_backward_args_t*);
template Status read_args(const void*, const onepass_decode_args_t&, const char*, onepass_decode_args_t*);
template Status read_args(const void*, const onepass_merge_args_t&, const char*, onepass_merge_args_t*);
template Status read_args(const void*, const onepass_kernel_info_t&, const char*, onepass_kernel_info_t*);

Status read_options(const onepass_options_t* given, onepass_options_t* options) {
  const onepass_options_t defaults = ONEPASS_OPTIONS_INIT;
  *options = defaults;
  return given == nullptr ? Status{} : read_args(given, defaults, "options", options);
}

Status read_flag(const char* name, std::int32_t value, std::int32_t lowest, std::int32_t highest) {
  if (value >= lowest && value <= highest) return {};
  return invalid_argument("%s must be between %d and %d: got %d", name, lowest, highest, value);
}

Status read_mask(const onepass_options_t& options, bool planning, Problem* problem) {
  Problem& p = *problem;
  ONEPASS_RETURN_IF_ERROR(read_flag("causal", options.causal, 0, 1));
  ONEPASS_RETURN_IF_ERROR(read_flag("align (0 bottom-right, 1 top-left)", options.align, 0, 1));
  p.mask.causal = options.causal != 0;
  p.mask.align = options.align == ONEPASS_TOP_LEFT ? Align::top_left : Align::bottom_right;
  p.mask.window_left = options.window_left;
  p.mask.window_right = options.window_right;
  const struct {
    const char* name;
    const DLTensor* tensor;
    const std::int32_t** values;
  } lengths[] = {{"q_length", options.q_length, &p.mask.q_length},
                 {"k_start", options.k_start, &p.mask.k_start},
                 {"k_length", options.k_length, &p.mask.k_length},
                 {"q_position", options.q_position, &p.mask.q_position}};
  for (const auto& length : lengths) {
    if (length.tensor == nullptr) continue;
    ONEPASS_RETURN_IF_ERROR(parse_int32({length.name, planning}, length.tensor, p.batch, length.values));
  }
  return {};
}

Status read_scores(const onepass_options_t& options, bool planning, Problem* problem) {
  Problem& p = *problem;
  p.score.scale =
      std::isnan(options.scale) ? (p.head_dim > 0 ? 1 / std::sqrt(static_cast<double>(p.head_dim)) : 1) : options.scale;
  p.score.softcap = options.softcap;
  if (options.alibi_slopes != nullptr) {
    ONEPASS_RETURN_IF_ERROR(
        parse_heads({"alibi_slopes", planning}, options.alibi_slopes, p, true, &p.score.alibi_slopes));
    if (p.score.alibi_slopes.dtype != DType::f32)
      return invalid_argument("alibi_slopes must be float32: got %s", dtype_name(p.score.alibi_slopes.dtype));
  }
  if (options.bias != nullptr) ONEPASS_RETURN_IF_ERROR(parse_bias({"bias", planning}, options.bias, p, &p.score.bias));
  if (options.sinks != nullptr)
    ONEPASS_RETURN_IF_ERROR(parse_heads({"sinks", planning}, options.sinks, p, false, &p.score.sinks));
  if (!(options.dropout_p >= 0 && options.dropout_p <= 1)) {
    return invalid_argument("dropout_p must be between 0 and 1: got %g", options.dropout_p);
  }
  DropoutSpec& dropout = p.score.dropout;
  dropout.threshold = static_cast<std::uint32_t>(std::lround(65536 * options.dropout_p));
  dropout.keep_scale = dropout.threshold < 65536 ? static_cast<float>(65536.0 / (65536.0 - dropout.threshold)) : 0.0f;
  dropout.seed = options.dropout_seed;
  if (options.dropout_offset >> 32 != 0) {
    return invalid_argument("dropout_offset must be below 2^32: got %" PRIu64, options.dropout_offset);
  }
  dropout.offset = static_cast<std::uint32_t>(options.dropout_offset);
  if (options.dropout_state != nullptr && dropout.threshold != 0) {
    Parsed state;
    ONEPASS_RETURN_IF_ERROR(parse({"dropout_state", planning}, options.dropout_state, 1, 1, &state));
    ONEPASS_RETURN_IF_ERROR(require_shape({"dropout_state"}, state, {2}));
    if (state.is_float || state.bits != 64) return invalid_argument("dropout_state must be int64 (2): seed, offset");
    if (options.dropout_state->data != nullptr) dropout.state = static_cast<const std::int64_t*>(state.data);
    if (dropout.state != nullptr && !p.on_device && dropout.state[1] >> 32 != 0) {
      return invalid_argument("dropout_state[1], the offset, must be between 0 and 2^32 - 1: got %" PRId64,
                              dropout.state[1]);
    }
  }
  return {};
}

}  // namespace onepass::api
