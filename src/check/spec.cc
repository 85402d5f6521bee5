#include "check/spec.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

namespace onepass::check {
namespace {

[[gnu::format(printf, 2, 3)]] void append(std::string& text, const char* format, ...) {
  char buffer[160];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  text += buffer;
}

void append_list(std::string& text, const char* name, const std::vector<std::int32_t>& list) {
  if (list.empty()) return;
  append(text, " %s", name);
  for (std::size_t n = 0; n < list.size(); ++n) {
    if (n == 12) {
      text += ",...";
      break;
    }
    append(text, "%c%d", n == 0 ? '=' : ',', list[n]);
  }
}

void append_layout(std::string& text, const char* name, const Layout& layout) {
  const Layout plain;
  if (layout.order == plain.order && layout.gap == plain.gap && layout.broadcast == plain.broadcast &&
      layout.start == 0) {
    return;
  }
  append(text, " %s:", name);
  for (int n = 0; n < 3; ++n) {
    const int axis = layout.order[n];
    append(text, "%c%s+%d", "bsh"[axis], layout.broadcast[axis] ? "*0" : "", layout.gap[n]);
  }
  if (layout.start != 0) append(text, "@%d", layout.start);
}

}  // namespace

const char* values_name(Values values) {
  static constexpr const char* kNames[] = {"normal", "wide",     "deep",    "equal", "steep",
                                           "rising", "denormal", "special", "tiny"};
  return kNames[static_cast<int>(values)];
}

std::string describe(const CaseSpec& s) {
  static constexpr const char* kPasses[] = {"forward", "backward", "decode"};
  std::string text;
  append(text, "%s %s%s batch=%lld seq=%lldx%lld heads=%lld/%lld dim=%lld/%lld", kPasses[static_cast<int>(s.pass)],
         dtype_name(s.dtype), s.out_f32 ? " out=f32" : "", static_cast<long long>(s.batch),
         static_cast<long long>(s.seq_q), static_cast<long long>(s.seq_k), static_cast<long long>(s.heads_q),
         static_cast<long long>(s.heads_kv), static_cast<long long>(s.head_dim), static_cast<long long>(s.head_dim_v));
  if (s.varlen()) {
    append(text, " total=%lld/%lld", static_cast<long long>(s.total_q), static_cast<long long>(s.total_k));
  }
  append_list(text, "cu_q", s.cu_seqlens_q);
  append_list(text, "cu_k", s.cu_seqlens_k);
  append_list(text, "q_length", s.q_length);
  append_list(text, "k_start", s.k_start);
  append_list(text, "k_length", s.k_length);
  append_list(text, "q_position", s.q_position);
  if (s.causal) text += " causal";
  if (s.window_left >= 0 || s.window_right >= 0) {
    append(text, " window=%lld,%lld", static_cast<long long>(s.window_left), static_cast<long long>(s.window_right));
  }
  if (s.align == Align::top_left) text += " top-left";
  if (!std::isnan(s.scale)) append(text, " scale=%g", s.scale);
  if (s.softcap != 0) append(text, " softcap=%g", s.softcap);
  if (s.alibi != 0) append(text, " alibi=%d", s.alibi);
  if (s.bias) {
    append(text, " bias=%s(", dtype_name(s.bias_dtype));
    for (int axis = 0; axis < 4; ++axis) text += s.bias_broadcast[axis] ? '1' : "bhqk"[axis];
    append(text, ")%s", s.bias_extreme ? "-inf" : "");
  }
  if (s.sinks) append(text, " sinks=%s%s", dtype_name(s.sinks_dtype), s.sinks_none ? "-inf" : "");
  if (s.dropout_p != 0) {
    append(text, " dropout=%g seed=%llu offset=%u%s", s.dropout_p, static_cast<unsigned long long>(s.dropout_seed),
           s.dropout_offset, s.dropout_state ? " state" : "");
  }
  if (s.deterministic == 1) text += " deterministic";
  if (!s.lse) text += " no-lse";
  if (s.grad_lse) text += " grad_lse";
  if (s.bias && !s.grad_bias) text += " no-grad-bias";
  if (s.sinks && !s.grad_sinks) text += " no-grad-sinks";
  append(text, " values=%s", values_name(s.values));
  append_layout(text, "q", s.layout_q);
  append_layout(text, "k", s.layout_k);
  append_layout(text, "v", s.layout_v);
  append_layout(text, "out", s.layout_out);
  if (s.row_gap != 0) append(text, " lse+%d", s.row_gap);
  append(text, " [seed %llu]", static_cast<unsigned long long>(s.seed));
  return text;
}

}  // namespace onepass::check
