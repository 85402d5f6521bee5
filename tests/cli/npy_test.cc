#include "io/npy.h"

#include <cstring>

#include "files.h"
#include "io/mapped_file.h"

namespace onepass::cli {
namespace {

std::string file_of(const std::string& header, const std::string& data, int version = 1) {
  return std::string("\x93NUMPY") + static_cast<char>(version) + '\0' +
         little_endian(header.size(), version == 1 ? 2 : 4) + header + data;
}

std::string header_of(const std::string& descr, const std::string& shape) {
  return "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }\n";
}

void expect_refusal(const std::string& file, const std::string& rule) {
  const auto result = parse_npy(bytes(file), "x.npy");
  ASSERT_FALSE(result.ok()) << rule;
  EXPECT_EQ(result.error().code(), ONEPASS_IO_ERROR);
  EXPECT_NE(result.error().text().find(rule), std::string::npos) << result.error().text();
  EXPECT_EQ(result.error().text().find('\n'), std::string::npos);
}

TEST(Npy, ReadsEveryVersion) {
  for (const int version : {1, 2, 3}) {
    const std::string file = file_of(header_of("<f4", "(2, 1)"), "abcdefgh", version);
    const auto result = parse_npy(bytes(file), "x.npy");
    ASSERT_TRUE(result.ok()) << result.error().text();
    EXPECT_EQ(result.value().type, ElementType::f32);
    EXPECT_EQ(result.value().shape, (std::vector<std::int64_t>{2, 1}));
    EXPECT_EQ(std::memcmp(result.value().data, "abcdefgh", 8), 0);
  }
}

TEST(Npy, ReadsShapesAndSpellings) {
  const auto shape = [](const std::string& header, std::size_t data) {
    const std::string file = file_of(header, std::string(data, 'x'));
    const auto result = parse_npy(bytes(file), "x.npy");
    EXPECT_TRUE(result.ok()) << header << ": " << result.error().text();
    return result.ok() ? result.value().shape : std::vector<std::int64_t>{-1};
  };
  EXPECT_EQ(shape(header_of("<f2", "()"), 2), (std::vector<std::int64_t>{}));
  EXPECT_EQ(shape(header_of("<f2", "(3,)"), 6), (std::vector<std::int64_t>{3}));
  EXPECT_EQ(shape(header_of("<f2", "(3,2,)"), 12), (std::vector<std::int64_t>{3, 2}));
  EXPECT_EQ(shape(header_of("<f2", "(3L, 0L)"), 0), (std::vector<std::int64_t>{3, 0}));
  EXPECT_EQ(shape("{\"shape\":(2,),\"descr\":\"|i1\",\"fortran_order\":False}", 2), (std::vector<std::int64_t>{2}));
}

TEST(Npy, ReadsBfloat16AsTwoByteVoid) {
  for (const char* descr : {"<V2", "|V2", "bfloat16"}) {
    const std::string file = file_of(header_of(descr, "(1,)"), "ab");
    const auto result = parse_npy(bytes(file), "x.npy");
    ASSERT_TRUE(result.ok()) << result.error().text();
    EXPECT_EQ(result.value().type, ElementType::bf16);
  }
}

TEST(Npy, RefusesLyingLengths) {
  expect_refusal("", "not a .npy file");
  expect_refusal(std::string("\x93NUMPY\1\0", 8), "not a .npy file");
  expect_refusal(std::string("\x93NUMPX\1\0\0\0", 10), "not a .npy file");
  expect_refusal(std::string("\x93NUMPY\4\0\0\0\0\0", 12), "version 4");
  expect_refusal(std::string("\x93NUMPY\2\0\0\0", 10), "truncated");
  expect_refusal(std::string("\x93NUMPY\1\0\xff\xff{}", 12), "truncated");
  expect_refusal(std::string("\x93NUMPY\2\0\xff\xff\xff\xff{}", 14), "limit");
  expect_refusal(file_of(header_of("<f4", "(2,)"), "abcdefg"), "needs 8 bytes, the file has 7");
  expect_refusal(file_of(header_of("<f4", "(2,)"), "abcdefghi"), "needs 8 bytes, the file has 9");
}

TEST(Npy, RefusesOverflowingShapes) {
  expect_refusal(file_of(header_of("<f4", "(4294967296, 4294967296)"), ""), "2^63 or more");
  expect_refusal(file_of(header_of("<f4", "(9223372036854775807,)"), ""), "2^63 or more");
  expect_refusal(file_of(header_of("<f4", "(9223372036854775808,)"), ""), "below 2^63");
  expect_refusal(file_of(header_of("<f4", "(" + std::string(60000, '9') + ",)"), ""), "below 2^63");
  expect_refusal(file_of(header_of("<f4", "(-1,)"), ""), "below 2^63");
  std::string many = "(0,";
  for (int i = 0; i < 40; ++i) many += "1,";
  expect_refusal(file_of(header_of("<f4", many + ")"), ""), "dimensions");
}

TEST(Npy, RefusesWhatIsNotThisDictionary) {
  expect_refusal(file_of("", ""), "does not begin with '{'");
  expect_refusal(file_of("{}", ""), "has no descr");
  expect_refusal(file_of("{'descr': '<f4'}", ""), "has no fortran_order");
  expect_refusal(file_of("{'descr': '<f4', 'fortran_order': False}", ""), "has no shape");
  expect_refusal(file_of("{'descr': '<f4', 'fortran_order': True, 'shape': (0,)}", ""), "ascontiguousarray");
  expect_refusal(file_of("{'descr': '<f4', 'fortran_order': 0, 'shape': (0,)}", ""), "neither True nor False");
  expect_refusal(file_of("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (0,)}", ""), "records");
  expect_refusal(file_of("{'descr': '<f4', 'descr': '<f4'}", ""), "twice");
  expect_refusal(file_of("{'descr': '<f4' 'shape': (0,)}", ""), "lacks a comma");
  expect_refusal(file_of("{'evil': __import__('os')}", ""), "unknown key");
  expect_refusal(file_of("{'shape': (3)}", ""), "no tuple");
  expect_refusal(file_of("{'shape': 3}", ""), "no tuple");
  expect_refusal(file_of("{'shape': (1 2)}", ""), "no tuple");
  expect_refusal(file_of("{'descr': '<f4", ""), "records");
  expect_refusal(file_of(header_of("<f4", "(0,)") + "x", ""), "goes on");
  expect_refusal(file_of(header_of(">f4", "(0,)"), ""), "dtype '>f4'");
  expect_refusal(file_of(header_of("<U4", "(0,)"), ""), "dtype '<U4'");
  expect_refusal(file_of(header_of("|O", "(0,)"), ""), "dtype '|O'");
}

TEST(Npy, WritesWhatItReads) {
  const Folder folder;
  const std::string path = folder.file("t.npy"), data(120, 'd');
  for (const auto& [type, shape] : {std::pair{ElementType::f32, std::vector<std::int64_t>{2, 3, 5}},
                                    std::pair{ElementType::bf16, std::vector<std::int64_t>{60}},
                                    std::pair{ElementType::f64, std::vector<std::int64_t>{}},
                                    std::pair{ElementType::i64, std::vector<std::int64_t>{4, 0}}}) {
    const TensorView tensor{"t", type, shape, bytes(data).data(), *bytes_of(shape, type)};
    auto file = OutputFile::create(path);
    ASSERT_TRUE(file.ok());
    ASSERT_TRUE(write_npy(*file, tensor).ok());
    ASSERT_TRUE(file->commit().ok());
    const auto mapped = MappedFile::open(path);
    ASSERT_TRUE(mapped.ok());
    const auto result = parse_npy(mapped.value().bytes(), path);
    ASSERT_TRUE(result.ok()) << result.error().text();
    EXPECT_EQ(result.value().type, type);
    EXPECT_EQ(result.value().shape, shape);
    EXPECT_EQ((result.value().data - mapped.value().bytes().data()) % 64, 0);
  }
}

TEST(Npy, HasNoFloat8) {
  const Folder folder;
  auto file = OutputFile::create(folder.file("t.npy"));
  ASSERT_TRUE(file.ok());
  const std::string data = "a";
  EXPECT_FALSE(write_npy(*file, {"t", ElementType::f8_e4m3, {1}, bytes(data).data(), 1}).ok());
}

}  // namespace
}  // namespace onepass::cli
