// Compares device memory where it is: after every one of ten thousand runs, without waiting for any.
#include "cuda/differences.h"

namespace onepass::cuda_kit {
namespace {

/// a, b: (words).
__global__ void count_kernel(const std::uint64_t* a, const std::uint64_t* b, std::size_t words, unsigned* count) {
  unsigned differing = 0;
  for (std::size_t n = blockIdx.x * blockDim.x + threadIdx.x; n < words; n += gridDim.x * blockDim.x) {
    differing += a[n] != b[n];
  }
  if (differing != 0) atomicAdd(count, differing);
}

}  // namespace

void count_differences(const void* a, const void* b, std::size_t bytes, unsigned* count, cudaStream_t stream) {
  count_kernel<<<64, 256, 0, stream>>>(static_cast<const std::uint64_t*>(a), static_cast<const std::uint64_t*>(b),
                                       bytes / sizeof(std::uint64_t), count);
}

}  // namespace onepass::cuda_kit
