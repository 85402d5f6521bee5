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
  /// `where` is the number of threads on the CPU, or (stream, allocate) on a device: a stream's address, and a function
  /// of a byte count that gives (owner, address) of device memory. False: a Python error is set.
  bool read(PyObject* tuple, PyObject* where);
  const onepass_options_t* get() const { return &options_; }
  /// Borrowed; null on the CPU.
  PyObject* allocate() const { return allocate_; }

 private:
  onepass_options_t options_ = ONEPASS_OPTIONS_INIT;
  PyObject* allocate_ = nullptr;
  Operand operands_[10];
};

/// Reads `where` into a thread count or a stream, and the allocator of the latter.
bool read_where(PyObject* where, std::int32_t* threads, void** stream, PyObject** allocate);

}  // namespace onepass::python
