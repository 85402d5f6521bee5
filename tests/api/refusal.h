// A good request for the C interface, and the check that a bad one is refused with nothing written.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "check/abi.h"

namespace onepass {

using check::AbiCall;
using check::Case;
using check::CaseSpec;

inline CaseSpec small_spec(Pass pass = Pass::forward) {
  CaseSpec spec;
  spec.pass = pass;
  spec.batch = 2;
  spec.seq_q = 9;
  spec.seq_k = 13;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.head_dim = 16;
  spec.head_dim_v = 24;
  return spec;
}

/// Changes one thing of a good request; the call must refuse it, say `part`, and write nothing.
inline void expect_refused(const CaseSpec& spec, const std::function<void(AbiCall&)>& change, const char* part,
                           onepass_status_t code = ONEPASS_INVALID_ARGUMENT) {
  Case c(spec);
  AbiCall call(c);
  std::vector<char> workspace(1 << 22, 'w');
  void* aligned = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(workspace.data()) + 63) / 64 * 64);
  call.forward.workspace = call.backward.workspace = aligned;
  call.forward.workspace_size = call.backward.workspace_size = workspace.size() - 64;
  change(call);
  c.reset();
  const std::vector<char> workspace_before = workspace;
  const onepass_status_t status =
      spec.pass == Pass::backward ? onepass_backward(&call.backward) : onepass_forward(&call.forward);
  EXPECT_EQ(status, code) << part << " | " << onepass_last_error();
  const std::string text = onepass_last_error();
  EXPECT_NE(text.find(part), std::string::npos) << "said: " << text << "\nwanted: " << part;
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_EQ(workspace, workspace_before);
  for (const std::string& fault : c.faults()) ADD_FAILURE() << part << ": " << fault;
  const auto expect_untouched = [&](const check::Array& array) {
    bool written = false;
    array.each([&](const check::Index&, std::int64_t offset) { written |= !std::isnan(array.get(offset)); });
    EXPECT_FALSE(written) << part << ": an output was written";
  };
  expect_untouched(spec.pass == Pass::backward ? c.grad_q : c.out);
}

inline DLTensor& mutate(const DLTensor* tensor) {
  return *const_cast<DLTensor*>(tensor);
}

}  // namespace onepass
