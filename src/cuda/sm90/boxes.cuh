// Boxes of tensor maps as host/tensor_map.h makes them.
#pragma once

#include "cuda/ptx/tma.cuh"

namespace onepass::cuda::sm90 {

/// Where a box of `box_rows` rows lies whose first `rows` (1 to box_rows) are rows [row, row + rows) of the operand;
/// the others lie outside the map (see host/tensor_map.h). A panel whose columns all lie outside the operand's `dim` is
/// the box beyond row 0, so that no address outside the operand is formed.
__device__ __forceinline__ ptx::TmaCoordinates box_at(int dim, int box_rows, int panel, int row, int rows, int head,
                                                      int batch) {
  if (panel * 64 >= dim) return {0, box_rows, 0, head, batch};
  return {panel * 64, box_rows - rows, row + rows, head, batch};
}

}  // namespace onepass::cuda::sm90
