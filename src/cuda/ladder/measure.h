// A GPU rung run, compared with the float64 reference, and timed.
#pragma once

#include <memory>
#include <vector>

#include "cuda/ladder/ladder.h"
#include "ladder/measure.h"

namespace onepass::cuda::ladder {

/// Heads of different numbers; a shape of more repeats them.
inline constexpr std::int64_t kDistinctHeads = 4;

/// One shape's inputs, drawn from N(0,1), in device memory, and what the reference makes of them.
class Bench {
 public:
  /// `squares`: with room for S and P. `check`: the reference is computed, on `threads` threads.
  static Status make(const Shape& shape, bool squares, bool check, int threads, std::uint64_t seed,
                     std::unique_ptr<Bench>* made);
  /// Runs a rung once, for a profiler that waits for cudaProfilerStart. A backward rung starts from rung flash_v2's O
  /// and L, which run before.
  Status run(const Rung& rung);
  /// Largest error of the last run's O, or of dQ, dK and dV, in any head; NaN if any of them is.
  Status error(const Rung& rung, double* error) const;
  /// The largest number of what a right answer is, for the error's scale.
  double largest(const Rung& rung) const;
  /// Seconds of a run, of many in a row.
  Status time(const Rung& rung, double* seconds) const;

 private:
  explicit Bench(const Shape& shape) : shape_(shape) {}
  Status upload(std::uint64_t seed, bool squares, std::vector<onepass::ladder::Arrays>& heads);
  Status worst(const Bf16* g_result, std::vector<double> onepass::ladder::Exact::*exact, double* error) const;
  template <class T>
  Status reserve(T** array, std::int64_t count);

  Shape shape_;
  Arrays arrays_;
  std::vector<std::shared_ptr<void>> memory_;
  std::vector<onepass::ladder::Exact> exact_;  // of the distinct heads
};

}  // namespace onepass::cuda::ladder
