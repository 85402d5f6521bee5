// Element types of tensor files, with their names in .safetensors and .npy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "onepass/onepass.h"

namespace onepass::cli {

enum class ElementType : std::uint8_t {
  f64,
  f32,
  f16,
  bf16,
  f8_e4m3,
  f8_e5m2,
  f8_e8m0,
  c64,
  i64,
  i32,
  i16,
  i8,
  u64,
  u32,
  u16,
  u8,
  boolean
};

struct ElementTypeInfo {
  ElementType type;
  std::uint8_t size;         // bytes
  const char* name;          // as the command line says it
  const char* safetensors;   // "BF16"
  const char* npy;           // "<f4"; null: .npy has no such type
  std::uint8_t dlpack_code;  // DLDataTypeCode; onepass takes only those with dlpack_bits
  std::uint8_t dlpack_bits;  // 0: not an operand type
};

const ElementTypeInfo& info_of(ElementType type);
inline std::size_t size_of(ElementType type) {
  return info_of(type).size;
}
inline const char* name_of(ElementType type) {
  return info_of(type).name;
}

std::optional<ElementType> element_type_of_name(std::string_view name);
std::optional<ElementType> element_type_of_safetensors(std::string_view name);
/// Little-endian descriptors. numpy has no bfloat16: ml_dtypes writes it as the 2-byte void '<V2' (older versions
/// '|V2', some tools 'bfloat16'), so a 2-byte void is read as bfloat16.
std::optional<ElementType> element_type_of_npy(std::string_view descr);

/// Bytes of a compact array, or nothing if the product passes 2^63 - 1. Sizes are not negative.
std::optional<std::uint64_t> bytes_of(std::span<const std::int64_t> shape, ElementType type);

/// "(2, 128, 8, 64)".
std::string shape_text(std::span<const std::int64_t> shape);

inline constexpr std::size_t kMaxRank = 32;

/// One tensor of a file. `data` points into the file's mapping and may be misaligned for its type.
struct TensorView {
  std::string name;
  ElementType type = ElementType::f32;
  std::vector<std::int64_t> shape;
  const std::byte* data = nullptr;
  std::uint64_t size = 0;  // bytes
};

}  // namespace onepass::cli
