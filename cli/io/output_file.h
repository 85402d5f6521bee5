// Files that appear whole or not at all: written under a temporary name in the same folder, synchronised, renamed.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "io/result.h"

namespace onepass::cli {

class OutputFile {
 public:
  /// Nothing is visible at `path` before commit(). Refuses at once what commit() could not replace. A character device
  /// or a pipe is written directly.
  static Result<OutputFile> create(const std::string& path);

  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&& other) noexcept;
  ~OutputFile();  // removes the temporary file if it was not committed

  Status write(std::span<const std::byte> bytes);
  Status write(std::string_view text) { return write(std::as_bytes(std::span(text))); }
  /// Synchronises and closes; still not visible. Several files become visible together: finish all, then commit all.
  Status finish();
  Status commit();

 private:
  OutputFile(std::string path, std::string temporary, int fd)
      : path_(std::move(path)), temporary_(std::move(temporary)), fd_(fd) {}

  std::string path_;
  std::string temporary_;  // empty: written directly, or committed
  int fd_ = -1;            // -1: finished
};

/// Writes one small file whole.
Status write_file(const std::string& path, std::string_view text);

}  // namespace onepass::cli
