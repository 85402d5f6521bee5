#include "options.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "cpu/parallel.h"

namespace onepass::cli {
namespace {

template <class T>
bool parse_number(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

void add_tensor(CLI::App& app, const char* name, std::string& tensor, const char* text) {
  add_name(app, name, tensor, text)->type_name("NAME|FILE.npy");
}

void parse_window(const std::string& text, Options& options) {
  const std::vector<std::string> sides = split(text, ',');
  std::int64_t left = 0, right = 0;
  if (sides.size() != 2 || !parse_number(sides[0], left) || !parse_number(sides[1], right) || left < -1 || right < -1) {
    refuse("--window", "takes LEFT,RIGHT, each -1 (unbounded) or more", text, "--window 128,0");
  }
  options.window_left = left;
  options.window_right = right;
}

void parse_dtypes(const std::string& text, Options& options) {
  options.dtypes.clear();
  for (const std::string& name : split(text, ',')) {
    const std::optional<ElementType> type = element_type_of_name(name);
    const bool known = type && *type <= ElementType::bf16;  // f64 f32 f16 bf16 come first
    if (!known) {
      const std::string near = nearest(name, {"f32", "f16", "bf16", "f64"});
      refuse("--dtype", "one of f32 f16 bf16, or f64 for the reference kernel", name, near.empty() ? "f32" : near);
    }
    options.dtypes.push_back(*type);
  }
}

double parse_double(const char* option, const std::string& text) {
  double value = 0;
  if (!parse_number(text, value)) refuse(option, "takes a number", text, "leave it out for the default");
  return value;
}

}  // namespace

void refuse(const std::string& option, const std::string& rule, const std::string& value, const std::string& choice) {
  throw CLI::ValidationError(option, rule + ": got '" + printable(value, 60) + "'; nearest: " + choice);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  for (std::size_t end = 0; end != std::string::npos; begin = end + 1) {
    end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end == std::string::npos ? end : end - begin));
  }
  return parts;
}

std::vector<std::int64_t> parse_sizes(const std::string& option, const std::string& text) {
  std::vector<std::int64_t> sizes;
  for (const std::string& part : split(text, ',')) {
    std::int64_t size = 0;
    if (!parse_number(part, size) || size < 0)
      refuse(option, "takes whole numbers of 0 or more", part, option + " 512,1024");
    sizes.push_back(size);
  }
  return sizes;
}

std::string nearest(const std::string& word, const std::vector<std::string>& candidates) {
  std::string best;
  // Up to half of the word wrong, or two letters, but never all of it.
  std::size_t best_distance = std::min(std::max<std::size_t>(word.size() / 2, 2) + 1, word.size());
  for (const std::string& candidate : candidates) {
    // Edit distance, one row at a time.
    std::vector<std::size_t> row(candidate.size() + 1);
    for (std::size_t j = 0; j < row.size(); ++j) row[j] = j;
    for (std::size_t i = 0; i < word.size(); ++i) {
      std::size_t diagonal = std::exchange(row[0], i + 1);
      for (std::size_t j = 0; j < candidate.size(); ++j) {
        const std::size_t replaced = diagonal + (word[i] == candidate[j] ? 0 : 1);
        diagonal = std::exchange(row[j + 1], std::min({replaced, row[j] + 1, row[j + 1] + 1}));
      }
    }
    if (row.back() < best_distance) {
      best_distance = row.back();
      best = candidate;
    }
  }
  return best;
}

onepass_pass_t parse_pass(const std::string& text) {
  if (text == "fwd" || text == "forward") return ONEPASS_FORWARD;
  if (text == "bwd" || text == "backward") return ONEPASS_BACKWARD;
  if (text == "decode") return ONEPASS_DECODE;
  const std::string near = nearest(text, {"fwd", "bwd", "decode"});
  refuse("--pass", "one of fwd bwd decode", text, near.empty() ? "fwd" : near);
}

const char* pass_name(onepass_pass_t pass) {
  return pass == ONEPASS_FORWARD ? "fwd" : pass == ONEPASS_BACKWARD ? "bwd" : "decode";
}

void add_sizes(CLI::App& app, const char* name, std::vector<std::int64_t>& list, const char* text) {
  app.add_option_function<std::string>(
         name, [name, &list](const std::string& value) { list = parse_sizes(name, value); }, text)
      ->type_name("N[,N...]");
}

CLI::Option* add_name(CLI::App& app, const char* name, std::string& target, const char* text) {
  // An empty name is a script's unset variable, not a wish for the default.
  return app.add_option_function<std::string>(
      name,
      [name, &target](const std::string& value) {
        if (value.empty()) refuse(name, "takes a name", value, "leave it out");
        target = value;
      },
      text);
}

void add_integer(CLI::App& app, const char* name, int& target, int lowest, int highest, const char* text) {
  app.add_option_function<std::string>(
         name,
         [=, &target](const std::string& value) {
           int number = 0;
           if (parse_number(value, number) && number >= lowest && number <= highest) {
             target = number;
             return;
           }
           const bool above = parse_number(value, number) && number > highest;
           refuse(name, "takes a whole number from " + std::to_string(lowest) + " to " + std::to_string(highest), value,
                  std::to_string(above ? highest : lowest));
         },
         text)
      ->type_name("N");
}

void add_dtype_option(CLI::App& app, Options& o) {
  app.add_option_function<std::string>(
         "--dtype", [&o](const std::string& text) { parse_dtypes(text, o); }, "f32, f16 or bf16")
      ->type_name("TYPE");
}

void add_mask_options(CLI::App& app, Options& o) {
  app.add_flag("--causal", o.causal, "keys up to the query's own position");
  app.add_option_function<std::string>(
         "--window", [&o](const std::string& text) { parse_window(text, o); },
         "keys from position - L to position + R; -1: unbounded")
      ->type_name("L,R");
}

void add_execution_options(CLI::App& app, Options& o) {
  add_integer(app, "--threads", o.threads, 0, 1024, "CPU threads (default: all)");
  app.add_option_function<std::string>(
         "--seed",
         [&o](const std::string& text) {
           if (!parse_number(text, o.seed)) refuse("--seed", "takes a whole number from 0 to 2^64 - 1", text, "0");
         },
         "of every random number (default 0)")
      ->type_name("N");
  CLI::Option* json =
      app.add_option("--json", o.json_file, "JSON to a file, or to standard output instead of the report")
          ->expected(0, 1)
          ->type_name("[FILE]");
  app.parse_complete_callback([&o, json] {
    o.json = json->count() > 0;
    if (o.json_file == "-") o.json_file.clear();
    for (const char* ending : {".safetensors", ".npy"}) {
      // `--json data.safetensors` is a forgotten order of arguments, not a wish to replace tensors by JSON.
      if (o.json_file.ends_with(ending))
        refuse("--json", "writes JSON", o.json_file, "put --json last, or --json FILE.json");
    }
  });
}

void add_common_options(CLI::App& app, Options& o) {
  app.add_option("--backend", o.backend, "auto, cpu or cuda")->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  app.add_option_function<std::string>(
         "--kernel",
         [&o](const std::string& text) {
           o.kernels = split(text, ',');
           for (const std::string& kernel : o.kernels) {
             if (kernel.empty()) refuse("--kernel", "takes names of `onepass info`", text, "leave it out");
           }
         },
         "run this kernel of `onepass info` and no other")
      ->type_name("NAME");
  add_dtype_option(app, o);
  add_sizes(app, "--batch", o.batch, "sequences");
  add_sizes(app, "--seq", o.seq, "query rows and keys");
  add_sizes(app, "--seq-q", o.seq_q, "query rows");
  add_sizes(app, "--seq-k", o.seq_k, "keys");
  add_sizes(app, "--heads", o.heads, "query heads and KV heads");
  add_sizes(app, "--heads-q", o.heads_q, "query heads");
  add_sizes(app, "--heads-kv", o.heads_kv, "KV heads");
  add_sizes(app, "--head-dim", o.head_dim, "of q and k");
  add_sizes(app, "--head-dim-v", o.head_dim_v, "of v and the output (default: head-dim)");
  add_mask_options(app, o);
  app.add_option_function<std::string>(
         "--align",
         [&o](const std::string& text) { o.align = text == "top-left" ? ONEPASS_TOP_LEFT : ONEPASS_BOTTOM_RIGHT; },
         "which corner causal and windows line up with: bottom-right (default) or top-left")
      ->check(CLI::IsMember({"bottom-right", "top-left"}))
      ->type_name("CORNER");
  app.add_option_function<std::string>(
         "--scale", [&o](const std::string& text) { o.scale = parse_double("--scale", text); },
         "of the scores (default 1/sqrt(head-dim))")
      ->type_name("X");
  app.add_option_function<std::string>(
         "--softcap", [&o](const std::string& text) { o.softcap = parse_double("--softcap", text); },
         "scores become X tanh(score / X); 0: none")
      ->type_name("X");
  add_tensor(app, "--sinks", o.sinks, "one more logit a query head: (heads_q)");
  add_tensor(app, "--bias", o.bias, "added to the scores: broadcastable to (batch, heads_q, seq_q, seq_k)");
  add_tensor(app, "--alibi", o.alibi, "slopes: (heads_q) or (batch, heads_q)");
  add_tensor(app, "--cu-seqlens-q", o.cu_seqlens_q, "packed sequences: (batch + 1) offsets");
  add_tensor(app, "--cu-seqlens-k", o.cu_seqlens_k, "the same of the keys");
  add_tensor(app, "--q-length", o.q_length, "padded batches: (batch) query rows in use");
  add_tensor(app, "--k-start", o.k_start, "(batch) first key in use");
  add_tensor(app, "--k-length", o.k_length, "(batch) keys in use");
  add_tensor(app, "--q-position", o.q_position, "(batch) key position of query 0");
  app.add_flag("--backward", o.backward, "the gradients too");
  add_tensor(app, "--grad-out", o.grad_out, "gradient of the output, with --backward");
  app.add_flag("--deterministic", o.deterministic, "the same bits in every run");
  add_execution_options(app, o);
}

bool Options::has_sizes() const {
  return !(batch.empty() && seq.empty() && seq_q.empty() && seq_k.empty() && heads.empty() && heads_q.empty() &&
           heads_kv.empty() && head_dim.empty() && head_dim_v.empty());
}

int Options::thread_count() const {
  return threads > 0 ? threads : cpu::default_threads();
}

void Options::apply(Attention& attention) const {
  attention.causal = causal;
  attention.window_left = window_left;
  attention.window_right = window_right;
  attention.align = align;
  attention.scale = scale;
  attention.softcap = softcap;
  attention.deterministic = deterministic ? 1 : -1;
  attention.threads = threads;
  attention.on_device = backend == "cuda";
}

Result<std::int64_t> single(const std::vector<std::int64_t>& list, const char* option, std::int64_t otherwise) {
  if (list.size() > 1) {
    return usage_error("%s takes one size here: got %zu; nearest: %s %lld", option, list.size(), option,
                       static_cast<long long>(list[0]));
  }
  return list.empty() ? otherwise : list[0];
}

Result<std::string> single_kernel(const Options& options) {
  if (options.kernels.size() > 1) {
    return usage_error("--kernel takes one name here: got %zu; nearest: --kernel %s", options.kernels.size(),
                       printable(options.kernels[0], 64).c_str());
  }
  return options.kernels.empty() ? std::string() : options.kernels[0];
}

}  // namespace onepass::cli
