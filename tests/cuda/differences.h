// Comparing device memory on the device.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace onepass::cuda_kit {

/// Adds to *count the 8-byte words in which a and b differ, all in device memory, when the stream comes to it.
void count_differences(const void* a, const void* b, std::size_t bytes, unsigned* count, cudaStream_t stream);

}  // namespace onepass::cuda_kit
