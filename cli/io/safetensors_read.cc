#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "io/safetensors.h"
#include "io/safetensors_header.h"

namespace onepass::cli {
namespace {

constexpr std::uint64_t kMaxHeader = 100'000'000;  // the limit of the format's own library
constexpr std::size_t kPrefix = 8;

std::uint64_t load_little_endian(const std::byte* bytes) {
  std::uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | std::to_integer<std::uint64_t>(bytes[i]);
  return value;
}

Result<TensorView> view_of(SafetensorsEntry& entry, std::span<const std::byte> data, const std::string& file) {
  const std::string name = printable(entry.name, 60);
  const std::optional<ElementType> type = element_type_of_safetensors(entry.dtype);
  if (!type) {
    return io_error("%s: tensor '%s' has dtype '%s'; known are F64 F32 F16 BF16 F8_E4M3 F8_E5M2 and the integers",
                    file.c_str(), name.c_str(), printable(entry.dtype, 30).c_str());
  }
  const std::uint64_t begin = entry.offsets[0], end = entry.offsets[1];
  if (begin > end || end > data.size()) {
    return io_error("%s: tensor '%s' has data_offsets [%llu, %llu], outside the file's %zu bytes of data", file.c_str(),
                    name.c_str(), static_cast<unsigned long long>(begin), static_cast<unsigned long long>(end),
                    data.size());
  }
  const std::optional<std::uint64_t> bytes = bytes_of(entry.shape, *type);
  if (!bytes || *bytes != end - begin) {
    return io_error("%s: tensor '%s' of shape %s and dtype %s needs %s bytes, data_offsets give %llu", file.c_str(),
                    name.c_str(), printable(shape_text(entry.shape)).c_str(), entry.dtype.c_str(),
                    bytes ? std::to_string(*bytes).c_str() : "2^63 or more",
                    static_cast<unsigned long long>(end - begin));
  }
  return TensorView{std::move(entry.name), *type, std::move(entry.shape), data.data() + begin, end - begin};
}

}  // namespace

Result<SafetensorsContents> parse_safetensors(std::span<const std::byte> file, const std::string& name) {
  if (file.size() < kPrefix) {
    return io_error("%s: %zu bytes are no .safetensors file, which has 8 and a header at least", name.c_str(),
                    file.size());
  }
  const std::uint64_t length = load_little_endian(file.data());
  if (length > kMaxHeader || length > file.size() - kPrefix) {
    return io_error("%s: header length %llu passes the %s", name.c_str(), static_cast<unsigned long long>(length),
                    length > kMaxHeader ? "limit of 100000000 bytes: is it a .safetensors file?"
                                        : ("file's " + std::to_string(file.size()) + " bytes: truncated?").c_str());
  }
  const auto* text = reinterpret_cast<const char*>(file.data() + kPrefix);
  if (length == 0 || text[0] != '{') return io_error("%s: the header does not begin with '{'", name.c_str());

  SafetensorsHeader header;
  if (!nlohmann::json::sax_parse(text, text + length, &header)) {
    return io_error("%s: %s", name.c_str(), header.error.c_str());
  }

  const std::span<const std::byte> data = file.subspan(kPrefix + length);
  SafetensorsContents contents;
  contents.metadata = std::move(header.metadata);
  contents.tensors.reserve(header.entries.size());
  for (SafetensorsEntry& entry : header.entries) {
    ONEPASS_ASSIGN(TensorView view, view_of(entry, data, name));
    contents.tensors.push_back(std::move(view));
  }

  // In order of data every tensor begins where the one before it ends: no overlap, no gap, nothing after the last.
  std::stable_sort(contents.tensors.begin(), contents.tensors.end(), [](const TensorView& a, const TensorView& b) {
    return a.data != b.data ? a.data < b.data : a.size < b.size;
  });
  std::unordered_set<std::string_view> names;
  const std::byte* end = data.data();
  for (const TensorView& tensor : contents.tensors) {
    if (!names.insert(tensor.name).second) {
      return io_error("%s: two tensors are named '%s'", name.c_str(), printable(tensor.name, 60).c_str());
    }
    if (tensor.data != end) {
      return io_error("%s: tensor '%s' begins %lld bytes %s the one before it ends", name.c_str(),
                      printable(tensor.name, 60).c_str(), std::abs(static_cast<long long>(tensor.data - end)),
                      tensor.data < end ? "before" : "after");
    }
    end = tensor.data + tensor.size;
  }
  if (end != data.data() + data.size()) {
    return io_error("%s: %lld bytes after the last tensor belong to none", name.c_str(),
                    static_cast<long long>(data.data() + data.size() - end));
  }
  return contents;
}

}  // namespace onepass::cli
