// Where a command's tensors come from: the tensors of FILE by name, or .npy files.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "array.h"
#include "io/mapped_file.h"
#include "io/safetensors.h"

namespace onepass::cli {

class TensorSource {
 public:
  /// Maps FILE, a .safetensors; nothing to map if the name is empty.
  Status open(const std::string& file);

  bool has(const std::string& name) const { return tensors_.count(name) != 0; }
  /// A tensor of FILE, or an .npy file if the name ends so.
  Result<Array> load(const std::string& name) const;
  /// The same as int32, whatever integers the file holds.
  Result<Array> load_int32(const std::string& name) const;

 private:
  std::string file_;
  std::shared_ptr<const MappedFile> mapping_;
  std::map<std::string, TensorView> tensors_;
};

}  // namespace onepass::cli
