// One attention problem with its operands, run through the C interface.
#pragma once

#include <cmath>
#include <deque>
#include <nlohmann/json.hpp>
#include <string>

#include "array.h"
#include "check/device.h"

namespace onepass::cli {

struct Attention {
  Array q, k, v;  // 4 dimensions, or 3 with cu_seqlens; k and v are the caches of a decode
  Array cu_seqlens_q, cu_seqlens_k, q_length, k_start, k_length, q_position, cache_seqlens;
  Array alibi, bias, sinks;
  Array out, lse, grad_out;
  Array grad_q, grad_k, grad_v, grad_bias, grad_sinks;

  bool causal = false;
  onepass_align_t align = ONEPASS_BOTTOM_RIGHT;
  std::int64_t window_left = -1, window_right = -1;
  std::int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  double scale = NAN, softcap = 0;
  int deterministic = -1, threads = 0;
  bool on_device = false;  // computed on copies in CUDA memory
  std::string kernel;      // empty: chosen. Forces the pass that it serves, leaves the other one free

  bool packed() const { return static_cast<bool>(cu_seqlens_q) || static_cast<bool>(cu_seqlens_k); }
  std::vector<std::int64_t> out_shape() const;
  std::vector<std::int64_t> lse_shape() const;

  /// Makes the outputs of a pass in memory.
  Status allocate_outputs(onepass_pass_t pass);
  /// Planned operands for `explain`, without memory.
  void plan_outputs(onepass_pass_t pass);

  /// What would run, as onepass_explain says it.
  Result<nlohmann::ordered_json> explain(onepass_pass_t pass) const;
};

/// The argument structs of an attention, which may neither move nor change its shapes while this is used.
struct Call {
  Call(const Attention& attention, onepass_pass_t pass);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  const void* args() const;
  /// Host memory of the tensors that are to lie on the device, and their move to where `place` says.
  std::vector<check::Block> blocks() const;
  void move(const std::function<void*(void*)>& place);

  onepass_pass_t pass;
  onepass_options_t options = ONEPASS_OPTIONS_INIT;
  onepass_forward_args_t forward = ONEPASS_FORWARD_ARGS_INIT;
  onepass_backward_args_t backward = ONEPASS_BACKWARD_ARGS_INIT;
  onepass_decode_args_t decode = ONEPASS_DECODE_ARGS_INIT;

 private:
  std::deque<DLTensor> placed_;  // on the device
};

/// A call with its workspace, to run as often as one likes.
class Runner {
 public:
  /// On the device, tensors that `shared` holds are used there, the others are uploaded.
  Status prepare(const Attention& attention, onepass_pass_t pass,
                 std::shared_ptr<const check::DeviceMirror> shared = nullptr);
  /// Runs the call; on the device, launches it.
  Status run() const;
  /// Brings the results of a call on the device back to the attention's arrays.
  Status fetch() const;
  /// Seconds a call, over `calls` of them.
  Result<double> seconds(int calls) const;

 private:
  std::unique_ptr<Call> call_;
  std::shared_ptr<void> workspace_;
  std::shared_ptr<const check::DeviceMirror> shared_, own_;  // on the device only
};

/// The library's refusal as a Status.
Status status_of(onepass_status_t code);

}  // namespace onepass::cli
