// Interleaved timing: every cell once a round, so that a machine that changes its mind slows all of them alike.
#pragma once

#include <memory>
#include <vector>

#include "reading.h"

namespace onepass::cli {

struct Timing {
  double median = 0, least = 0, most = 0;  // seconds a call
  int reps = 0;
};

Timing summarise(std::vector<double> seconds);

/// One shape with operands in memory, ready to run.
class Cell {
 public:
  /// Plans the call and asks the library what would run.
  static Result<std::unique_ptr<Cell>> make(const Shape& shape, const Options& options);

  /// Bytes of the operands that cells may share, and of those this cell needs for itself.
  std::size_t shared_bytes() const;
  std::size_t own_bytes() const;
  /// Puts the operands into `inputs` (N(0,1) of the cell's dtype) and `outputs`, each at least shared_bytes() long; for
  /// a backward, runs the forward. `device` holds the copies of both where the cell runs on the GPU.
  Status prepare(std::shared_ptr<std::byte> inputs, std::shared_ptr<std::byte> outputs,
                 const std::shared_ptr<const check::DeviceMirror>& device);

  /// Seconds a call, over as many calls as make the clock's steps small.
  Result<double> sample();

  /// Times plain reads of the same caches, if this is a decode.
  void sample_reads() { reads_.sample(); }

  bool on_device() const { return attention_.on_device; }
  const Shape& shape() const { return shape_; }
  const CacheReads& reads() const { return reads_; }
  const nlohmann::ordered_json& plan() const { return plan_; }
  std::vector<double> seconds;

 private:
  Shape shape_;
  Attention attention_;
  Runner runner_;
  nlohmann::ordered_json plan_;
  Interval keys_;  // of a decode's cache
  CacheReads reads_;
  int calls_ = 0;  // a sample; 0: not known yet
};

/// Runs the rounds; `reps` of them, or where 0 as many as a minute allows, 3 to 15.
Status run_rounds(std::vector<std::unique_ptr<Cell>>& cells, int reps);

/// Makes the operands of all cells: shared memory for what is only read or overwritten.
Status prepare_cells(std::vector<std::unique_ptr<Cell>>& cells, std::uint64_t seed);

}  // namespace onepass::cli
