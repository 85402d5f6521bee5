#include "core/status.h"

#include <cstdarg>
#include <cstdio>

namespace onepass {
namespace {

Status formatted(onepass_status_t code, const char* format, std::va_list arguments) {
  char line[512];
  std::vsnprintf(line, sizeof line, format, arguments);
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
