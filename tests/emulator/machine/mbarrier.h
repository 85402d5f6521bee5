// Barriers in shared memory (mbarrier). PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier". A
// phase ends when `count` threads have arrived and every byte that they announced has come. Arriving more often than a
// phase allows, at memory that holds no barrier, or for more bytes than it can count is a fault; a wait that nothing
// can end is a deadlock.
#pragma once

#include "emulator/machine/machine.h"

namespace onepass::emulator {

void mbarrier_init(std::uint32_t address, int count);
/// Announces `bytes`, then arrives.
void mbarrier_arrive(std::uint32_t address, int bytes = 0);
void mbarrier_wait(std::uint32_t address, std::uint32_t parity);
/// Whether the phase of that parity has ended.
bool mbarrier_test(std::uint32_t address, std::uint32_t parity);
/// `bytes` that were announced have come; `barrier` is the host's address of the barrier.
void mbarrier_complete(Block& block, unsigned char* barrier, int bytes);

}  // namespace onepass::emulator
