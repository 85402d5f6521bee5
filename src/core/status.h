// Status: a code and one line of text. Host code returns it; nothing in the library throws across the C ABI.
#pragma once

#include <string>
#include <utility>

#include "core/base.h"

namespace onepass {

class [[nodiscard]] Status {
 public:
  Status() = default;  // OK
  Status(onepass_status_t code, std::string text) : code_(code), text_(std::move(text)) {}

  bool ok() const { return code_ == ONEPASS_OK; }
  onepass_status_t code() const { return code_; }
  const std::string& text() const { return text_; }

 private:
  onepass_status_t code_ = ONEPASS_OK;
  std::string text_;
};

/// printf-style text.
[[gnu::format(printf, 1, 2)]] Status invalid_argument(const char* format, ...);
[[gnu::format(printf, 1, 2)]] Status unsupported(const char* format, ...);
[[gnu::format(printf, 1, 2)]] Status device_error(const char* format, ...);

#define ONEPASS_RETURN_IF_ERROR(expression)   \
  do {                                        \
    ::onepass::Status status_ = (expression); \
    if (!status_.ok()) return status_;        \
  } while (false)

}  // namespace onepass
