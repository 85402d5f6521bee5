// Copies of a case in CUDA memory, so that a GPU kernel runs on the same operands, guards around them included.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "core/problem.h"
#include "core/status.h"

namespace onepass::check {

/// Host memory that a case owns.
struct Block {
  void* data;
  std::size_t bytes;
};

/// Device copies of host blocks, and the way from a host address to its copy. Needs a build with CUDA.
class DeviceMirror {
 public:
  /// Uploads the blocks to the current device; status() says whether that went well.
  explicit DeviceMirror(const std::vector<Block>& blocks);
  DeviceMirror(const DeviceMirror&) = delete;
  DeviceMirror& operator=(const DeviceMirror&) = delete;
  const Status& status() const { return uploaded_; }

  bool holds(const void* host) const { return find(host) != host; }
  /// Where a pointer into a block lies on the device; other pointers (null, say) stay as they are.
  template <class T>
  T* at(T* host) const {
    return static_cast<T*>(const_cast<void*>(find(host)));
  }
  Problem at(const Problem& problem) const;
  ForwardOperands at(const ForwardOperands& operands) const;
  BackwardOperands at(const BackwardOperands& operands) const;

  /// Waits for the device and copies every block back, into `blocks` of the same sizes if given. Errors of kernels
  /// surface here.
  Status download() const { return download(blocks_); }
  Status download(const std::vector<Block>& blocks) const;
  /// Replaces what the device holds by other blocks of the same sizes.
  Status upload(const std::vector<Block>& blocks) const;

 private:
  const void* find(const void* host) const;

  std::vector<Block> blocks_;
  std::vector<std::size_t> offsets_;
  std::shared_ptr<void> memory_;
  Status uploaded_;
};

/// Uninitialised device memory that frees itself, 256-byte aligned; null if there is none.
std::shared_ptr<void> device_memory(std::size_t bytes);

/// Seconds a call of `run(stream)`, which launches work: `calls` of them captured into a graph, replayed once to warm
/// up and once between two events.
Status time_on_device(const std::function<Status(void* stream)>& run, int calls, double* seconds);

/// "NVIDIA H200" and the driver's CUDA version, of the first GPU; empty without one.
std::string gpu_name();
std::string gpu_driver();

}  // namespace onepass::check
