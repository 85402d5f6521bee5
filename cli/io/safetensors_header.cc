#include "io/safetensors_header.h"

#include <limits>
#include <utility>

#include "io/result.h"

namespace onepass::cli {

bool SafetensorsHeader::fail(const std::string& text) {
  error = text;
  return false;
}

std::string SafetensorsHeader::where() const {
  if (metadata_next_) return "__metadata__";
  return entries.empty() ? "the header" : "tensor '" + printable(entries.back().name, 60) + "'";
}

bool SafetensorsHeader::refuse(const std::string& what) {
  switch (place_) {
    case Place::start: return fail("the header must be a JSON object, not " + what);
    case Place::top: return fail(where() + " must be an object, not " + what);
    case Place::entry: return fail(where() + ": unexpected " + what);
    case Place::metadata:
    case Place::metadata_value: return fail("__metadata__ maps names to strings, not to " + what);
    case Place::dtype: return fail(where() + ": dtype must be a string, not " + what);
    case Place::shape: return fail(where() + ": shape must be an array of sizes, not " + what);
    case Place::offsets: return fail(where() + ": data_offsets must be an array of two offsets, not " + what);
    case Place::shape_sizes: return fail(where() + ": a size in shape must be a whole number, not " + what);
    case Place::offsets_values: return fail(where() + ": an offset must be a whole number, not " + what);
  }
  return false;
}

bool SafetensorsHeader::number_unsigned(std::uint64_t value) {
  if (place_ == Place::shape_sizes) {
    std::vector<std::int64_t>& shape = entries.back().shape;
    if (shape.size() == kMaxRank) return fail(where() + ": more than " + std::to_string(kMaxRank) + " dimensions");
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return fail(where() + ": size " + std::to_string(value) + " passes 2^63 - 1");
    }
    shape.push_back(static_cast<std::int64_t>(value));
    return true;
  }
  if (place_ == Place::offsets_values) {
    std::vector<std::uint64_t>& offsets = entries.back().offsets;
    if (offsets.size() == 2) return fail(where() + ": data_offsets holds more than two offsets");
    offsets.push_back(value);
    return true;
  }
  return refuse("a number");
}

bool SafetensorsHeader::string(std::string& value) {
  if (place_ == Place::dtype) {
    entries.back().dtype = std::move(value);
    place_ = Place::entry;
    return true;
  }
  if (place_ == Place::metadata_value) {
    if (!metadata.emplace(metadata_key_, std::move(value)).second) {
      return fail("__metadata__ holds '" + printable(metadata_key_, 60) + "' twice");
    }
    place_ = Place::metadata;
    return true;
  }
  return refuse("a string");
}

bool SafetensorsHeader::start_object(std::size_t) {
  if (place_ == Place::start) {
    place_ = Place::top;
    return true;
  }
  if (place_ == Place::top) {
    place_ = metadata_next_ ? Place::metadata : Place::entry;
    return true;
  }
  return refuse("an object");
}

bool SafetensorsHeader::key(std::string& value) {
  if (place_ == Place::top) {
    metadata_next_ = value == "__metadata__";
    if (metadata_next_ && std::exchange(metadata_seen_, true)) return fail("the header holds __metadata__ twice");
    if (!metadata_next_) {
      entries.emplace_back();
      entries.back().name = std::move(value);
    }
    return true;
  }
  if (place_ == Place::metadata) {
    metadata_key_ = std::move(value);
    place_ = Place::metadata_value;
    return true;
  }
  SafetensorsEntry& entry = entries.back();
  const bool known = value == "dtype" || value == "shape" || value == "data_offsets";
  if (!known) return fail(where() + ": unknown field '" + printable(value, 60) + "'");
  bool& seen = value == "dtype" ? entry.has_dtype : value == "shape" ? entry.has_shape : entry.has_offsets;
  if (std::exchange(seen, true)) return fail(where() + ": " + value + " given twice");
  place_ = value == "dtype" ? Place::dtype : value == "shape" ? Place::shape : Place::offsets;
  return true;
}

bool SafetensorsHeader::end_object() {
  if (place_ == Place::entry) {
    const SafetensorsEntry& entry = entries.back();
    const char* missing = !entry.has_dtype     ? "dtype"
                          : !entry.has_shape   ? "shape"
                          : !entry.has_offsets ? "data_offsets"
                                               : nullptr;
    if (missing != nullptr) return fail(where() + " has no " + missing);
    if (entry.offsets.size() != 2) return fail(where() + ": data_offsets must hold two offsets");
  }
  place_ = Place::top;
  return true;
}

bool SafetensorsHeader::start_array(std::size_t) {
  if (place_ == Place::shape || place_ == Place::offsets) {
    place_ = place_ == Place::shape ? Place::shape_sizes : Place::offsets_values;
    return true;
  }
  return refuse("an array");
}

bool SafetensorsHeader::end_array() {
  place_ = Place::entry;
  return true;
}

bool SafetensorsHeader::parse_error(std::size_t position, const std::string& token,
                                    const nlohmann::detail::exception&) {
  return fail("the header is not JSON at byte " + std::to_string(position) + ", near '" + printable(token, 30) + "'");
}

}  // namespace onepass::cli
