// .npy, versions 1 to 3: one array, C order, little-endian. bfloat16 is numpy's 2-byte void, as ml_dtypes writes it.
#pragma once

#include <span>
#include <string>

#include "io/element_type.h"
#include "io/output_file.h"
#include "io/result.h"

namespace onepass::cli {

/// The array of a file held in memory; a view into `file`. `name` begins each error line.
Result<TensorView> parse_npy(std::span<const std::byte> file, const std::string& name);

Status write_npy(OutputFile& file, const TensorView& tensor);

}  // namespace onepass::cli
