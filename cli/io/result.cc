#include "io/result.h"

#include <cstdarg>
#include <cstdio>

namespace onepass::cli {
namespace {

std::string format_text(const char* format, std::va_list arguments) {
  std::va_list copy;
  va_copy(copy, arguments);
  const int length = std::vsnprintf(nullptr, 0, format, copy);
  va_end(copy);
  std::string text(length > 0 ? static_cast<std::size_t>(length) : 0, '\0');
  if (length > 0) std::vsnprintf(text.data(), text.size() + 1, format, arguments);
  return text;
}

}  // namespace

Status io_error(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::string text = format_text(format, arguments);
  va_end(arguments);
  return {ONEPASS_IO_ERROR, std::move(text)};
}

Status usage_error(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::string text = format_text(format, arguments);
  va_end(arguments);
  return {ONEPASS_INVALID_ARGUMENT, std::move(text)};
}

std::string printable(std::string_view text, std::size_t limit) {
  std::string line(text.substr(0, limit));
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  if (text.size() > limit) line += "...";
  return line;
}

}  // namespace onepass::cli
