// The options of a call, from a Python tuple in the order of `kOptionNames`.
#pragma once

#include "onepass/onepass.h"
#include "operand.h"

namespace onepass::python {

inline constexpr const char* kOptionNames[] = {
    "causal",       "top_left",       "window_left",   "window_right",  "cu_seqlens_q", "cu_seqlens_k",
    "max_seqlen_q", "max_seqlen_k",   "q_length",      "k_start",       "k_length",     "q_position",
    "scale",        "softcap",        "alibi_slopes",  "bias",          "sinks",        "dropout_p",
    "dropout_seed", "dropout_offset", "dropout_state", "deterministic", "validate",     "kernel"};

class Options {
 public:
  /// False: a Python error is set.
  bool read(PyObject* tuple, PyObject* threads);
  const onepass_options_t* get() const { return &options_; }

 private:
  onepass_options_t options_ = ONEPASS_OPTIONS_INIT;
  Operand operands_[10];
};

}  // namespace onepass::python
