#include "io/npy.h"

namespace onepass::cli {

Status write_npy(OutputFile& file, const TensorView& tensor) {
  const char* descr = info_of(tensor.type).npy;
  if (descr == nullptr) return io_error(".npy has no type for %s; write .safetensors", name_of(tensor.type));
  std::string header =
      "{'descr': '" + std::string(descr) + "', 'fortran_order': False, 'shape': " + shape_text(tensor.shape) + ", }";
  // The data begins at a multiple of 64 bytes, after the newline that ends the header.
  header.append(63 - (10 + header.size()) % 64, ' ');
  header += '\n';
  std::string prefix = "\x93NUMPY";
  prefix += '\1';
  prefix += '\0';
  prefix += static_cast<char>(header.size() & 0xff);
  prefix += static_cast<char>(header.size() >> 8);
  ONEPASS_RETURN_IF_ERROR(file.write(prefix + header));
  return file.write({tensor.data, static_cast<std::size_t>(tensor.size)});
}

}  // namespace onepass::cli
