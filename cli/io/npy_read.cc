#include <cstring>
#include <limits>

#include "io/npy.h"

namespace onepass::cli {
namespace {

constexpr std::string_view kMagic{"\x93NUMPY", 6};
constexpr std::uint64_t kMaxHeader = 65'535;  // version 1 cannot have more; longer ones only describe records

/// Reads the header's Python dictionary, of which only {'descr': '...', 'fortran_order': bool, 'shape': (...)} is
/// legal: no expression, no nesting, each key once.
class DictReader {
 public:
  explicit DictReader(std::string_view text) : text_(text) {}

  bool read() {
    if (!take('{')) return fail("does not begin with '{'");
    while (!take('}')) {
      std::string key;
      if (!string(key) || !take(':')) return fail("is not a dictionary of descr, fortran_order and shape");
      if (!value(key)) return false;
      if (!take(',') && peek() != '}') return fail("lacks a comma after " + printable(key, 30));
    }
    skip_spaces();
    if (position_ != text_.size()) return fail("goes on after its '}'");
    if (!has_descr_) return fail("has no descr");
    if (!has_order_) return fail("has no fortran_order");
    if (!has_shape_) return fail("has no shape");
    return true;
  }

  std::string descr;
  bool fortran_order = false;
  std::vector<std::int64_t> shape;
  std::string error;

 private:
  bool fail(const std::string& text) {
    if (error.empty()) error = "the header " + text;
    return false;
  }
  void skip_spaces() {
    while (position_ < text_.size() && (text_[position_] == ' ' || text_[position_] == '\n')) ++position_;
  }
  char peek() {
    skip_spaces();
    return position_ < text_.size() ? text_[position_] : '\0';
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++position_;
    return true;
  }
  bool word(std::string_view expected) {
    skip_spaces();
    if (text_.substr(position_, expected.size()) != expected) return false;
    position_ += expected.size();
    return true;
  }
  bool string(std::string& value) {
    const char quote = peek();
    if (quote != '\'' && quote != '"') return false;
    const std::size_t end = text_.find(quote, position_ + 1);
    if (end == std::string_view::npos) return false;
    value = text_.substr(position_ + 1, end - position_ - 1);
    position_ = end + 1;
    return value.find('\\') == std::string::npos;
  }
  bool once(bool& seen, const char* key) {
    if (seen) return fail(std::string("holds ") + key + " twice");
    return seen = true;
  }
  bool value(const std::string& key) {
    if (key == "descr") {
      if (!once(has_descr_, "descr")) return false;
      return string(descr) || fail("has a descr that is no plain type name: records are not supported");
    }
    if (key == "fortran_order") {
      if (!once(has_order_, "fortran_order")) return false;
      fortran_order = word("True");
      return fortran_order || word("False") || fail("has a fortran_order that is neither True nor False");
    }
    if (key == "shape") return once(has_shape_, "shape") && tuple();
    return fail("has the unknown key '" + printable(key, 30) + "'");
  }
  bool tuple() {
    if (!take('(')) return fail("has a shape that is no tuple");
    while (!take(')')) {
      std::int64_t size = 0;
      if (!number(size)) return fail("has a size in shape that is no whole number below 2^63");
      if (shape.size() == kMaxRank) return fail("has more than 32 dimensions");
      shape.push_back(size);
      if (!take(',') && (peek() != ')' || shape.size() == 1)) return fail("has a shape that is no tuple");
    }
    return true;
  }
  bool number(std::int64_t& value) {
    skip_spaces();
    const std::size_t begin = position_;
    for (; position_ < text_.size() && text_[position_] >= '0' && text_[position_] <= '9'; ++position_) {
      if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, text_[position_] - '0', &value)) {
        return false;
      }
    }
    const bool found = position_ != begin;
    if (position_ < text_.size() && text_[position_] == 'L') ++position_;  // Python 2 wrote long integers so
    return found;
  }

  std::string_view text_;
  std::size_t position_ = 0;
  bool has_descr_ = false, has_order_ = false, has_shape_ = false;
};

}  // namespace

Result<TensorView> parse_npy(std::span<const std::byte> file, const std::string& name) {
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
  if (text.size() < 10 || text.substr(0, kMagic.size()) != kMagic) {
    return io_error("%s: not a .npy file: it does not begin with \\x93NUMPY and a version", name.c_str());
  }
  const int version = static_cast<unsigned char>(text[6]);
  if (version < 1 || version > 3) {
    return io_error("%s: .npy version %d; known are 1, 2 and 3", name.c_str(), version);
  }
  const std::size_t prefix = version == 1 ? 10 : 12;
  if (text.size() < prefix) return io_error("%s: truncated inside its header", name.c_str());
  std::uint64_t length = 0;
  for (std::size_t i = prefix; i > 8; --i) length = length << 8 | static_cast<unsigned char>(text[i - 1]);
  if (length > kMaxHeader || length > text.size() - prefix) {
    return io_error("%s: header length %llu passes the %s", name.c_str(), static_cast<unsigned long long>(length),
                    length > kMaxHeader ? "limit of 65535 bytes" : "file's end: truncated?");
  }

  DictReader header(text.substr(prefix, length));
  if (!header.read()) return io_error("%s: %s", name.c_str(), header.error.c_str());
  if (header.fortran_order) {
    return io_error("%s: fortran_order True is not supported; save numpy.ascontiguousarray(array)", name.c_str());
  }
  const std::optional<ElementType> type = element_type_of_npy(header.descr);
  if (!type) {
    return io_error("%s: dtype '%s'; known are <f8 <f4 <f2, <V2 for bfloat16, and little-endian integers", name.c_str(),
                    printable(header.descr, 30).c_str());
  }
  const std::optional<std::uint64_t> bytes = bytes_of(header.shape, *type);
  const std::uint64_t present = text.size() - prefix - length;
  if (!bytes || *bytes != present) {
    return io_error("%s: shape %s of '%s' needs %s bytes, the file has %llu", name.c_str(),
                    printable(shape_text(header.shape)).c_str(), printable(header.descr, 30).c_str(),
                    bytes ? std::to_string(*bytes).c_str() : "2^63 or more", static_cast<unsigned long long>(present));
  }
  return TensorView{name, *type, std::move(header.shape), file.data() + prefix + length, present};
}

}  // namespace onepass::cli
