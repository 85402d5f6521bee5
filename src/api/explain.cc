#include "api/explain.h"

#include <cinttypes>
#include <cstdio>
#include <string_view>

#include "core/work.h"

namespace onepass::api {
namespace {

/// An object written field by field. Our strings hold nothing that needs more than escaped quotes.
class Json {
 public:
  void text(const char* key, std::string_view value) {
    open(key);
    quote(value);
  }
  void number(const char* key, double value) {
    char digits[40];
    std::snprintf(digits, sizeof digits, "%.17g", value);
    open(key);
    out_ += digits;
  }
  void integer(const char* key, std::int64_t value) {
    open(key);
    out_ += std::to_string(value);
  }
  void pair(const char* key, std::int64_t first, std::int64_t second) {
    open(key);
    (out_ += '[') += std::to_string(first);
    (out_ += ", ") += std::to_string(second);
    out_ += ']';
  }
  void boolean(const char* key, bool value) {
    open(key);
    out_ += value ? "true" : "false";
  }
  /// One string per line of `text`.
  void lines(const char* key, std::string_view text) {
    open(key);
    out_ += "[";
    bool first = true;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = min_of(text.find('\n', at), text.size());
      if (!first) out_ += ", ";
      quote(text.substr(at, end - at));
      first = false;
      at = end + 1;
    }
    out_ += "]";
  }
  std::string close() { return out_ + "}"; }

 private:
  void open(const char* key) {
    out_ += out_.size() > 1 ? ", " : "";
    quote(key);
    out_ += ": ";
  }
  void quote(std::string_view value) {
    out_ += '"';
    for (const char c : value) {
      if (c == '"' || c == '\\') out_ += '\\';
      out_ += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    out_ += '"';
  }
  std::string out_ = "{";
};

}  // namespace

std::string explain(const Request& request) {
  const Problem& p = request.problem;
  const Kernel& kernel = *request.kernel;
  const char* file = kernel.pass == Pass::backward ? "backward" : kernel.pass == Pass::decode ? "decode" : "forward";
  Json json;
  json.text("kernel", kernel.name);
  json.text("backend", kernel.backend == Backend::cpu ? "cpu" : "cuda");
  json.text("arch", kernel.arch);
  json.text("pass", p.pass == Pass::backward ? "backward" : p.pass == Pass::decode ? "decode" : "forward");
  json.text("dtype", dtype_name(p.dtype));
  json.integer("batch", p.batch);
  json.integer("seq_q", p.seq_q);
  json.integer("seq_k", p.seq_k);
  json.integer("heads_q", p.heads_q);
  json.integer("heads_kv", p.heads_kv);
  json.integer("head_dim", p.head_dim);
  json.integer("head_dim_v", p.head_dim_v);
  json.boolean("causal", p.mask.causal);
  json.pair("window", p.mask.window_left, p.mask.window_right);
  json.boolean("varlen", p.mask.varlen);
  json.integer("threads", request.launch.threads);
  json.number("visible_pairs", visible_pairs(p));
  const double flops = convention_flops(p), bytes = operand_bytes(p);
  json.number("flops", flops);
  json.number("bytes", bytes);
  json.number("flops_per_byte", bytes > 0 ? flops / bytes : 0);
  json.integer("workspace_bytes", static_cast<std::int64_t>(request.workspace_needed));
  json.number("score_matrix_bytes", 4.0 * static_cast<double>(p.batch) * static_cast<double>(p.heads_q) *
                                        static_cast<double>(p.seq_q) * static_cast<double>(p.seq_k));
  const std::string_view arch = kernel.arch;
  std::string path = "src/api/c_api.cc\nsrc/core/registry.cc\nsrc/core/kernels.def\n";
  if (kernel.backend == Backend::cuda) {
    const Tiles tiles = kernel.tiles();
    json.integer("block_q", tiles.block_q);
    json.integer("block_k", tiles.block_k);
    json.integer("stages", tiles.stages);
    json.integer("block_threads", tiles.threads);
    json.integer("shared_bytes", tiles.shared_bytes);
    json.text("deterministic", kernel.pass == Pass::backward
                                   ? "by option: the default adds up dQ in whatever order the blocks come"
                                   : "always: the same bits in every run");
    const std::string folder = std::string("src/cuda/") + (arch == "sm86" ? "sm80" : kernel.arch) + "/";
    const std::string stem = folder + file + (p.dtype == DType::f32 ? "_f32" : "");
    path += stem + "_launch.cuh\n" + stem + ".cuh";
  } else {
    json.text("deterministic", "always: the same bits in every run and for any number of threads");
    path += (arch == "oracle" ? "src/oracle/" : "src/cpu/") + std::string(file) +
            (arch == "avx512bf16" ? "_bf16.cc"
             : arch == "amx"      ? "_amx.cc"
                                  : ".cc");
  }
  json.lines("path", path);
  json.lines("why", request.why);
  return json.close();
}

}  // namespace onepass::api
