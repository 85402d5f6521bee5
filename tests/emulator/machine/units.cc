#include "emulator/machine/units.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace onepass::emulator {

Units::Units(const Block& block)
    : unfenced(static_cast<std::size_t>(block.shared_bytes / 16 + 1)),
      warpgroups(static_cast<std::size_t>(block.threads / (4 * kWarp))),
      launched_registers(std::min(255, 65536 / block.threads) / 8 * 8),
      registers(warpgroups.size(), launched_registers) {}

Units& units(Block& block) {
  if (block.unit == nullptr) block.unit = std::make_unique<Units>(block);
  return static_cast<Units&>(*block.unit);
}

void Units::end() {
  for (const Warpgroup& warpgroup : warpgroups) warpgroup.end();
  for (auto& [thread, groups] : closed) {
    for (BulkGroup& group : groups) {
      for (const auto& copy : group) {
        if (!copy->has_read) fault("thread %d has ended, but its bulk copy has not read shared memory", thread);
        copy->finish();
      }
    }
  }
  for (const auto& [thread, group] : open) {
    if (!group.empty()) fault("thread %d has ended without a commit of its bulk copies", thread);
  }
  const int taken = std::accumulate(registers.begin(), registers.end(), 0);
  const int given = launched_registers * static_cast<int>(registers.size());
  if (taken > given) fault("setmaxnreg: the warpgroups want %d registers of the %d that the launch gave", taken, given);
}

void set_registers(int count, bool more) {
  int& now = units(block()).registers[static_cast<std::size_t>(lane().thread / (4 * kWarp))];
  if (more ? count < now : count > now) fault("setmaxnreg.%s from %d to %d", more ? "inc" : "dec", now, count);
  now = count;
}

void BulkCopy::read() {
  if (has_read) return;
  if (std::memcmp(from, as_issued.data(), as_issued.size()) != 0) {
    fault("shared memory was written while a bulk copy read it");
  }
  data = std::move(as_issued);
  has_read = true;
}

void BulkCopy::finish() {
  read();
  if (!has_written) write(data.data());
  has_written = true;
}

void stored(std::uint32_t address, int bytes) {
  if (block().unit == nullptr) return;
  Units& all = units(block());
  const int thread = lane().thread;
  const std::uint32_t first = (address - kSharedBase) / 16, last = (address - kSharedBase + bytes - 1) / 16;
  for (std::uint32_t chunk = first; chunk <= last; ++chunk) {
    all.unfenced[chunk] = static_cast<std::int16_t>(thread + 1);
    all.unfenced_of[thread].push_back(chunk);
  }
}

void fence_stores() {
  Units& all = units(block());
  const int thread = lane().thread;
  std::vector<std::uint32_t>& mine = all.unfenced_of[thread];
  for (const std::uint32_t chunk : mine) {
    if (all.unfenced[chunk] == thread + 1) all.unfenced[chunk] = 0;
  }
  mine.clear();
}

void check_fenced(Block& block, const unsigned char* from, std::int64_t bytes, const char* what) {
  const std::vector<std::int16_t>& unfenced = units(block).unfenced;
  const std::int64_t first = (from - block.shared) / 16, last = (from - block.shared + bytes - 1) / 16;
  for (std::int64_t chunk = first; chunk <= last; ++chunk) {
    if (const int writer = unfenced[static_cast<std::size_t>(chunk)]; writer != 0) {
      fault("%s reads byte %lld of shared memory, which thread %d wrote without a fence.proxy.async", what,
            static_cast<long long>(16 * chunk), writer - 1);
    }
  }
}

}  // namespace onepass::emulator
