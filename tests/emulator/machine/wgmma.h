// Matrix products of a warpgroup (wgmma): D (64, N) (+)= A (64, 16) B (16, N), float32 sums of 16-bit products. PTX
// ISA, "Asynchronous Warpgroup Level Matrix Instructions". A product is under way when all four warps have issued it;
// it reads its operands in shared memory at some moment from then to the end of the first wait for it. Sums are NaN
// from the issue to the wait of their own warp; sums or operands in registers that change in between are a fault, and
// so is a product without the fence that it needs.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "emulator/machine/machine.h"

namespace onepass::emulator {

/// One instruction, as a thread issues it.
struct WgmmaCall {
  int columns = 0;                   // N
  bool half = false;                 // float16, else bfloat16
  const std::uint32_t* a = nullptr;  // four registers; null: a_descriptor
  std::uint64_t a_descriptor = 0, b_descriptor = 0;
  bool a_transposed = false, b_transposed = false;
  bool accumulate = false;
  float* d = nullptr;  // N / 2 registers
};

void wgmma(const WgmmaCall& call);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);

/// Sums of products that follow each other in the same registers.
struct Sums {
  int columns = 0;
  std::vector<float> d;              // (64, columns)
  float* registers[4 * kWarp] = {};  // of each thread
  std::int64_t last = 0;             // behind the last product of it
  bool taken[4] = {};                // by each warp: its registers hold the sums again
};

struct Wgmma {
  WgmmaCall call;  // of the warp that came first
  std::shared_ptr<Sums> sums;
  int issued = 0;     // warps
  bool slow = false;  // it happens when nothing else does
  std::uint32_t a[4 * kWarp][4] = {};
  const std::uint32_t* a_registers[4 * kWarp] = {};
};

class Warpgroup {
 public:
  void issue(Warp& warp, int rank, WgmmaCall* const* lanes);
  void fence(int rank) { fenced_[rank] = true; }
  void commit(int rank) { ends_[rank].push_back(issued_[rank]); }
  /// True if the warp can go on; else it is woken later.
  bool wait(int rank, int pending);
  /// Where warps wait for others to issue.
  Waiters waiters[4];
  void end() const;

 private:
  Wgmma& product(std::int64_t number) { return *products_[static_cast<std::size_t>(number - first_)]; }
  /// Everything that a waiting warp waits for happens: now, or later if some of it is slow.
  void satisfy(Block& block, int rank);
  void satisfy_some_time(Block& block, int rank);
  void perform(Block& block, std::int64_t end);
  void multiply(Block& block, const Wgmma& x);
  void deliver(int rank, std::int64_t end);

  std::deque<std::unique_ptr<Wgmma>> products_;
  std::int64_t first_ = 0, performed_ = 0;       // number of the first in the list; of the first that has not happened
  std::int64_t issued_[4] = {}, taken_[4] = {};  // by each warp; products that it has waited for
  std::vector<std::int64_t> ends_[4];            // of the groups, by each warp
  std::int64_t wanted_[4] = {-1, -1, -1, -1};    // what each warp waits for
  bool fenced_[4] = {};
  std::vector<std::shared_ptr<Sums>> sums_;  // not yet taken by all
};

}  // namespace onepass::emulator
