// What a block has on compute capability 9.0 besides: mbarriers, asynchronous copies between shared and global memory,
// matrix products of warpgroups.
#pragma once

#include <map>
#include <set>

#include "emulator/machine/machine.h"
#include "emulator/machine/wgmma.h"

namespace onepass::emulator {

/// A bulk copy from shared memory: it reads at one moment and writes at a later one.
struct BulkCopy {
  const unsigned char* from = nullptr;
  std::vector<unsigned char> as_issued, data;  // what shared memory held at the issue; what was read
  std::function<void(const unsigned char*)> write;
  bool has_read = false, has_written = false;

  void read();
  void finish();
};
using BulkGroup = std::vector<std::shared_ptr<BulkCopy>>;

struct Units : Unit {
  std::map<const unsigned char*, Sleepers> sleepers;  // at each mbarrier

  std::map<int, BulkGroup> open;                 // of each thread
  std::map<int, std::vector<BulkGroup>> closed;  // of each thread, those that have not all written

  /// 16 bytes of shared memory that ordinary stores of a thread wrote, which no fence has shown to asynchronous reads.
  std::vector<std::int16_t> unfenced;  // thread + 1; 0: none
  std::map<int, std::vector<std::uint32_t>> unfenced_of;

  std::vector<Warpgroup> warpgroups;

  int launched_registers;      // of each thread
  std::vector<int> registers;  // now, of each thread of a warpgroup

  explicit Units(const Block& block);
  /// The block has ended: nothing may be under way that needs its shared memory.
  void end() override;
};

Units& units(Block& block);

/// An ordinary store of the running thread to shared memory. (Of no interest to a block without such units.)
void stored(std::uint32_t address, int bytes);
/// The running thread's stores become visible to asynchronous reads.
void fence_stores();
/// Asynchronous reads of these bytes see nothing unfenced.
void check_fenced(Block& block, const unsigned char* from, std::int64_t bytes, const char* what);

/// setmaxnreg: fewer or more registers for each thread of the running warpgroup.
void set_registers(int count, bool more);

}  // namespace onepass::emulator
