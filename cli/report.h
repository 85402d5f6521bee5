// What commands print: tables, numbers with units, the JSON object, progress.
#pragma once

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "options.h"

namespace onepass::cli {

/// Columns as wide as their widest cell; numbers to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> header);
  void add(std::vector<std::string> row);
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

[[gnu::format(printf, 1, 2)]] std::string format(const char* text, ...);
/// "1.23 ms", "45.6 us".
std::string duration_text(double seconds);
/// "1.5 MiB".
std::string bytes_text(double bytes);

/// {"onepass": version, "commit", "date", "device": {...}, "rows": rows}.
nlohmann::ordered_json json_object(const Options& options, nlohmann::ordered_json rows);
/// Writes the JSON where the options want it, and the report to standard output unless the JSON is there.
/// `more`: members of the JSON object beside the rows.
Status print(const Options& options, const std::string& report, nlohmann::ordered_json rows,
             const nlohmann::ordered_json& more = nlohmann::ordered_json::object());

/// A bar on standard error, if that is a terminal; else nothing.
class Progress {
 public:
  Progress(const char* title, std::size_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void set(std::size_t done);

 private:
  const char* title_;
  std::size_t total_;
  bool visible_;
  std::chrono::steady_clock::time_point start_, shown_;
};

/// "AMD EPYC 9654".
std::string cpu_name();
/// The commit this was built from, or "unknown".
const char* build_commit();

}  // namespace onepass::cli
