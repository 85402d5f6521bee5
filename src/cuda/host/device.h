// What the CUDA runtime says about GPUs.
#pragma once

#include <string>

#include "core/registry.h"

namespace onepass::cuda {

struct DeviceInfo {
  std::string name;
  int compute_capability = 0;  // 90 for 9.0
  int multiprocessors = 0;
  std::int64_t memory_bytes = 0;
};

/// How many GPUs there are; 0 without a driver.
int device_count();
Status device_info(int ordinal, DeviceInfo* info);
/// Shared memory of a multiprocessor of the device, for all its thread blocks together; 0 if unknown.
std::int64_t multiprocessor_shared_bytes(int device);
/// "13.0", of the driver; empty without one.
std::string driver_version();

/// Waits for the stream's work and copies from device memory: what `validate` needs.
Status copy_to_host(void* host, const void* device, std::size_t bytes, const Launch& launch);

}  // namespace onepass::cuda
