// The yardstick of decode: how fast this machine reads memory, by the best of several read loops.
#pragma once

#include <cstddef>
#include <vector>

namespace onepass::bench {

/// A region to read once: `rows` runs of `row_bytes`, `stride` bytes apart (row_bytes == stride: contiguous).
struct ReadRegion {
  const char* data;
  std::size_t rows, row_bytes, stride;
};

/// A way to read: vector width, streams at once, software prefetch distance in bytes, division over threads.
struct ReadKernel {
  const char* name;
  unsigned long long (*read)(const char* data, std::size_t bytes);
  bool queue;  // 256 KB pieces from a queue, else one part a thread
};

/// The kernels that this machine runs.
std::vector<ReadKernel> read_kernels();

/// Reads all regions once with `threads` threads; returns seconds.
double read_once(const ReadKernel& kernel, const std::vector<ReadRegion>& regions, int threads);

}  // namespace onepass::bench
