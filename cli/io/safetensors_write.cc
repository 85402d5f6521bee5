#include <array>
#include <nlohmann/json.hpp>

#include "io/safetensors.h"

namespace onepass::cli {

Status write_safetensors(OutputFile& file, std::span<const TensorView> tensors,
                         const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const TensorView& tensor : tensors) {
    header[tensor.name] = {{"dtype", info_of(tensor.type).safetensors},
                           {"shape", tensor.shape},
                           {"data_offsets", std::array<std::uint64_t, 2>{offset, offset + tensor.size}}};
    offset += tensor.size;
  }
  // Names may come from a command line in any encoding; JSON must be UTF-8.
  std::string text = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.append((64 - (8 + text.size()) % 64) % 64, ' ');

  std::array<char, 8> prefix;
  for (std::size_t i = 0; i < 8; ++i) prefix[i] = static_cast<char>(std::uint64_t{text.size()} >> (8 * i) & 0xff);
  ONEPASS_RETURN_IF_ERROR(file.write(std::string_view(prefix.data(), prefix.size())));
  ONEPASS_RETURN_IF_ERROR(file.write(text));
  for (const TensorView& tensor : tensors) {
    ONEPASS_RETURN_IF_ERROR(file.write({tensor.data, static_cast<std::size_t>(tensor.size)}));
  }
  return {};
}

}  // namespace onepass::cli
