// A case as arguments of the C interface.
#pragma once

#include <deque>

#include "check/compare.h"
#include "onepass/onepass.h"

namespace onepass::check {

/// The args structs of a case. They point into the case and into this object: neither may move while they are used.
/// Change their fields to make requests that must be refused.
class AbiCall {
 public:
  explicit AbiCall(Case& c);
  AbiCall(const AbiCall&) = delete;
  AbiCall& operator=(const AbiCall&) = delete;

  onepass_options_t options = ONEPASS_OPTIONS_INIT;
  onepass_forward_args_t forward = ONEPASS_FORWARD_ARGS_INIT;
  onepass_backward_args_t backward = ONEPASS_BACKWARD_ARGS_INIT;

  /// The tensors as the mirror's device holds them; the workspace is for the caller to give then.
  void move(const DeviceMirror& mirror, int device = 0);

  /// Asks for the workspace and calls onepass_forward or onepass_backward; the text of a refusal on failure.
  Status run();

 private:
  struct Described {
    DLTensor tensor;
    std::int64_t shape[4], stride[4];
  };
  const DLTensor* describe(const void* data, DLDataType type, std::initializer_list<std::int64_t> shape,
                           std::initializer_list<std::int64_t> stride);
  const DLTensor* operand(const Array& array);
  const DLTensor* rows(const Array& array);
  const DLTensor* bias(const Array& array);
  const DLTensor* heads(const Array& array);
  const DLTensor* ints(const IntArray& array);
  void set_options(Case& c);

  Pass pass_;
  bool packed_;
  std::deque<Described> tensors_;
};

/// The case through the C interface, by check_draws. `kernel`: forced by name, or null.
Report check_abi(Case& c, const Reference& reference, const char* kernel = nullptr, int threads = 1);

}  // namespace onepass::check
