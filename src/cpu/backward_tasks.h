// How a task of the backward waits for its turn at a block of dQ.
#pragma once

#include "cpu/tasks.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#endif

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Waits until *ticket == turn: spins while its owner is likely to be running, then lets others run.
inline void wait_for(const std::int32_t* ticket, std::int32_t turn) {
  for (int spins = 0; __atomic_load_n(ticket, __ATOMIC_ACQUIRE) != turn; ++spins) {
    if (spins < 2000) {
#if defined(__x86_64__)
      _mm_pause();
#endif
    } else {
#if defined(__unix__) || defined(__APPLE__)
      sched_yield();
#endif
    }
  }
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
