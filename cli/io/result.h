// Result: a value, or the Status that says in one line why there is none.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "core/status.h"

namespace onepass::cli {

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}       // NOLINT: implicit by design
  Result(Status error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT

  bool ok() const { return state_.index() == 0; }
  const Status& error() const { return std::get<1>(state_); }
  T& value() { return std::get<0>(state_); }
  const T& value() const { return std::get<0>(state_); }
  T& operator*() { return value(); }
  T* operator->() { return &value(); }

 private:
  std::variant<T, Status> state_;
};

/// printf-style text, for files that cannot be read or written.
[[gnu::format(printf, 1, 2)]] Status io_error(const char* format, ...);
/// printf-style text, for arguments that make no sense.
[[gnu::format(printf, 1, 2)]] Status usage_error(const char* format, ...);

/// `text` as one printable line of at most `limit` characters: control characters become '?'.
std::string printable(std::string_view text, std::size_t limit = 120);

#define ONEPASS_CLI_CONCAT_(a, b) a##b
#define ONEPASS_CLI_CONCAT(a, b) ONEPASS_CLI_CONCAT_(a, b)
/// `auto name = value of the Result expression`, or return its error.
#define ONEPASS_ASSIGN(declaration, expression)                                                                  \
  auto ONEPASS_CLI_CONCAT(result_, __LINE__) = (expression);                                                     \
  if (!ONEPASS_CLI_CONCAT(result_, __LINE__).ok()) return Status(ONEPASS_CLI_CONCAT(result_, __LINE__).error()); \
  declaration = std::move(ONEPASS_CLI_CONCAT(result_, __LINE__).value())

}  // namespace onepass::cli
