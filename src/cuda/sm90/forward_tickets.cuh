// Tickets 0, 1, 2, ... that the blocks of one launch share, in memory that nobody has prepared: a word holds the key of
// a launch above the number of its next ticket. Whoever finds another key there starts the count of this launch. The
// taker of the launch's last ticket ends it, so that the same launch, replayed by a graph, starts anew.
#pragma once

namespace onepass::cuda::sm90 {

inline constexpr int kTicketBits = 31;

__device__ __forceinline__ unsigned take_ticket(unsigned long long* g_tickets, unsigned long long key) {
  unsigned long long word = atomicAdd(g_tickets, 1ull);
  while (word >> kTicketBits != key) {
    const unsigned long long found = atomicCAS(g_tickets, word + 1, (key << kTicketBits) + 1);
    if (found == word + 1) return 0;
    word = found >> kTicketBits == key ? atomicAdd(g_tickets, 1ull) : found - 1;
  }
  return static_cast<unsigned>(word) & ((1u << kTicketBits) - 1);
}
__device__ __forceinline__ void end_tickets(unsigned long long* g_tickets) {
  atomicExch(g_tickets, 0ull);
}

}  // namespace onepass::cuda::sm90
