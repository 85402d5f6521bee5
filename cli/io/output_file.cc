#include "io/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace onepass::cli {
namespace {

Status refusal(const std::string& path, const char* action, int error) {
  return io_error("%s: cannot %s: %s; nothing was written there", path.c_str(), action, std::strerror(error));
}

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

/// What a link points to, so that the file is replaced and not the link.
std::string resolve(const std::string& path) {
  struct stat status = {};
  if (::lstat(path.c_str(), &status) != 0 || !S_ISLNK(status.st_mode)) return path;
  char target[PATH_MAX];
  return ::realpath(path.c_str(), target) != nullptr ? std::string(target) : path;
}

}  // namespace

Result<OutputFile> OutputFile::create(const std::string& name) {
  if (name.empty()) return io_error("an output file needs a name");
  const std::string path = resolve(name);
  struct stat status = {};
  const bool exists = ::stat(path.c_str(), &status) == 0;
  if (exists && S_ISDIR(status.st_mode)) return refusal(path, "replace", EISDIR);
  if (exists && !S_ISREG(status.st_mode)) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd < 0) return refusal(path, "open", errno);
    return OutputFile(path, "", fd);
  }
  // A rename would replace a write-protected file; its protection is meant.
  if (exists && ::access(path.c_str(), W_OK) != 0) return refusal(path, "replace", errno);

  std::string temporary = path + ".XXXXXX";
  const int fd = ::mkostemp(temporary.data(), O_CLOEXEC);
  if (fd < 0) return refusal(path, "create a file in its folder", errno);
  // mkostemp makes private files; take the old file's mode, or the one a plain open would give.
  const mode_t mask = ::umask(0);
  ::umask(mask);
  ::fchmod(fd, exists ? (status.st_mode & 07777) : (0666 & ~mask));
  return OutputFile(path, std::move(temporary), fd);
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      fd_(std::exchange(other.fd_, -1)) {}

OutputFile& OutputFile::operator=(OutputFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(temporary_, other.temporary_);
  std::swap(fd_, other.fd_);
  return *this;
}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

Status OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    // Linux writes at most 2^31 - 4096 bytes a call.
    const ssize_t written = ::write(fd_, bytes.data(), std::min(bytes.size(), std::size_t{1} << 30));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return refusal(path_, "write", written < 0 ? errno : EIO);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  return {};
}

Status OutputFile::finish() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0) return {};
  const bool synchronised = temporary_.empty() || ::fsync(fd) == 0;
  const int error = errno;
  const bool closed = ::close(fd) == 0;
  if (!synchronised) return refusal(path_, "write", error);
  if (!closed) return refusal(path_, "write", errno);
  return {};
}

Status OutputFile::commit() {
  ONEPASS_RETURN_IF_ERROR(finish());
  if (temporary_.empty()) return {};
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) return refusal(path_, "replace", errno);
  temporary_.clear();
  // The name itself is only safe once its folder is on disk; a folder that cannot be synchronised is no failure.
  const int folder = ::open(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    ::fsync(folder);
    ::close(folder);
  }
  return {};
}

Status write_file(const std::string& path, std::string_view text) {
  ONEPASS_ASSIGN(OutputFile file, OutputFile::create(path));
  ONEPASS_RETURN_IF_ERROR(file.write(text));
  return file.commit();
}

}  // namespace onepass::cli
