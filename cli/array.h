// A tensor in memory as the C interface takes it: owned, mapped from a file, or planned (sizes without memory).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "io/element_type.h"
#include "io/result.h"
#include "onepass/onepass.h"

namespace onepass::cli {

class Array {
 public:
  Array() = default;  // absent

  /// Compact, 64-byte aligned, content undefined.
  static Result<Array> allocate(ElementType type, std::vector<std::int64_t> shape);
  static Array planned(ElementType type, std::vector<std::int64_t> shape);
  /// Compact, at `data`, which `owner` keeps alive.
  static Array view(ElementType type, std::vector<std::int64_t> shape, std::shared_ptr<const void> owner,
                    const std::byte* data);
  /// The memory of an owned array, as long as anybody holds it.
  std::shared_ptr<std::byte> memory() const;

  explicit operator bool() const { return present_; }
  ElementType type() const { return type_; }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  std::int64_t size(std::size_t dimension) const { return shape_[dimension]; }
  std::size_t rank() const { return shape_.size(); }
  std::int64_t count() const;
  std::byte* data() const { return data_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

  /// The same memory with two dimensions exchanged, or with a leading dimension of size 1.
  Array transposed(std::size_t a, std::size_t b) const;
  Array with_leading_one() const;
  /// A compact copy, converted (rounded to nearest) if the type differs. Floating types and integers of their kind.
  Result<Array> converted(ElementType type) const;

  /// For the C interface: null if absent. Points into this object, which may not move while the pointer is used.
  const DLTensor* dl() const;
  /// The bytes in row-major order of a compact array, for a file.
  TensorView file_view(std::string name) const;

 private:
  bool present_ = false;
  ElementType type_ = ElementType::f32;
  std::vector<std::int64_t> shape_, strides_;  // strides in elements
  std::shared_ptr<const void> owner_;
  std::byte* data_ = nullptr;
  mutable DLTensor tensor_ = {};
};

/// Fills with N(0,1), the same numbers for the same seed everywhere. The first few million are drawn, then repeated.
void fill_normal(const Array& array, std::uint64_t seed);

/// 64-byte aligned memory that frees itself, or null if there is none. At least one byte.
std::shared_ptr<std::byte> aligned_memory(std::size_t size);
/// The refusal when that was null, or would be.
Status no_memory(double bytes, const char* what);
/// Bytes that this machine can still give, about.
double memory_available();

}  // namespace onepass::cli
