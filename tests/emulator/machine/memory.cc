#include <algorithm>

#include "emulator/machine/machine.h"

namespace onepass::emulator {
namespace {

struct Range {
  std::uintptr_t begin, end;
};

std::vector<Range> allowed;

}  // namespace

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
  if (data != nullptr) allowed.push_back({begin, begin + static_cast<std::uintptr_t>(bytes)});
}

void forget_global() {
  allowed.clear();
}

void check_global(const void* data, std::int64_t bytes, int alignment, const char* what) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  if (begin % static_cast<std::uintptr_t>(alignment) != 0)
    fault("%s: global memory no multiple of %d", what, alignment);
  const auto holds = [&](const Range& range) {
    return range.begin <= begin && begin + static_cast<std::uintptr_t>(bytes) <= range.end;
  };
  if (allowed.empty() || std::any_of(allowed.begin(), allowed.end(), holds)) return;
  fault("%s: %lld bytes of global memory outside every operand", what, static_cast<long long>(bytes));
}

}  // namespace onepass::emulator
