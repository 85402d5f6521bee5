#include "io/output_file.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>

#include "files.h"
#include "io/mapped_file.h"

namespace onepass::cli {
namespace {

TEST(OutputFile, IsInvisibleUntilCommitted) {
  const Folder folder;
  const std::string path = folder.file("a");
  put_file(path, "old");
  {
    auto file = OutputFile::create(path);
    ASSERT_TRUE(file.ok());
    ASSERT_TRUE(file->write("new").ok());
    ASSERT_TRUE(file->finish().ok());
    EXPECT_EQ(read_file(path), "old");
    ASSERT_TRUE(file->commit().ok());
    EXPECT_EQ(read_file(path), "new");
  }
  EXPECT_EQ(folder.entries(), 1u);
}

TEST(OutputFile, LeavesNothingIfDropped) {
  const Folder folder;
  {
    auto file = OutputFile::create(folder.file("a"));
    ASSERT_TRUE(file.ok());
    ASSERT_TRUE(file->write("half").ok());
    OutputFile moved = std::move(*file);
    EXPECT_EQ(folder.entries(), 1u);
  }
  EXPECT_EQ(folder.entries(), 0u);
}

TEST(OutputFile, RefusesWhatItCannotReplace) {
  const Folder folder;
  EXPECT_FALSE(OutputFile::create("").ok());
  EXPECT_FALSE(OutputFile::create(folder.file("none/a")).ok());
  ASSERT_EQ(::mkdir(folder.file("folder").c_str(), 0777), 0);
  const auto result = OutputFile::create(folder.file("folder"));
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().code(), ONEPASS_IO_ERROR);
  EXPECT_NE(result.error().text().find("directory"), std::string::npos) << result.error().text();
  EXPECT_EQ(folder.entries(), 1u);
}

TEST(OutputFile, RespectsWriteProtection) {
  const Folder folder;
  put_file(folder.file("a"), "old");
  ASSERT_EQ(::chmod(folder.file("a").c_str(), 0444), 0);
  if (::access(folder.file("a").c_str(), W_OK) == 0) GTEST_SKIP() << "this user may write everything";
  EXPECT_FALSE(OutputFile::create(folder.file("a")).ok());
}

TEST(OutputFile, FollowsLinksAndKeepsModes) {
  const Folder folder;
  put_file(folder.file("target"), "old");
  ASSERT_EQ(::chmod(folder.file("target").c_str(), 0640), 0);
  ASSERT_EQ(::symlink("target", folder.file("link").c_str()), 0);
  ASSERT_TRUE(write_file(folder.file("link"), "new").ok());
  EXPECT_EQ(read_file(folder.file("target")), "new");
  EXPECT_TRUE(std::filesystem::is_symlink(folder.file("link")));
  struct stat status = {};
  ASSERT_EQ(::stat(folder.file("target").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0640u);
}

TEST(OutputFile, WritesDevicesDirectly) {
  EXPECT_TRUE(write_file("/dev/null", "text").ok());
  struct stat status = {};
  ASSERT_EQ(::stat("/dev/null", &status), 0);
  EXPECT_TRUE(S_ISCHR(status.st_mode));
}

TEST(OutputFile, ReportsAFullDisk) {
  if (::access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full";
  const Status full = write_file("/dev/full", "text");
  EXPECT_EQ(full.code(), ONEPASS_IO_ERROR);
  EXPECT_NE(full.text().find("No space left"), std::string::npos) << full.text();
}

TEST(OutputFile, KeepsTheOldFileWhereSpaceRunsOut) {
  const Folder folder;
  put_file(folder.file("a"), "old");
  // A limit on file sizes fails in the middle of a write, as a full disk does.
  rlimit old = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small = {1000, old.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = write_file(folder.file("a"), std::string(5000, 'x'));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(status.code(), ONEPASS_IO_ERROR);
  EXPECT_EQ(read_file(folder.file("a")), "old");
  EXPECT_EQ(folder.entries(), 1u);
}

TEST(MappedFile, RefusesWhatIsNoFile) {
  const Folder folder;
  EXPECT_FALSE(MappedFile::open(folder.file("none")).ok());
  EXPECT_FALSE(MappedFile::open(folder.file("")).ok());
  EXPECT_FALSE(MappedFile::open("/dev/null").ok());
  ASSERT_EQ(::mkfifo(folder.file("pipe").c_str(), 0600), 0);
  const auto pipe = MappedFile::open(folder.file("pipe"));  // and does not wait for a writer
  ASSERT_FALSE(pipe.ok());
  EXPECT_EQ(pipe.error().code(), ONEPASS_IO_ERROR);
  put_file(folder.file("empty"), "");
  const auto empty = MappedFile::open(folder.file("empty"));
  ASSERT_TRUE(empty.ok());
  EXPECT_TRUE(empty.value().bytes().empty());
}

}  // namespace
}  // namespace onepass::cli
