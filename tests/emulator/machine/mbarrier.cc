#include "emulator/machine/mbarrier.h"

#include <cstring>

#include "emulator/machine/units.h"

namespace onepass::emulator {
namespace {

constexpr std::uint64_t kMark = 0xb7;
constexpr std::int64_t kMostBytes = (1 << 20) - 1;  // of a phase

/// The eight bytes in shared memory, marked, so that whatever overwrites a barrier is noticed.
struct Barrier {
  std::int64_t count, left, bytes, phase;

  static Barrier load(const unsigned char* at) {
    std::uint64_t x;
    std::memcpy(&x, at, sizeof x);
    if (x >> 56 != kMark) fault("no mbarrier at this address, or it was overwritten");
    return {static_cast<std::int64_t>(x & 0x7ff), static_cast<std::int64_t>(x >> 11 & 0x7ff),
            static_cast<std::int64_t>(x >> 22 & 0x3fffff) - (1 << 21), static_cast<std::int64_t>(x >> 44 & 1)};
  }
  void store(unsigned char* at) const {
    const std::uint64_t x = kMark << 56 | static_cast<std::uint64_t>(phase) << 44 |
                            static_cast<std::uint64_t>(bytes + (1 << 21)) << 22 |
                            static_cast<std::uint64_t>(left) << 11 | static_cast<std::uint64_t>(count);
    std::memcpy(at, &x, sizeof x);
  }
};

/// Ends the phase if nothing is missing.
void settle(Block& block, Barrier barrier, unsigned char* at) {
  const bool ends = barrier.left == 0 && barrier.bytes == 0;
  if (ends) {
    barrier.left = barrier.count;
    barrier.phase ^= 1;
  }
  barrier.store(at);
  if (ends) units(block).sleepers[at].wake();
}

}  // namespace

void mbarrier_init(std::uint32_t address, int count) {
  if (count < 1 || count > 1024) fault("mbarrier.init with %d threads", count);
  units(block());
  Barrier{count, count, 0, 0}.store(shared(address, 8, 8));
}

void mbarrier_arrive(std::uint32_t address, int bytes) {
  unsigned char* at = shared(address, 8, 8);
  Barrier barrier = Barrier::load(at);
  if (barrier.left == 0)
    fault("mbarrier at %u: one thread more than the %lld of a phase arrives", address - kSharedBase,
          static_cast<long long>(barrier.count));
  --barrier.left;
  barrier.bytes += bytes;
  if (barrier.bytes > kMostBytes) fault("mbarrier at %u: more bytes than it counts", address - kSharedBase);
  settle(block(), barrier, at);
  progress();
}

bool mbarrier_test(std::uint32_t address, std::uint32_t parity) {
  if (parity > 1) fault("mbarrier parity %u", parity);
  return Barrier::load(shared(address, 8, 8)).phase != static_cast<std::int64_t>(parity);
}

void mbarrier_wait(std::uint32_t address, std::uint32_t parity) {
  unsigned char* at = shared(address, 8, 8);
  while (!mbarrier_test(address, parity)) {
    units(block()).sleepers[at].wait("mbarrier", static_cast<int>(address - kSharedBase));
  }
}

void mbarrier_complete(Block& block, unsigned char* at, int bytes) {
  Barrier barrier = Barrier::load(at);
  barrier.bytes -= bytes;
  settle(block, barrier, at);
}

}  // namespace onepass::emulator
