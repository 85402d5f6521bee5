// The options that every command shares, read once, in one place.
#pragma once

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "attention.h"

namespace onepass::cli {

/// Lists hold what was given, in order; empty: nothing was.
struct Options {
  std::string backend = "auto";
  std::vector<std::string> kernels;
  std::vector<ElementType> dtypes;
  std::vector<std::int64_t> batch, seq, seq_q, seq_k, heads, heads_q, heads_kv, head_dim, head_dim_v;

  bool causal = false;
  std::int64_t window_left = -1, window_right = -1;
  onepass_align_t align = ONEPASS_BOTTOM_RIGHT;
  double scale = NAN, softcap = 0;

  // Tensors, by name in FILE or as an .npy file.
  std::string sinks, bias, alibi;
  std::string cu_seqlens_q, cu_seqlens_k, q_length, k_start, k_length, q_position;

  bool backward = false;
  std::string grad_out;
  bool deterministic = false;
  int threads = 0;
  std::uint64_t seed = 0;

  bool json = false;
  std::string json_file;  // empty: standard output

  /// True if the report goes to standard output: always, unless the JSON does.
  bool report_on_stdout() const { return !json || !json_file.empty(); }
  /// The sizes as options give them: "--seq" and so on.
  bool has_sizes() const;
  /// --threads, or what the library takes by default.
  int thread_count() const;
  /// Mask, scores and execution, for one problem.
  void apply(Attention& attention) const;
};

void add_common_options(CLI::App& app, Options& options);
// Parts of them, for commands that take no others.
/// Text that must not be empty, and a whole number within bounds, decimal only.
CLI::Option* add_name(CLI::App& app, const char* name, std::string& target, const char* text);
void add_integer(CLI::App& app, const char* name, int& target, int lowest, int highest, const char* text);
void add_sizes(CLI::App& app, const char* name, std::vector<std::int64_t>& list, const char* text);
void add_dtype_option(CLI::App& app, Options& options);
void add_mask_options(CLI::App& app, Options& options);       // --causal, --window
void add_execution_options(CLI::App& app, Options& options);  // --threads, --seed, --json

/// The list's one entry, or `otherwise` where it is empty; refuses more than one.
Result<std::int64_t> single(const std::vector<std::int64_t>& list, const char* option, std::int64_t otherwise);
Result<std::string> single_kernel(const Options& options);

/// Refuses a backend, and a kernel of another one, that this build or machine has nothing for.
Status check_backend(const Options& options);

/// A kernel of a pass that is not run would be ignored.
Status check_kernel_pass(const Options& options, bool forward, bool backward);

/// Refuses common options that would be ignored: all that are given and not in `used`.
Status check_used(const CLI::App& command, std::initializer_list<const char*> used, const char* why);
/// For commands that make their own operands: refuses --grad-out, and --backward beside passes without it.
Status check_backward(const Options& options, const std::vector<onepass_pass_t>& passes);

/// "1,2,512" as numbers that are not negative.
std::vector<std::int64_t> parse_sizes(const std::string& option, const std::string& text);
std::vector<std::string> split(const std::string& text, char separator);

/// Refuses an option's value, as one line.
[[noreturn]] void refuse(const std::string& option, const std::string& rule, const std::string& value,
                         const std::string& choice);

/// The candidate most like `word`, for refusals; empty if none is near.
std::string nearest(const std::string& word, const std::vector<std::string>& candidates);

/// forward, backward, decode, as --pass names them.
onepass_pass_t parse_pass(const std::string& text);
const char* pass_name(onepass_pass_t pass);

}  // namespace onepass::cli
