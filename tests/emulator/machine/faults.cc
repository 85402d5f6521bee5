#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "emulator/machine/machine.h"

namespace onepass::emulator {

void fault(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  char text[4000];
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Fault{text};
}

std::string describe_wait(const std::vector<std::unique_ptr<Block>>& blocks) {
  std::string text;
  for (const auto& block : blocks) {
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

}  // namespace onepass::emulator
