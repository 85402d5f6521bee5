// Any bytes as a .safetensors file: refused in one line, or every view lies inside the file and agrees with its shape.
#include <cstdlib>
#include <set>

#include "io/safetensors.h"

using namespace onepass::cli;

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> file(reinterpret_cast<const std::byte*>(data), size);
  const auto result = parse_safetensors(file, "x");
  if (!result.ok()) {
    const std::string& text = result.error().text();
    require(!text.empty() && text.size() < 1000);
    for (const char c : text) require(static_cast<unsigned char>(c) >= 0x20);
    return 0;
  }
  std::set<std::string> names;
  std::uint64_t total = 0;
  for (const TensorView& tensor : result.value().tensors) {
    require(names.insert(tensor.name).second);
    require(bytes_of(tensor.shape, tensor.type) == tensor.size);
    require(tensor.data >= file.data() && tensor.size <= size);
    require(tensor.data + tensor.size <= file.data() + size);
    total += tensor.size;
  }
  require(total <= size);
  return 0;
}
