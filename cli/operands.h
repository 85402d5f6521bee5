// The operands of `onepass run`: tensors as a file stores them, and the same memory as the C interface takes it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "options.h"
#include "source.h"

namespace onepass::cli {

struct RunOptions : Options {
  std::string file, out, layout = "bshd";
  std::string q = "q", k = "k", v = "v";
  bool check = false;
};

/// Where the outer dimensions of a stored tensor are.
struct StoredLayout {
  bool heads_first = false;  // (batch, heads, seq, dim), or (heads, seq, dim)
  bool packed = false;       // three dimensions are packed sequences, not batch 1

  /// (batch, seq, heads, dim), or (tokens, heads, dim) when packed.
  Array operand(const Array& stored) const;
  /// (batch, heads, seq), or (heads, tokens) when packed.
  Array rows(const Array& stored) const;
};

/// What a run reads and writes.
struct Operands {
  Attention attention;
  std::vector<std::pair<std::string, Array>> outputs;  // as they will be stored
  std::string notes;                                   // lines for the report: what was taken by default
};

Status load_operands(const RunOptions& options, Operands& operands);

/// Writes the outputs to a .safetensors file, or to .npy files: OUT.npy for the output, OUT.NAME.npy for the others.
/// All of them appear, or none. Adds a line for the report.
Status write_outputs(const Operands& operands, const std::string& kernel, const std::string& path, std::string& report);
/// Refuses early what write_outputs could not write.
Status check_output(const std::string& path);

}  // namespace onepass::cli
