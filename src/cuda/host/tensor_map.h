// Tensor maps (TMA descriptors) of operands of 16-bit elements.
#pragma once

#include <cuda.h>

#include "core/problem.h"
#include "core/status.h"

namespace onepass::cuda {

/// Extents of an operand: rows are its seq dimension (packed: all tokens, batch 1).
struct MapExtents {
  std::int64_t dim, rows, heads, batch;
};

/// Whether TMA can walk the operand: base and strides in multiples of 16 bytes.
bool tma_can_walk(const Tensor& tensor, const MapExtents& extents);

/// A map whose box is `box_rows` rows of 64 columns, 128-byte swizzle, for coordinates
///     (column, box_rows - rows, first_row + rows, head, batch)
/// of the box that holds the rows [first_row, first_row + rows), rows <= box_rows: the row index is the sum of the
/// second and the third less box_rows, so that the box's further rows lie outside the second dimension wherever a
/// sequence ends (the ragged descriptors of Triton). Columns from `dim` on are outside too.
Status encode_map(CUtensorMap& map, const Tensor& tensor, const MapExtents& extents, int box_rows);

}  // namespace onepass::cuda
