// The caller's argument structs, read by their size, and onepass_options_t checked into the problem.
#pragma once

#include "core/problem.h"
#include "core/status.h"

namespace onepass::api {

/// A copy of a caller's struct: the fields its struct_size covers, defaults behind. Refuses sizes no version had.
template <class Args>
Status read_args(const void* given, const Args& defaults, const char* name, Args* args);

/// The options, or the defaults if `given` is null.
Status read_options(const onepass_options_t* given, onepass_options_t* options);

/// Threads that a call may ask for.
inline constexpr std::int32_t kMaxThreads = 1024;
Status read_flag(const char* name, std::int32_t value, std::int32_t lowest, std::int32_t highest);

/// Fill problem->mask and problem->score; the sizes are known already. planning: data pointers may be null.
Status read_mask(const onepass_options_t& options, bool planning, Problem* problem);
Status read_scores(const onepass_options_t& options, bool planning, Problem* problem);

}  // namespace onepass::api
