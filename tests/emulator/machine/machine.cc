#include "emulator/machine/machine.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <numeric>

namespace onepass::emulator {

Places places;

namespace {

constexpr std::size_t kGuard = 1024;
constexpr unsigned char kGuardByte = 0xa5, kNanByte = 0xff;
constexpr double kAtOnce = 0.125, kSometime = 0.125;  // else at the last moment
constexpr std::int64_t kPatience = 20'000;            // pauses without progress

struct Range {
  std::uintptr_t begin, end;
};

/// One launch at a time.
struct Machine {
  std::uint64_t seed = 0, launches = 0;
  check::Random random{0};
  const std::function<void()>* body = nullptr;
  std::vector<std::unique_ptr<Block>> blocks;  // at work
  std::vector<std::unique_ptr<Block>> idle;
  Lane* current = nullptr;
  Suspended scheduler = nullptr;
  std::string error;
  std::int64_t lowest = 0, pauses = 0;
  std::vector<Range> global;
};
Machine machine;

void enter(Lane& lane) {
  machine.current = &lane;
  places.thread.x = static_cast<unsigned>(lane.thread);
  places.block.x = static_cast<unsigned>(lane.warp->block->index);
  onepass_emulator_switch(&machine.scheduler, lane.suspended);
  machine.current = nullptr;
}

void leave() {
  onepass_emulator_switch(&machine.current->suspended, machine.scheduler);
}

void set_state(Lane& lane, Lane::State state) {
  lane.warp->ready += (state == Lane::State::ready) - (lane.state == Lane::State::ready);
  lane.state = state;
}

void wait_here(const char* what, int number = -1) {
  Lane& lane = *machine.current;
  lane.waits_for = what;
  lane.number = number;
  set_state(lane, Lane::State::waiting);
  leave();
}

/// What a thread does from its beginning to its end.
void live() {
  try {
    (*machine.body)();
    machine.current->copies.finish();
  } catch (const Fault& fault) {
    const Lane& lane = *machine.current;
    machine.error = "block " + std::to_string(lane.warp->block->index) + " thread " + std::to_string(lane.thread) +
                    ": " + fault.text;
  }
  Lane& lane = *machine.current;
  set_state(lane, Lane::State::finished);
  ++lane.warp->block->finished;
  progress();
  leave();
}

void begin_block(Block& block, std::int64_t index, int threads, std::int64_t shared_bytes) {
  block.index = index;
  block.threads = threads;
  block.finished = 0;
  block.shared_bytes = shared_bytes;
  block.memory.assign(2 * kGuard + static_cast<std::size_t>(shared_bytes) + 1024, kGuardByte);
  const auto first = reinterpret_cast<std::uintptr_t>(block.memory.data()) + kGuard;
  block.shared = block.memory.data() + kGuard + (1024 - first % 1024) % 1024;
  std::memset(block.shared, kNanByte, static_cast<std::size_t>(shared_bytes));
  for (NamedBarrier& barrier : block.barriers) barrier = {};
  block.at_any_moment.clear();
  if (block.lanes.size() < static_cast<std::size_t>(threads)) block.lanes.resize(static_cast<std::size_t>(threads));
  block.warps.assign(static_cast<std::size_t>(threads / kWarp), {});
  for (int w = 0; w < threads / kWarp; ++w) {
    Warp& warp = block.warps[static_cast<std::size_t>(w)];
    warp.block = &block;
    warp.lanes = &block.lanes[static_cast<std::size_t>(w * kWarp)];
    warp.priority = static_cast<std::int64_t>(machine.random.next() >> 1);
    for (int i = 0; i < kWarp; ++i) {
      Lane& lane = warp.lanes[i];
      lane.warp = &warp;
      lane.thread = w * kWarp + i;
      lane.copies = {};
      lane.state = Lane::State::finished;
      if (lane.stack == nullptr) lane.stack = std::make_unique<Stack>(lane.thread);
      lane.suspended = lane.stack->begin(&live);
      set_state(lane, Lane::State::ready);
    }
  }
}

void end_block(Block& block) {
  for (const Pending& operation : block.at_any_moment) operation->perform();
  block.at_any_moment.clear();
  for (const unsigned char* at = block.memory.data(); at < block.memory.data() + block.memory.size(); ++at) {
    if (at == block.shared) at += block.shared_bytes;
    if (at < block.memory.data() + block.memory.size() && *at != kGuardByte) {
      fault("block %lld wrote to shared memory at byte %td of %lld", static_cast<long long>(block.index),
            at - block.shared, static_cast<long long>(block.shared_bytes));
    }
  }
}

/// The ready warp with the highest priority, or null.
Warp* next_warp() {
  Warp* best = nullptr;
  for (const auto& block : machine.blocks) {
    for (Warp& warp : block->warps) {
      if (warp.ready > 0 && (best == nullptr || warp.priority > best->priority)) best = &warp;
    }
  }
  return best;
}

/// Each of its lanes goes on until it waits, from a random one on, upwards or downwards.
void run_warp(Warp& warp) {
  const std::uint64_t draw = machine.random.next();
  const int first = static_cast<int>(draw % kWarp), step = (draw >> 8) % 2 == 0 ? 1 : kWarp - 1;
  for (int n = 0; n < kWarp; ++n) {
    Lane& lane = warp.lanes[(first + n * step) % kWarp];
    if (lane.state == Lane::State::ready && machine.error.empty()) enter(lane);
  }
}

/// True if there was one.
bool perform_any(bool must) {
  std::vector<Pending>* list = nullptr;
  const auto count = static_cast<std::int64_t>(machine.blocks.size());
  const std::int64_t first = machine.random.between(0, count - 1);
  for (std::int64_t n = 0; n < count && (list == nullptr || list->empty()); ++n) {
    list = &machine.blocks[static_cast<std::size_t>((first + n) % count)]->at_any_moment;
    std::erase_if(*list, [](const Pending& operation) { return operation->done(); });
    if (!must) break;
  }
  if (list == nullptr || list->empty()) return false;
  const auto at = machine.random.between(0, static_cast<std::int64_t>(list->size()) - 1);
  const Pending operation = (*list)[static_cast<std::size_t>(at)];
  operation->perform();
  return true;
}

/// Who waits for what.
std::string describe_wait() {
  std::string text;
  for (const auto& block : machine.blocks) {
    for (const Warp& warp : block->warps) {
      for (int i = 0, end = 0; i < kWarp; i = end) {
        const Lane& lane = warp.lanes[i];
        const auto same = [&](const Lane& x) {
          return x.state == lane.state &&
                 (x.state != Lane::State::waiting || (x.waits_for == lane.waits_for && x.number == lane.number));
        };
        for (end = i + 1; end < kWarp && same(warp.lanes[end]);) ++end;
        if (lane.state == Lane::State::finished && end - i == kWarp) continue;
        text += "\n    block " + std::to_string(block->index) + " threads " + std::to_string(lane.thread) + "-" +
                std::to_string(lane.thread + end - i - 1) + ": ";
        if (lane.state == Lane::State::finished) {
          text += "at their end";
        } else if (lane.state == Lane::State::ready) {
          text += "in a loop";
        } else {
          text += lane.waits_for;
          if (lane.number >= 0) text += " " + std::to_string(lane.number);
          if (std::strcmp(lane.waits_for, "barrier") == 0) {
            const NamedBarrier& barrier = block->barriers[lane.number];
            text += ", " + std::to_string(barrier.arrived) + " of " + std::to_string(barrier.expected) + " are there";
          }
        }
      }
    }
  }
  return text;
}

void run_blocks(std::int64_t blocks, int threads, std::int64_t shared_bytes) {
  check::Random& random = machine.random;
  std::vector<std::int64_t> order(static_cast<std::size_t>(blocks));
  std::iota(order.begin(), order.end(), 0);
  if (random.chance(0.5)) {
    for (std::int64_t n = blocks - 1; n > 0; --n)
      std::swap(order[static_cast<std::size_t>(n)], order[static_cast<std::size_t>(random.between(0, n))]);
  }
  const auto resident = static_cast<std::size_t>(random.between(2, 4));
  const std::int64_t spread = random.pick<std::int64_t>({4, 64, 1024});
  std::size_t begun = 0;
  std::int64_t until_change = spread;
  machine.pauses = machine.lowest = 0;
  while (begun < order.size() || !machine.blocks.empty()) {
    while (machine.blocks.size() < resident && begun < order.size()) {
      if (machine.idle.empty()) machine.idle.push_back(std::make_unique<Block>());
      machine.blocks.push_back(std::move(machine.idle.back()));
      machine.idle.pop_back();
      begin_block(*machine.blocks.back(), order[begun++], threads, shared_bytes);
    }
    if (Warp* warp = next_warp()) {
      run_warp(*warp);
      if (--until_change <= 0) {
        const auto& any = machine.blocks[static_cast<std::size_t>(random.between(0, std::ssize(machine.blocks) - 1))];
        auto& other = any->warps[static_cast<std::size_t>(random.between(0, std::ssize(any->warps) - 1))];
        other.priority = static_cast<std::int64_t>(random.next() >> 1);
        until_change = random.between(1, 2 * spread);
      }
      if (random.next() % 16 == 0) perform_any(false);
    } else if (!perform_any(true)) {
      fault("deadlock:%s", describe_wait().c_str());
    }
    if (!machine.error.empty()) return;
    if (machine.pauses > kPatience) fault("waits for ever:%s", describe_wait().c_str());
    for (std::size_t n = 0; n < machine.blocks.size(); ++n) {
      Block& block = *machine.blocks[n];
      if (block.finished < block.threads) continue;
      end_block(block);
      machine.idle.push_back(std::move(machine.blocks[n]));
      machine.blocks.erase(machine.blocks.begin() + static_cast<std::ptrdiff_t>(n--));
    }
  }
}

}  // namespace

void fault(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  char text[4000];
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Fault{text};
}

void Operation::perform() {
  if (done()) return;
  const std::function<void()> effect = std::exchange(effect_, nullptr);
  effect();
  progress();
}

void Groups::add(std::function<void()> effect) {
  const double fate = random().uniform();
  if (fate < kAtOnce) {
    effect();
    return;
  }
  open_.push_back(std::make_shared<Operation>(std::move(effect)));
  if (fate < kAtOnce + kSometime) block().at_any_moment.push_back(open_.back());
}

void Groups::commit() {
  closed_.push_back(std::move(open_));
  open_.clear();
}

void Groups::perform(std::vector<Pending>& group) {
  while (!group.empty()) {
    const auto last = std::ssize(group) - 1;
    std::swap(group[static_cast<std::size_t>(random().between(0, last))], group.back());
    group.back()->perform();
    group.pop_back();
  }
}

void Groups::wait(std::size_t pending) {
  for (; closed_.size() > pending; closed_.pop_front()) perform(closed_.front());
}

void Groups::finish() {
  commit();
  wait(0);
}

void Waiters::wait(const char* what, int number) {
  Warp& warp = *lane().warp;
  warps.push_back(&warp);
  for (int i = 0; i < kWarp; ++i) {
    warp.lanes[i].waits_for = what;
    warp.lanes[i].number = number;
  }
  wait_here(what, number);
}

void Waiters::wake() {
  for (Warp* warp : std::exchange(warps, {})) release(*warp);
}

Lane& lane() {
  return *machine.current;
}

check::Random& random() {
  return machine.random;
}

void pause() {
  ++machine.pauses;
  lane().warp->priority = --machine.lowest;
  leave();
}

void progress() {
  machine.pauses = 0;
}

bool gather(const char* what, void* data) {
  Lane& lane = *machine.current;
  Warp& warp = *lane.warp;
  if (warp.gathered > 0 && warp.what != what && std::strcmp(warp.what, what) != 0) {
    fault("lanes of a warp part: this one is at %s, others at %s", what, warp.what);
  }
  warp.what = what;
  warp.data[lane.thread % kWarp] = data;
  if (++warp.gathered < kWarp) {
    wait_here(what);
    return false;
  }
  warp.gathered = 0;
  return true;
}

void release(Warp& warp) {
  for (int i = 0; i < kWarp; ++i) set_state(warp.lanes[i], Lane::State::ready);
}

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

void at_any_moment(std::function<void()> effect) {
  block().at_any_moment.push_back(std::make_shared<Operation>(std::move(effect)));
}

unsigned char* shared(std::uint32_t address, int bytes, int alignment) {
  const std::int64_t offset = std::int64_t{address} - kSharedBase;
  const Block& block = emulator::block();
  if (offset < 0 || offset + bytes > block.shared_bytes) {
    fault("shared memory at byte %lld, %d bytes; the block has %lld", static_cast<long long>(offset), bytes,
          static_cast<long long>(block.shared_bytes));
  }
  if (address % static_cast<std::uint32_t>(alignment) != 0) {
    fault("shared memory at byte %lld, no multiple of %d", static_cast<long long>(offset), alignment);
  }
  return block.shared + offset;
}

std::uint32_t shared_address(const void* pointer) {
  const std::int64_t offset = static_cast<const unsigned char*>(pointer) - block().shared;
  if (offset < 0 || offset > block().shared_bytes) fault("the shared address of what is not in shared memory");
  return kSharedBase + static_cast<std::uint32_t>(offset);
}

void allow_global(const void* data, std::int64_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  if (data != nullptr) machine.global.push_back({begin, begin + static_cast<std::uintptr_t>(bytes)});
}

void forget_global() {
  machine.global.clear();
}

void check_global(const void* data, std::int64_t bytes, int alignment, const char* what) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  if (begin % static_cast<std::uintptr_t>(alignment) != 0)
    fault("%s: global memory no multiple of %d", what, alignment);
  const auto holds = [&](const Range& range) {
    return range.begin <= begin && begin + static_cast<std::uintptr_t>(bytes) <= range.end;
  };
  if (machine.global.empty() || std::any_of(machine.global.begin(), machine.global.end(), holds)) return;
  fault("%s: %lld bytes of global memory outside every operand", what, static_cast<long long>(bytes));
}

void set_seed(std::uint64_t seed) {
  machine.seed = seed;
  machine.launches = 0;
}

Status run_grid(std::int64_t blocks, int threads, std::int64_t shared_bytes, const std::function<void()>& body) {
  if (blocks == 0) return {};
  if (threads % kWarp != 0 || threads > 1024) return device_error("%d threads a block", threads);
  if (shared_bytes > kMostShared)
    return device_error("%lld bytes of shared memory", static_cast<long long>(shared_bytes));
  machine.random = check::Random(machine.seed + 0x9E3779B97F4A7C15u * ++machine.launches);
  machine.body = &body;
  machine.error.clear();
  places.block_size.x = static_cast<unsigned>(threads);
  places.grid.x = static_cast<unsigned>(blocks);
  try {
    run_blocks(blocks, threads, shared_bytes);
  } catch (const Fault& fault) {
    machine.error = fault.text;
  }
  for (auto& block : machine.blocks) machine.idle.push_back(std::move(block));
  machine.blocks.clear();
  if (machine.error.empty()) return {};
  return {ONEPASS_DEVICE_ERROR, "emulated launch: " + machine.error};
}

}  // namespace onepass::emulator
