#include "core/status.h"

#include <cstdarg>
#include <cstdio>

namespace onepass {
namespace {

Status formatted(onepass_status_t code, const char* format, std::va_list arguments) {
  char line[512];
  std::vsnprintf(line, sizeof line, format, arguments);
  // Names that a caller passed may hold anything; the text stays one printable line.
  for (char* c = line; *c != 0; ++c) {
    if (static_cast<unsigned char>(*c) < 0x20 || *c == 0x7f) *c = '?';
  }
  return {code, line};
}

}  // namespace

Status invalid_argument(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  Status status = formatted(ONEPASS_INVALID_ARGUMENT, format, arguments);
  va_end(arguments);
  return status;
}

Status unsupported(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  Status status = formatted(ONEPASS_UNSUPPORTED, format, arguments);
  va_end(arguments);
  return status;
}

Status device_error(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  Status status = formatted(ONEPASS_DEVICE_ERROR, format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace onepass
