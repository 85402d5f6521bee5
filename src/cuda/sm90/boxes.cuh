// Boxes of tensor maps as host/tensor_map.h makes them.
#pragma once

#include "cuda/ptx/tma.cuh"

namespace onepass::cuda::sm90 {

/// Where a box of `box_rows` rows lies whose first `rows` (1 to box_rows) are rows [row, row + rows) of the operand;
/// the others lie outside the map (see host/tensor_map.h), and so may columns, but never all of them: a box without any
/// element is zeros by the book, but it faulted where the map's base, which lies before the operand, was not mapped.
__device__ __forceinline__ ptx::TmaCoordinates box_at(int box_rows, int panel, int row, int rows, int head, int batch) {
  return {panel * 64, box_rows - rows, row + rows, head, batch};
}

}  // namespace onepass::cuda::sm90
