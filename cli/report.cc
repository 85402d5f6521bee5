#include "report.h"

#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <ctime>

#include "check/device.h"
#include "io/output_file.h"

namespace onepass::cli {
namespace {

using Clock = std::chrono::steady_clock;

bool is_numeric(const std::string& cell) {
  return !cell.empty() && cell.find_first_of("0123456789-") == 0;
}

std::string date_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts = {};
  ::gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

}  // namespace

Table::Table(std::vector<std::string> header) {
  rows_.push_back(std::move(header));
}

void Table::add(std::vector<std::string> row) {
  rows_.push_back(std::move(row));
}

std::string Table::text() const {
  std::vector<std::size_t> width(rows_[0].size());
  std::vector<bool> right(rows_[0].size(), rows_.size() > 1);
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    for (std::size_t c = 0; c < width.size(); ++c) {
      width[c] = std::max(width[c], rows_[r][c].size());
      if (r > 0) right[c] = right[c] && is_numeric(rows_[r][c]);
    }
  }
  std::string text;
  for (const std::vector<std::string>& row : rows_) {
    std::string line;
    for (std::size_t c = 0; c < width.size(); ++c) {
      const std::string padding(width[c] - row[c].size(), ' ');
      line += (c > 0 ? "  " : "") + (right[c] ? padding + row[c] : row[c] + padding);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string format(const char* text, ...) {
  std::va_list arguments;
  va_start(arguments, text);
  std::va_list copy;
  va_copy(copy, arguments);
  std::string result(static_cast<std::size_t>(std::max(0, std::vsnprintf(nullptr, 0, text, copy))), '\0');
  va_end(copy);
  std::vsnprintf(result.data(), result.size() + 1, text, arguments);
  va_end(arguments);
  return result;
}

std::string duration_text(double seconds) {
  if (seconds >= 1) return format("%.3g s", seconds);
  return seconds >= 1e-3 ? format("%.3g ms", seconds * 1e3) : format("%.3g us", seconds * 1e6);
}

std::string bytes_text(double bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; bytes >= 1024 && unit < 4; ++unit) bytes /= 1024;
  return format("%.4g %s", bytes, kUnits[unit]);
}

std::string cpu_name() {
  std::string name = "unknown CPU";
  if (std::FILE* file = std::fopen("/proc/cpuinfo", "re")) {
    char line[256], found[200];
    while (std::fgets(line, sizeof line, file) != nullptr) {
      if (std::sscanf(line, "model name : %199[^\n]", found) == 1) {
        name = found;
        break;
      }
    }
    std::fclose(file);
  }
  return name;
}

nlohmann::ordered_json json_object(const Options& options, nlohmann::ordered_json rows) {
  const int threads = options.thread_count();
  nlohmann::ordered_json object;
  object["onepass"] = onepass_version();
  object["commit"] = build_commit();
  object["date"] = date_now();
  if (options.backend == "cuda") {
    object["device"] = {
        {"name", check::gpu_name()}, {"backend", "cuda"}, {"threads", threads}, {"driver", check::gpu_driver()}};
  } else {
    object["device"] = {{"name", cpu_name()}, {"backend", "cpu"}, {"threads", threads}, {"driver", nullptr}};
  }
  object["rows"] = std::move(rows);
  return object;
}

Status print(const Options& options, const std::string& report, nlohmann::ordered_json rows,
             const nlohmann::ordered_json& more) {
  if (options.json) {
    nlohmann::ordered_json object = json_object(options, std::move(rows));
    object.update(more);
    const std::string text = object.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
    if (!options.json_file.empty()) {
      ONEPASS_RETURN_IF_ERROR(write_file(options.json_file, text));
    } else {
      std::fputs(text.c_str(), stdout);
    }
  }
  if (options.report_on_stdout()) std::fputs(report.c_str(), stdout);
  // A full disk or a closed pipe behind standard output shows up here at the latest.
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) return io_error("standard output cannot be written");
  return {};
}

Progress::Progress(const char* title, std::size_t total)
    : title_(title),
      total_(std::max<std::size_t>(total, 1)),
      visible_(::isatty(STDERR_FILENO) != 0),
      start_(Clock::now()),
      shown_(start_) {}

Progress::~Progress() {
  if (visible_) std::fputs("\r\x1b[K", stderr);
}

void Progress::set(std::size_t done) {
  const auto now = Clock::now();
  if (!visible_ || now - shown_ < std::chrono::milliseconds(100)) return;
  shown_ = now;
  constexpr std::size_t kWidth = 30;
  const std::size_t full = std::min(done, total_) * kWidth / total_;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const double left =
      done > 0 ? elapsed * static_cast<double>(total_ - std::min(done, total_)) / static_cast<double>(done) : 0;
  std::fprintf(stderr, "\r%s [%s%s] %zu/%zu, %.0f s left\x1b[K", title_, std::string(full, '#').c_str(),
               std::string(kWidth - full, '.').c_str(), done, total_, left);
}

}  // namespace onepass::cli
