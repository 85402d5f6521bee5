// The JSON header of .safetensors, read event by event: no document tree, so neither depth nor duplicate keys get in.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "io/element_type.h"

namespace onepass::cli {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::uint64_t> offsets;
  bool has_dtype = false, has_shape = false, has_offsets = false;
};

/// nlohmann's SAX interface; every handler returns false to stop, with `error` set.
class SafetensorsHeader {
 public:
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::string> metadata;
  std::string error;

  bool null() { return refuse("null"); }
  bool boolean(bool) { return refuse("a boolean"); }
  bool number_integer(std::int64_t) { return refuse("a negative number"); }
  bool number_unsigned(std::uint64_t value);
  bool number_float(double, const std::string&) { return refuse("a fraction"); }
  bool string(std::string& value);
  bool binary(nlohmann::json::binary_t&) { return refuse("binary data"); }
  bool start_object(std::size_t);
  bool key(std::string& value);
  bool end_object();
  bool start_array(std::size_t);
  bool end_array();
  bool parse_error(std::size_t position, const std::string& token, const nlohmann::detail::exception&);

 private:
  enum class Place { start, top, entry, metadata, metadata_value, dtype, shape, shape_sizes, offsets, offsets_values };

  bool refuse(const std::string& what);
  bool fail(const std::string& text);
  std::string where() const;

  Place place_ = Place::start;
  bool metadata_next_ = false, metadata_seen_ = false;
  std::string metadata_key_;
};

}  // namespace onepass::cli
