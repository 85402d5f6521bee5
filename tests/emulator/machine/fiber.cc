#include "emulator/machine/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if !defined(__x86_64__)
#error "the switch of fibers is written for x86-64"
#endif

// The registers that a function must preserve, pushed by who suspends itself, popped by who goes on.
asm(R"(
.text
.globl onepass_emulator_switch
.type onepass_emulator_switch, @function
onepass_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size onepass_emulator_switch, .-onepass_emulator_switch
)");

namespace onepass::emulator {
namespace {

constexpr std::size_t kPage = 4096, kBytes = 256 * 1024;

}  // namespace

Stack::Stack(int number) : skew_(static_cast<std::size_t>(number) * 1088 % kPage) {
  memory_ = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory_ == MAP_FAILED || mprotect(memory_, kPage, PROT_NONE) != 0) throw std::bad_alloc();
}

Stack::~Stack() {
  munmap(memory_, kBytes);
}

Suspended Stack::begin(void (*entry)()) const {
  // As if `entry` had been called: its return address, null, 8 bytes off a multiple of 16.
  const auto top = (reinterpret_cast<std::uintptr_t>(memory_) + kBytes - skew_) & ~std::uintptr_t{63};
  auto* stack = reinterpret_cast<void**>(top);
  *--stack = nullptr;
  *--stack = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--stack = nullptr;
  return stack;
}

}  // namespace onepass::emulator
