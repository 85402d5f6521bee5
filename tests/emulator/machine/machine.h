// A GPU for the shims in tests/emulator/shims: thread blocks whose threads are fibers, warps that act together, named
// barriers, shared memory by 32-bit address, operations that take effect later. One thread of the host runs it all, in
// an order and with delays that a seed decides, as badly as the rules allow:
//   - Of the warps that can run, the one with the highest of random priorities runs; now and then one is drawn anew
//     (Burckhardt et al., "A randomized scheduler with probabilistic guarantees of finding bugs", 2010).
//   - Two to four blocks are under way at once; in half of the launches blocks begin in any order.
//   - An asynchronous operation happens when the wait that covers it ends; one of four at any moment before.
//   - Shared memory begins as NaN.
// A rule that is broken is a Fault, and the launch's error.
#pragma once

#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check/random.h"
#include "core/status.h"
#include "emulator/machine/fiber.h"

namespace onepass::emulator {

inline constexpr int kWarp = 32, kBarriers = 16;
/// Shared memory of a block: its first address in the shared window, and the most there is (9.0).
inline constexpr std::uint32_t kSharedBase = 1024;
inline constexpr std::int64_t kMostShared = 227 * 1024;

/// A rule of the machine that a kernel broke.
struct Fault {
  std::string text;
};
[[noreturn, gnu::format(printf, 1, 2)]] void fault(const char* format, ...);

/// What an instruction began and what happens once, at some later moment. The effect runs on no thread: it holds
/// addresses of the host, not of the shared window.
class Operation {
 public:
  explicit Operation(std::function<void()> effect) : effect_(std::move(effect)) {}
  bool done() const { return !effect_; }
  void perform();

 private:
  std::function<void()> effect_;
};
using Pending = std::shared_ptr<Operation>;

/// A thread's operations in groups, of which it waits for all but the newest few (cp.async, bulk copies, wgmma).
class Groups {
 public:
  void add(std::function<void()> effect);
  /// Closes the group of the operations since the last one.
  void commit();
  /// Every closed group but the newest `pending` has happened.
  void wait(std::size_t pending);
  /// Those of a thread that has ended: they happen before the block does.
  void finish();

 private:
  static void perform(std::vector<Pending>& group);

  std::vector<Pending> open_;
  std::deque<std::vector<Pending>> closed_;
};

struct Warp;
struct Block;

/// A thread.
struct Lane {
  enum class State : std::uint8_t { ready, waiting, finished };

  Warp* warp = nullptr;
  int thread = 0;  // in its block
  State state = State::finished;
  const char* waits_for = nullptr;
  int number = -1;  // of the barrier that it waits for
  Suspended suspended = nullptr;
  std::unique_ptr<Stack> stack;
  Groups copies;  // cp.async
};

struct Warp {
  Block* block = nullptr;
  Lane* lanes = nullptr;
  int ready = 0;  // lanes that can run
  std::int64_t priority = 0;
  // Where its lanes gather for an instruction that all execute as one.
  const char* what = nullptr;
  int gathered = 0;
  void* data[kWarp] = {};
};

/// Warps that wait for one event.
struct Waiters {
  std::vector<Warp*> warps;

  /// The whole warp: called by the lane for which gather() was true.
  void wait(const char* what, int number);
  void wake();
};

/// Threads that wait for one event, each for itself.
struct Sleepers {
  std::vector<Lane*> lanes;

  void wait(const char* what, int number);
  void wake();
};

struct NamedBarrier {
  int arrived = 0, expected = 0;  // threads
  Waiters waiters;
};

/// What a block has besides, for instructions that few kernels use.
struct Unit {
  virtual ~Unit() = default;
  /// The last thread of the block has ended.
  virtual void end() = 0;
};

struct Block {
  std::int64_t index = -1;
  int threads = 0, finished = 0;
  std::int64_t shared_bytes = 0;
  std::vector<unsigned char> memory;  // guard, shared memory, guard
  unsigned char* shared = nullptr;
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  NamedBarrier barriers[kBarriers];
  bool some = false;                   // of the block's threads said so, __syncthreads_or
  std::vector<Pending> at_any_moment;  // operations that need not be waited for to happen
  std::vector<Pending> at_last;        // slower than all of those
  std::unique_ptr<Unit> unit;
};

/// A line for each run of threads that wait for the same.
std::string describe_wait(const std::vector<std::unique_ptr<Block>>& blocks);

/// The thread that runs.
Lane& lane();
inline Block& block() {
  return *lane().warp->block;
}
/// Random numbers of the launch.
check::Random& random();

/// Lets others run, in a loop that waits for another thread's write.
void pause();
/// Something happened that others may wait for in such a loop.
void progress();

/// True in the lane of a warp that comes last; the others wait until it calls release(), or for what it hands them to.
/// Every lane of a warp must come, and for the same.
bool gather(const char* what, void* data);
void release(Warp& warp);

/// All lanes of a warp together: act(data) with data[i] that of lane i.
template <class Data, class Act>
void together(const char* what, Data& data, Act&& act) {
  if (!gather(what, &data)) return;
  Warp& warp = *lane().warp;
  Data* all[kWarp];
  for (int i = 0; i < kWarp; ++i) all[i] = static_cast<Data*>(warp.data[i]);
  act(all);
  release(warp);
}

/// Named barrier `id` of `threads` threads; to arrive at it without waiting for the others.
void barrier(int id, int threads, bool wait);

/// An operation that happens at any moment, in the end when nothing else can.
void at_any_moment(std::function<void()> effect);
/// One that is slow: now and then, and when no other can happen either.
void at_last(std::function<void()> effect);

/// `bytes` bytes at an address of the shared window, a multiple of `alignment`; and the address of a shared object.
unsigned char* shared(std::uint32_t address, int bytes, int alignment);
std::uint32_t shared_address(const void* pointer);

/// What `red` and bulk reductions add in global memory: float32, with numbers below the smallest normal one taken, and
/// left, as 0 (PTX ISA, "red").
inline void add_flushed(float& sum, float x) {
  const auto flush = [](float y) { return std::abs(y) < 0x1p-126f ? std::copysign(0.0f, y) : y; };
  sum = flush(flush(sum) + flush(x));
}

/// Global memory that instructions may reach; without any, all of it.
void allow_global(const void* data, std::int64_t bytes);
void forget_global();
void check_global(const void* data, std::int64_t bytes, int alignment, const char* what);

/// Every launch from here on draws from this seed; launches of one seed repeat exactly.
void set_seed(std::uint64_t seed);

/// Runs `body` on every thread of `blocks` blocks.
Status run_grid(std::int64_t blocks, int threads, std::int64_t shared_bytes, const std::function<void()>& body);

/// threadIdx, blockIdx, blockDim, gridDim: of the thread that runs.
struct Place {
  unsigned x = 0, y = 0, z = 0;
};
struct Places {
  Place thread, block, block_size, grid;
};
extern Places places;

}  // namespace onepass::emulator
