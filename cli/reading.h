// The yardstick beside a decode: plain reads of the bytes of K and V that it must read, in the same rounds.
#pragma once

#include <string>
#include <vector>

#include "core/mask.h"
#include "read_bandwidth.h"
#include "shape.h"

namespace onepass::cli {

/// Keys that some query row of a decode sees, in a full cache.
Interval visible_keys(const Shape& shape, const Options& options);

/// Bytes of K and V that a decode must read.
double cache_bytes(const Shape& shape, const Options& options);

/// Every read loop of bench/read_bandwidth.h over one decode's caches, by as many threads as the decode has.
class CacheReads {
 public:
  CacheReads() = default;
  CacheReads(const Attention& attention, Interval keys, int threads);

  /// Each loop once.
  void sample();

  struct Best {
    std::string loop;
    double seconds = 0;  // median
  };
  Best best() const;

 private:
  std::vector<bench::ReadRegion> regions_;
  std::vector<bench::ReadKernel> loops_;
  std::vector<std::vector<double>> seconds_;  // by loop
  int threads_ = 1;
};

}  // namespace onepass::cli
