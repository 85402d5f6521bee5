#include "emulator/machine/machine.h"

namespace onepass::emulator {

void barrier(int id, int threads, bool wait) {
  struct Call {
    int id, threads;
    bool wait;
  } call = {id, threads, wait};
  if (!gather("barrier", &call)) return;
  Warp& warp = *lane().warp;
  for (const void* data : warp.data) {
    const Call& other = *static_cast<const Call*>(data);
    if (other.id != id || other.threads != threads || other.wait != wait)
      fault("lanes of a warp at different barriers");
  }
  if (id < 0 || id >= kBarriers) fault("barrier %d: there are %d", id, kBarriers);
  if (threads <= 0 || threads % kWarp != 0 || threads > block().threads) {
    fault("barrier %d of %d threads in a block of %d", id, threads, block().threads);
  }
  NamedBarrier& at = block().barriers[id];
  if (at.arrived > 0 && at.expected != threads) fault("barrier %d of %d threads and of %d", id, threads, at.expected);
  at.expected = threads;
  at.arrived += kWarp;
  if (at.arrived == threads) {
    at.arrived = 0;
    at.waiters.wake();
    progress();
    release(warp);
  } else if (wait) {
    at.waiters.wait("barrier", id);
  } else {
    release(warp);
  }
}

}  // namespace onepass::emulator
