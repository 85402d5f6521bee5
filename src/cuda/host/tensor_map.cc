#include "cuda/host/tensor_map.h"

#include <cuda_runtime.h>

namespace onepass::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, without linking to the driver: the library also loads where there is none.
Encode encoder() {
  static const Encode function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
  }();
  return function;
}

constexpr std::int64_t kMaxStride = std::int64_t{1} << 40;  // bytes, exclusive

// A stride that is used, in bytes; that of a dimension of size 1 may be anything.
std::int64_t stride_bytes(const Tensor& tensor, std::int64_t stride, std::int64_t extent) {
  return extent > 1 ? stride * dtype_size(tensor.dtype) : 16;
}

}  // namespace

bool tma_can_walk(const Tensor& tensor, const MapExtents& extents) {
  const std::int64_t strides[] = {stride_bytes(tensor, tensor.stride_seq, extents.rows),
                                  stride_bytes(tensor, tensor.stride_head, extents.heads),
                                  stride_bytes(tensor, tensor.stride_batch, extents.batch)};
  for (const std::int64_t stride : strides) {
    if (stride % 16 != 0 || stride >= kMaxStride) return false;
  }
  return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0;
}

Status encode_map(CUtensorMap& map, const Tensor& tensor, const MapExtents& extents, int box_rows) {
  const Encode encode = encoder();
  if (encode == nullptr) return device_error("the CUDA driver has no cuTensorMapEncodeTiled (12.0 or newer needed)");
  const std::int64_t row = stride_bytes(tensor, tensor.stride_seq, extents.rows);
  const cuuint64_t sizes[5] = {static_cast<cuuint64_t>(extents.dim), static_cast<cuuint64_t>(box_rows),
                               static_cast<cuuint64_t>(extents.rows + 1), static_cast<cuuint64_t>(extents.heads),
                               static_cast<cuuint64_t>(extents.batch)};
  const cuuint64_t strides[4] = {static_cast<cuuint64_t>(row), static_cast<cuuint64_t>(row),
                                 static_cast<cuuint64_t>(stride_bytes(tensor, tensor.stride_head, extents.heads)),
                                 static_cast<cuuint64_t>(stride_bytes(tensor, tensor.stride_batch, extents.batch))};
  const cuuint32_t box[5] = {64, static_cast<cuuint32_t>(box_rows), 1, 1, 1};
  const cuuint32_t step[5] = {1, 1, 1, 1, 1};
  char* const base = static_cast<char*>(tensor.data) - row * box_rows;
  const CUresult result =
      encode(&map, tensor.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5,
             base, sizes, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    return device_error("cuTensorMapEncodeTiled failed with error %d", static_cast<int>(result));
  return {};
}

}  // namespace onepass::cuda
