// Threads of execution that hand the processor over to one another by themselves: a stack each, and a switch.
#pragma once

#include <cstddef>

namespace onepass::emulator {

/// Where a suspended fiber goes on: its stack pointer.
using Suspended = void*;

/// Suspends the caller into *from and goes on with `to`.
extern "C" void onepass_emulator_switch(Suspended* from, Suspended to);

/// A stack with a page below it that faults.
class Stack {
 public:
  /// `number` staggers the tops, so that many stacks used alike do not meet in the same lines of the cache.
  explicit Stack(int number);
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  /// A fiber at the beginning of `entry`, which must not return.
  Suspended begin(void (*entry)()) const;

 private:
  void* memory_;
  std::size_t skew_;
};

}  // namespace onepass::emulator
