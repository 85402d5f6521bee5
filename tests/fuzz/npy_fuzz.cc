// Any bytes as an .npy file: refused in one line, or the view lies inside the file and agrees with its shape.
#include <cstdlib>

#include "io/npy.h"

using namespace onepass::cli;

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> file(reinterpret_cast<const std::byte*>(data), size);
  const auto result = parse_npy(file, "x.npy");
  if (!result.ok()) {
    const std::string& text = result.error().text();
    require(!text.empty() && text.size() < 1000);
    for (const char c : text) require(static_cast<unsigned char>(c) >= 0x20);
    return 0;
  }
  const TensorView& tensor = result.value();
  require(tensor.shape.size() <= kMaxRank);
  require(bytes_of(tensor.shape, tensor.type) == tensor.size);
  require(tensor.data >= file.data() && tensor.data + tensor.size == file.data() + size);
  return 0;
}
