// What is known of the processor besides the instruction sets in core/registry.h.
#pragma once

namespace onepass {

/// The processor's name for people, "unknown" if the system does not tell.
const char* cpu_model_name();

}  // namespace onepass
