#include "source.h"

#include <cstring>

#include "io/npy.h"
#include "options.h"

namespace onepass::cli {
namespace {

/// The tensor in the mapping, or in memory of its own where the file left it misaligned.
Result<Array> array_of(const TensorView& view, const std::shared_ptr<const MappedFile>& mapping,
                       const std::string& name) {
  if (info_of(view.type).dlpack_bits == 0) {
    return usage_error("tensor '%s' holds %s; attention takes f32, f16, bf16 and, for lengths, integers",
                       printable(name, 60).c_str(), name_of(view.type));
  }
  if (reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.type) == 0) {
    return Array::view(view.type, view.shape, mapping, view.data);
  }
  ONEPASS_ASSIGN(Array copy, Array::allocate(view.type, view.shape));
  std::memcpy(copy.data(), view.data, view.size);
  return copy;
}

}  // namespace

Status TensorSource::open(const std::string& file) {
  if (file.empty()) return {};
  file_ = file;
  ONEPASS_ASSIGN(MappedFile mapped, MappedFile::open(file));
  mapping_ = std::make_shared<const MappedFile>(std::move(mapped));
  ONEPASS_ASSIGN(SafetensorsContents contents, parse_safetensors(mapping_->bytes(), printable(file)));
  for (TensorView& tensor : contents.tensors) {
    std::string name = tensor.name;
    tensors_.emplace(std::move(name), std::move(tensor));
  }
  return {};
}

Result<Array> TensorSource::load(const std::string& name) const {
  if (const auto found = tensors_.find(name); found != tensors_.end()) return array_of(found->second, mapping_, name);
  if (name.ends_with(".npy")) {
    ONEPASS_ASSIGN(MappedFile mapped, MappedFile::open(name));
    const auto mapping = std::make_shared<const MappedFile>(std::move(mapped));
    ONEPASS_ASSIGN(TensorView view, parse_npy(mapping->bytes(), printable(name)));
    return array_of(view, mapping, name);
  }
  if (file_.empty()) {
    return usage_error("'%s' is no .npy file, and there is no .safetensors FILE to look it up in",
                       printable(name, 60).c_str());
  }
  std::vector<std::string> names;
  std::string list;
  for (const auto& [other, view] : tensors_) {
    names.push_back(other);
    list += (list.empty() ? "" : ", ") + other;
  }
  const std::string near = nearest(name, names);
  return usage_error("%s has no tensor '%s'; %s: %s", printable(file_).c_str(), printable(name, 60).c_str(),
                     near.empty() ? "it has" : "nearest", printable(near.empty() ? list : near).c_str());
}

Result<Array> TensorSource::load_int32(const std::string& name) const {
  ONEPASS_ASSIGN(Array array, load(name));
  if (array.type() == ElementType::i32) return array;
  Result<Array> converted = array.converted(ElementType::i32);
  if (converted.ok()) return converted;
  return Status(converted.error().code(), "'" + printable(name, 60) + "': " + converted.error().text());
}

}  // namespace onepass::cli
