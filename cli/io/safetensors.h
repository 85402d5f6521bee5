// .safetensors: 8 bytes of header length, a JSON header, the tensors' bytes without gaps. Reading trusts nothing:
// every offset, size, shape and name is checked against the others and against the file before any data is touched.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/element_type.h"
#include "io/mapped_file.h"
#include "io/output_file.h"
#include "io/result.h"

namespace onepass::cli {

struct SafetensorsContents {
  std::vector<TensorView> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;
};

/// The tensors of a file held in memory; views into `file`. `name` begins each error line.
Result<SafetensorsContents> parse_safetensors(std::span<const std::byte> file, const std::string& name);

/// Writes the tensors, aligned to 64 bytes from the file's start. Nothing is visible before the OutputFile's commit.
Status write_safetensors(OutputFile& file, std::span<const TensorView> tensors,
                         const std::map<std::string, std::string>& metadata);

}  // namespace onepass::cli
