#include "io/element_type.h"

#include <iterator>

namespace onepass::cli {
namespace {

using enum ElementType;

constexpr ElementTypeInfo kTypes[] = {
    {f64, 8, "f64", "F64", "<f8", kDLFloat, 64},       {f32, 4, "f32", "F32", "<f4", kDLFloat, 32},
    {f16, 2, "f16", "F16", "<f2", kDLFloat, 16},       {bf16, 2, "bf16", "BF16", "<V2", kDLBfloat, 16},
    {f8_e4m3, 1, "f8_e4m3", "F8_E4M3", nullptr, 0, 0}, {f8_e5m2, 1, "f8_e5m2", "F8_E5M2", nullptr, 0, 0},
    {f8_e8m0, 1, "f8_e8m0", "F8_E8M0", nullptr, 0, 0}, {c64, 8, "c64", "C64", "<c8", 0, 0},
    {i64, 8, "i64", "I64", "<i8", kDLInt, 64},         {i32, 4, "i32", "I32", "<i4", kDLInt, 32},
    {i16, 2, "i16", "I16", "<i2", kDLInt, 16},         {i8, 1, "i8", "I8", "|i1", kDLInt, 8},
    {u64, 8, "u64", "U64", "<u8", kDLUInt, 64},        {u32, 4, "u32", "U32", "<u4", kDLUInt, 32},
    {u16, 2, "u16", "U16", "<u2", kDLUInt, 16},        {u8, 1, "u8", "U8", "|u1", kDLUInt, 8},
    {boolean, 1, "bool", "BOOL", "|b1", kDLUInt, 0},
};

}  // namespace

const ElementTypeInfo& info_of(ElementType type) {
  return kTypes[static_cast<std::size_t>(type)];
}

std::optional<ElementType> element_type_of_name(std::string_view name) {
  for (const ElementTypeInfo& info : kTypes) {
    if (name == info.name) return info.type;
  }
  return std::nullopt;
}

std::optional<ElementType> element_type_of_safetensors(std::string_view name) {
  for (const ElementTypeInfo& info : kTypes) {
    if (name == info.safetensors) return info.type;
  }
  return std::nullopt;
}

std::optional<ElementType> element_type_of_npy(std::string_view descr) {
  if (descr == "|V2" || descr == "bfloat16") return bf16;
  for (const ElementTypeInfo& info : kTypes) {
    if (info.npy == nullptr) continue;
    const std::string_view npy = info.npy;
    // One byte has no order, so numpy's readers take '<i1' for '|i1'.
    if (descr == npy || (npy[0] == '|' && descr.size() == 3 && descr[0] == '<' && descr.substr(1) == npy.substr(1))) {
      return info.type;
    }
  }
  return std::nullopt;
}

std::optional<std::uint64_t> bytes_of(std::span<const std::int64_t> shape, ElementType type) {
  std::int64_t bytes = static_cast<std::int64_t>(size_of(type));
  for (const std::int64_t size : shape) {
    if (size == 0) return 0;
  }
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return static_cast<std::uint64_t>(bytes);
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i != 0 ? ", " : "") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

}  // namespace onepass::cli
