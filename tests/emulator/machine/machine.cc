#include "emulator/machine/machine.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace onepass::emulator {

Places places;

namespace {

constexpr std::size_t kGuard = 1024;
constexpr unsigned char kGuardByte = 0xa5, kNanByte = 0xff;
constexpr std::int64_t kPatience = 20'000;  // pauses without progress

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
  block.at_last.clear();
  block.unit.reset();
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
  if (block.unit != nullptr) block.unit->end();
  for (auto* list : {&block.at_any_moment, &block.at_last}) {
    for (const Pending& operation : *list) operation->perform();
    list->clear();
  }
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

/// Each of its lanes goes on until it waits, from a random one on, upwards or downwards; now and then only some of them
/// before other warps have their turn.
void run_warp(Warp& warp) {
  const std::uint64_t draw = machine.random.next();
  const int first = static_cast<int>(draw % kWarp), step = (draw >> 8) % 2 == 0 ? 1 : kWarp - 1;
  const bool some = (draw >> 16) % 16 == 0;
  if (some) warp.priority = static_cast<std::int64_t>(machine.random.next() >> 1);
  for (int n = 0; n < (some ? 1 + static_cast<int>((draw >> 24) % kWarp) : kWarp); ++n) {
    Lane& lane = warp.lanes[(first + n * step) % kWarp];
    if (lane.state == Lane::State::ready && machine.error.empty()) enter(lane);
  }
}

/// True if there was one.
bool perform_any(bool must) {
  const auto count = static_cast<std::int64_t>(machine.blocks.size());
  const std::int64_t first = machine.random.between(0, count - 1);
  const bool slow = !must && machine.random.next() % 8 == 0;
  for (const auto list_of : {&Block::at_any_moment, &Block::at_last}) {
    if (slow && list_of == &Block::at_any_moment) continue;
    for (std::int64_t n = 0; n < (must ? count : 1); ++n) {
      std::vector<Pending>& list = (*machine.blocks[static_cast<std::size_t>((first + n) % count)]).*list_of;
      std::erase_if(list, [](const Pending& operation) { return operation->done(); });
      if (list.empty()) continue;
      const auto at = machine.random.between(0, static_cast<std::int64_t>(list.size()) - 1);
      const Pending operation = list[static_cast<std::size_t>(at)];
      operation->perform();
      return true;
    }
    if (!must && !slow) break;
  }
  return false;
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
      fault("deadlock:%s", describe_wait(machine.blocks).c_str());
    }
    if (!machine.error.empty()) return;
    if (machine.pauses > kPatience) fault("waits for ever:%s", describe_wait(machine.blocks).c_str());
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

void Sleepers::wait(const char* what, int number) {
  lanes.push_back(&lane());
  wait_here(what, number);
}

void Sleepers::wake() {
  for (Lane* lane : std::exchange(lanes, {})) set_state(*lane, Lane::State::ready);
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
