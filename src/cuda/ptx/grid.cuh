// One grid after another in a stream (programmatic dependent launch, sm_90). PTX ISA, "griddepcontrol".
#pragma once

namespace onepass::ptx {

/// Waits until the grids before this one have ended and what they wrote is seen here. Before the first access to global
/// memory, by every thread.
__device__ __forceinline__ void await_earlier_grids() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
/// The next grid may start where there is room for it, and wait there for this one's end. After await_earlier_grids(),
/// so that it can count on the ends of those.
__device__ __forceinline__ void admit_next_grid() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace onepass::ptx
