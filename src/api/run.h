// Calls that are more than one kernel: decode with its append, and merge.
#pragma once

#include "api/request.h"

namespace onepass::api {

/// Appends k_new and v_new to the caches, then attends to what each cache holds.
Status run_decode(Request& request);
Status run_merge(const onepass_merge_args_t& args);

/// "f32 f16" for kF32 | kF16.
const char* dtype_list(unsigned dtypes);

}  // namespace onepass::api
