#include "io/safetensors.h"

#include <cstring>
#include <string_view>

#include "files.h"

namespace onepass::cli {
namespace {

std::string file_of(const std::string& header, const std::string& data) {
  return little_endian(header.size(), 8) + header + data;
}

Result<SafetensorsContents> parse(const std::string& file) {
  return parse_safetensors(bytes(file), "x");
}

/// Refused with a line that holds `rule`.
void expect_refusal(const std::string& file, const std::string& rule) {
  const auto result = parse(file);
  ASSERT_FALSE(result.ok()) << rule;
  EXPECT_EQ(result.error().code(), ONEPASS_IO_ERROR);
  EXPECT_NE(result.error().text().find(rule), std::string::npos) << result.error().text();
  EXPECT_EQ(result.error().text().find('\n'), std::string::npos);
  EXPECT_LT(result.error().text().size(), 400u);
}

TEST(Safetensors, ReadsTensorsInDataOrder) {
  const std::string file =
      file_of(R"({"__metadata__":{"a":"b"},"second":{"dtype":"BF16","shape":[1],"data_offsets":[8,10]},)"
              R"("first":{"shape":[2,1],"data_offsets":[0,8],"dtype":"F32"},"none":{"dtype":"I64","shape":[3,0],)"
              R"("data_offsets":[10,10]}}   )",
              "abcdefghij");
  const auto result = parse(file);
  ASSERT_TRUE(result.ok()) << result.error().text();
  const auto& tensors = result.value().tensors;
  ASSERT_EQ(tensors.size(), 3u);
  EXPECT_EQ(tensors[0].name, "first");
  EXPECT_EQ(tensors[0].shape, (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(std::memcmp(tensors[0].data, "abcdefgh", 8), 0);
  EXPECT_EQ(tensors[1].name, "second");
  EXPECT_EQ(tensors[1].type, ElementType::bf16);
  EXPECT_EQ(tensors[2].size, 0u);
  EXPECT_EQ(result.value().metadata.at("a"), "b");
}

TEST(Safetensors, ReadsEmptyFileOfNoTensors) {
  EXPECT_TRUE(parse(file_of("{}", "")).ok());
}

TEST(Safetensors, RefusesLyingLengths) {
  expect_refusal("", "no .safetensors file");
  expect_refusal("1234567", "no .safetensors file");
  expect_refusal(little_endian(0, 8), "does not begin with '{'");
  expect_refusal(little_endian(100, 8) + "{}", "truncated");
  expect_refusal(little_endian(UINT64_MAX, 8) + "{}", "limit");
  expect_refusal(little_endian(std::uint64_t{1} << 63, 8) + "{}", "limit");
  expect_refusal(file_of("{}", "tail"), "belong to none");
}

TEST(Safetensors, RefusesWhatIsNotAHeader) {
  expect_refusal(file_of("[]", ""), "does not begin with '{'");
  expect_refusal(file_of(" {}", ""), "does not begin with '{'");
  expect_refusal(file_of("{", ""), "not JSON");
  expect_refusal(file_of("{}{}", ""), "not JSON");
  expect_refusal(file_of("{\"a\":\"\xff\"}", ""), "not JSON");
  expect_refusal(file_of(R"({"a":1})", ""), "must be an object");
  expect_refusal(file_of(R"({"a":[]})", ""), "must be an object");
  expect_refusal(file_of(R"({"a":{}})", ""), "has no dtype");
  expect_refusal(file_of(R"({"a":{"dtype":"F32","shape":[]}})", ""), "has no data_offsets");
  expect_refusal(file_of(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0]}})", ""), "two offsets");
  expect_refusal(file_of(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4,8]}})", "abcd"), "more than two");
  expect_refusal(file_of(R"({"a":{"dtype":"F32","dtype":"F32"}})", ""), "given twice");
  expect_refusal(file_of(R"({"a":{"color":"red"}})", ""), "unknown field");
  expect_refusal(file_of(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "abcd"), "whole number");
  expect_refusal(file_of(R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", "abcd"), "whole number");
  expect_refusal(file_of(R"({"a":{"dtype":"F32","shape":[1e300],"data_offsets":[0,4]}})", "abcd"), "whole number");
  expect_refusal(file_of(R"({"a":{"dtype":"X9","shape":[1],"data_offsets":[0,4]}})", "abcd"), "dtype 'X9'");
  expect_refusal(file_of(R"({"__metadata__":{"a":1}})", ""), "to strings");
  expect_refusal(file_of(R"({"__metadata__":[]})", ""), "__metadata__");
  expect_refusal(file_of(R"({"__metadata__":{},"__metadata__":{}})", ""), "twice");
}

TEST(Safetensors, RefusesDeepNestingWithoutDescending) {
  for (const char* open : {"[", "{\"a\":"}) {
    std::string header = "{\"a\":{\"shape\":";
    for (int i = 0; i < 1000000; ++i) header += open;
    expect_refusal(file_of(header, ""), open[0] == '[' ? "whole number" : "array of sizes");
  }
}

TEST(Safetensors, RefusesRangesThatDoNotTile) {
  const auto two = [](const char* first, const char* second) {
    return std::string(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)") + first +
           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}";
  };
  EXPECT_TRUE(parse(file_of(two("[4,8]", "[0,4]"), "abcdefgh")).ok());
  expect_refusal(file_of(two("[0,4]", "[3,7]"), "abcdefg"), "1 bytes before");
  expect_refusal(file_of(two("[0,4]", "[0,4]"), "abcd"), "4 bytes before");
  expect_refusal(file_of(two("[0,4]", "[5,9]"), "abcdefghi"), "1 bytes after");
  expect_refusal(file_of(two("[1,5]", "[5,9]"), "abcdefghi"), "1 bytes after");
  expect_refusal(file_of(two("[0,4]", "[4,9]"), "abcdefghi"), "needs 4 bytes");
  expect_refusal(file_of(two("[0,4]", "[8,4]"), "abcdefgh"), "outside");
  expect_refusal(file_of(two("[0,4]", "[4,8]"), "abcdefg"), "outside");
  expect_refusal(file_of(two("[0,4]", "[18446744073709551614,18446744073709551615]"), "abcd"), "outside");
  std::string same = two("[0,4]", "[4,8]");
  same.replace(same.find("\"b\""), 3, "\"a\"");
  expect_refusal(file_of(same, "abcdefgh"), "two tensors are named");
}

TEST(Safetensors, RefusesSizesThatOverflow) {
  const auto one = [](const std::string& shape) {
    return file_of(R"({"a":{"dtype":"F64","shape":)" + shape + R"(,"data_offsets":[0,0]}})", "");
  };
  expect_refusal(one("[9223372036854775807,2]"), "2^63 or more");
  expect_refusal(one("[4294967296,4294967296]"), "2^63 or more");
  expect_refusal(one("[1152921504606846976]"), "2^63 or more");
  expect_refusal(one("[9223372036854775808]"), "passes 2^63 - 1");
  expect_refusal(one("[36893488147419103232]"), "whole number");
  EXPECT_TRUE(parse(one("[9223372036854775807,9223372036854775807,0]")).ok());
  std::string ones = "[0";
  for (int i = 0; i < 40; ++i) ones += ",1";
  expect_refusal(one(ones + "]"), "dimensions");
}

TEST(Safetensors, KeepsNamesOutOfTheTerminal) {
  expect_refusal(file_of("{\"a\\n\\u001b[31m\":1}", ""), "'a??[31m'");
  expect_refusal(file_of("{\"" + std::string(100000, 'n') + "\":1}", ""), "must be an object");
}

TEST(Safetensors, WritesWhatItReads) {
  const Folder folder;
  const std::string first = "12345678", second = "ab", path = folder.file("t.safetensors");
  const std::vector<TensorView> tensors = {{"x", ElementType::f32, {2, 1}, bytes(first).data(), 8},
                                           {"weird \"name\"\n", ElementType::bf16, {1}, bytes(second).data(), 2},
                                           {"none", ElementType::i32, {0, 5}, nullptr, 0}};
  auto file = OutputFile::create(path);
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE(write_safetensors(*file, tensors, {{"key", "value"}}).ok());
  ASSERT_TRUE(file->commit().ok());
  const auto mapped = MappedFile::open(path);
  ASSERT_TRUE(mapped.ok());
  const auto result = parse_safetensors(mapped.value().bytes(), path);
  ASSERT_TRUE(result.ok()) << result.error().text();
  ASSERT_EQ(result.value().tensors.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(result.value().tensors[i].name, tensors[i].name);
    EXPECT_EQ(result.value().tensors[i].type, tensors[i].type);
    EXPECT_EQ(result.value().tensors[i].shape, tensors[i].shape);
    ASSERT_EQ(result.value().tensors[i].size, tensors[i].size);
    const std::string_view written(reinterpret_cast<const char*>(tensors[i].data), tensors[i].size);
    EXPECT_EQ(std::string_view(reinterpret_cast<const char*>(result.value().tensors[i].data), written.size()), written);
  }
  EXPECT_EQ((result.value().tensors[0].data - mapped.value().bytes().data()) % 64, 0);
  EXPECT_EQ(result.value().metadata.at("key"), "value");
}

}  // namespace
}  // namespace onepass::cli
