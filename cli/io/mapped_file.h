// A file mapped into memory for reading.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "io/result.h"

namespace onepass::cli {

class MappedFile {
 public:
  static Result<MappedFile> open(const std::string& path);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  explicit MappedFile(std::span<const std::byte> bytes) : bytes_(bytes) {}
  std::span<const std::byte> bytes_;  // empty: nothing mapped
};

}  // namespace onepass::cli
