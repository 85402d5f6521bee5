#include "cuda/host/device.h"

#include <cuda_runtime.h>

#include <cstdio>

#include "cuda/host/launch.h"

namespace onepass {
namespace cuda {

Status status_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // so that the next call does not report this one again
  return error == cudaErrorMemoryAllocation
             ? Status(ONEPASS_OUT_OF_MEMORY, std::string("CUDA: ") + what + ": " + cudaGetErrorString(error))
             : device_error("CUDA: %s: %s", what, cudaGetErrorString(error));
}

DeviceScope::DeviceScope(int device) {
  int current = 0;
  status_ = status_of(cudaGetDevice(&current), "device");
  if (!status_.ok() || current == device) return;
  status_ = status_of(cudaSetDevice(device), "device");
  if (status_.ok()) former_ = current;
}

DeviceScope::~DeviceScope() {
  if (former_ >= 0) cudaSetDevice(former_);
}

int multiprocessors(int device) {
  int count = 0;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess ? count : 1;
}

std::int64_t multiprocessor_shared_bytes(int device) {
  int bytes = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  return error == cudaSuccess ? bytes : 0;
}

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

Status device_info(int ordinal, DeviceInfo* info) {
  cudaDeviceProp properties;
  ONEPASS_RETURN_IF_ERROR(status_of(cudaGetDeviceProperties(&properties, ordinal), "device properties"));
  *info = {properties.name, 10 * properties.major + properties.minor, properties.multiProcessorCount,
           static_cast<std::int64_t>(properties.totalGlobalMem)};
  return {};
}

std::string driver_version() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess || version == 0) return {};
  char text[16];
  std::snprintf(text, sizeof text, "%d.%d", version / 1000, version % 1000 / 10);
  return text;
}

Status copy_to_host(void* host, const void* device, std::size_t bytes, const Launch& launch) {
  const DeviceScope scope(launch.device);
  ONEPASS_RETURN_IF_ERROR(scope.status());
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  ONEPASS_RETURN_IF_ERROR(
      status_of(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream), "copy to the host"));
  return status_of(cudaStreamSynchronize(stream), "work before this call");
}

}  // namespace cuda

Status this_gpu(int ordinal, Machine* machine) {
  const int count = cuda::device_count();
  if (count == 0) return device_error("no CUDA device: no GPU, or no driver of it");
  if (ordinal < 0 || ordinal >= count) {
    return device_error("CUDA device must be between 0 and %d: got %d", count - 1, ordinal);
  }
  int major = 0, minor = 0, shared = 0;
  ONEPASS_RETURN_IF_ERROR(
      cuda::status_of(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal), "device"));
  ONEPASS_RETURN_IF_ERROR(
      cuda::status_of(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal), "device"));
  ONEPASS_RETURN_IF_ERROR(
      cuda::status_of(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal), "device"));
  *machine = {};
  machine->backend = Backend::cuda;
  machine->compute_capability = 10 * major + minor;
  machine->shared_bytes = shared;
  return {};
}

}  // namespace onepass
