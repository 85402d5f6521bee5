// The argument structs of the C ABI, checked and normalised.
#pragma once

#include <string>

#include "core/problem.h"
#include "core/registry.h"
#include "core/status.h"

namespace onepass::api {

/// One call, ready to launch.
struct Request {
  Problem problem;
  ForwardOperands forward;    // forward and decode
  BackwardOperands backward;  // backward
  Launch launch;
  const Kernel* kernel = nullptr;
  std::string why;  // filled when planning: the registry's reasons

  // decode only: keys and values to append, and where.
  Tensor k_new, v_new;
  std::int64_t seq_new = 0;
  const std::int32_t* cache_seqlens = nullptr;

  std::size_t workspace_needed = 0;
};

/// planning: data pointers may be null, nothing is read from the length arrays that have none, no workspace is asked
/// for. Otherwise every rule is checked and the workspace verified.
Status make_request(const onepass_forward_args_t& args, bool planning, Request* request);
Status make_request(const onepass_backward_args_t& args, bool planning, Request* request);
Status make_request(const onepass_decode_args_t& args, bool planning, Request* request);

}  // namespace onepass::api
