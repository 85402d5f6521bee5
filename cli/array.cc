#include "array.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "check/random.h"
#include "core/half.h"

namespace onepass::cli {
namespace {

std::vector<std::int64_t> compact_strides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    // Sizes that overflow only occur in plans and empty arrays; the library checks them again.
    if (__builtin_mul_overflow(stride, std::max<std::int64_t>(shape[i], 1), &stride)) stride = std::int64_t{1} << 62;
  }
  return strides;
}

std::optional<DType> float_type(ElementType type) {
  switch (type) {
    case ElementType::f64: return DType::f64;
    case ElementType::f32: return DType::f32;
    case ElementType::f16: return DType::f16;
    case ElementType::bf16: return DType::bf16;
    default: return std::nullopt;
  }
}

std::optional<std::int64_t> load_integer(const std::byte* data, ElementType type, std::int64_t index) {
  const auto load = [&]<class T>(T) { return reinterpret_cast<const T*>(data)[index]; };
  switch (type) {
    case ElementType::i64: return load(std::int64_t{});
    case ElementType::i32: return load(std::int32_t{});
    case ElementType::i16: return load(std::int16_t{});
    case ElementType::i8: return load(std::int8_t{});
    case ElementType::u64: {  // beyond int32 in any case where it is beyond int64
      const std::uint64_t value = load(std::uint64_t{});
      return static_cast<std::int64_t>(std::min<std::uint64_t>(value, INT64_MAX));
    }
    case ElementType::u32: return load(std::uint32_t{});
    case ElementType::u16: return load(std::uint16_t{});
    case ElementType::u8: return load(std::uint8_t{});
    default: return std::nullopt;
  }
}

/// Calls f(element offset) for every element in row-major order. Some dimension beside a size of 0 may be huge.
template <class F>
void each_offset(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides, std::size_t depth,
                 std::int64_t offset, const F& f) {
  if (depth == shape.size()) return f(offset);
  for (std::int64_t i = 0; i < shape[depth]; ++i)
    each_offset(shape, strides, depth + 1, offset + i * strides[depth], f);
}

}  // namespace

std::shared_ptr<std::byte> aligned_memory(std::size_t size) {
  if (size > std::numeric_limits<std::size_t>::max() / 2) return nullptr;
  const std::size_t rounded = (std::max<std::size_t>(size, 1) + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, rounded);
  if (memory == nullptr) return nullptr;
  return {static_cast<std::byte*>(memory), [](std::byte* p) { std::free(p); }};
}

double memory_available() {
  double kilobytes = 0;
  if (std::FILE* file = std::fopen("/proc/meminfo", "re")) {
    char line[128];
    while (std::fgets(line, sizeof line, file) != nullptr && std::sscanf(line, "MemAvailable: %lf", &kilobytes) != 1) {
    }
    std::fclose(file);
  }
  return kilobytes > 0 ? kilobytes * 1024 : INFINITY;
}

Status no_memory(double bytes, const char* what) {
  char text[160];
  std::snprintf(text, sizeof text,
                "%s: %.3g GiB of memory are not to be had (%.3g GiB available); nearest: a smaller problem", what,
                bytes / (1 << 30), memory_available() / (1 << 30));
  return {ONEPASS_OUT_OF_MEMORY, text};
}

Result<Array> Array::allocate(ElementType type, std::vector<std::int64_t> shape) {
  const std::optional<std::uint64_t> bytes = bytes_of(shape, type);
  const double wanted = bytes ? static_cast<double>(*bytes) : 0x1p63;
  // Linux promises more memory than there is and kills who uses it; ask first.
  std::shared_ptr<std::byte> memory;
  if (bytes && wanted < memory_available()) memory = aligned_memory(*bytes);
  if (memory == nullptr) return no_memory(wanted, ("a tensor of shape " + shape_text(shape)).c_str());
  std::byte* data = memory.get();
  return view(type, std::move(shape), std::move(memory), data);
}

Array Array::planned(ElementType type, std::vector<std::int64_t> shape) {
  return view(type, std::move(shape), nullptr, nullptr);
}

Array Array::view(ElementType type, std::vector<std::int64_t> shape, std::shared_ptr<const void> owner,
                  const std::byte* data) {
  Array array;
  array.present_ = true;
  array.type_ = type;
  array.strides_ = compact_strides(shape);
  array.shape_ = std::move(shape);
  array.owner_ = std::move(owner);
  array.data_ = const_cast<std::byte*>(data);
  return array;
}

std::shared_ptr<std::byte> Array::memory() const {
  return {std::const_pointer_cast<void>(owner_), data_};
}

std::int64_t Array::count() const {
  std::int64_t count = 1;
  for (const std::int64_t size : shape_) count *= size;
  return count;
}

Array Array::transposed(std::size_t a, std::size_t b) const {
  Array result = *this;
  std::swap(result.shape_[a], result.shape_[b]);
  std::swap(result.strides_[a], result.strides_[b]);
  return result;
}

Array Array::with_leading_one() const {
  Array result = *this;
  result.shape_.insert(result.shape_.begin(), 1);
  result.strides_.insert(result.strides_.begin(), 0);
  return result;
}

Result<Array> Array::converted(ElementType type) const {
  const std::optional<DType> from = float_type(type_), to = float_type(type);
  const bool to_integer = type == ElementType::i32 && !from;
  if ((!from || !to) && !to_integer) {
    return usage_error("a tensor of %s cannot be converted to %s", name_of(type_), name_of(type));
  }
  ONEPASS_ASSIGN(Array result, allocate(type, shape_));
  std::int64_t index = 0;
  bool fits = true;
  if (count() == 0) return result;
  each_offset(shape_, strides_, 0, 0, [&](std::int64_t offset) {
    if (to_integer) {
      const std::optional<std::int64_t> value = load_integer(data_, type_, offset);
      fits = fits && value && *value >= INT32_MIN && *value <= INT32_MAX;
      result.as<std::int32_t>()[index++] = fits ? static_cast<std::int32_t>(*value) : 0;
    } else if (*to == DType::f64) {
      result.as<double>()[index++] = load_double(data_, *from, offset);
    } else {
      store_float(result.data_, *to, index++, load_float(data_, *from, offset));
    }
  });
  if (!fits) return usage_error("a value of %s is outside int32, which lengths must fit", name_of(type_));
  return result;
}

const DLTensor* Array::dl() const {
  if (!present_) return nullptr;
  const ElementTypeInfo& info = info_of(type_);
  tensor_.data = data_;
  tensor_.device = {kDLCPU, 0};
  tensor_.ndim = static_cast<std::int32_t>(shape_.size());
  tensor_.dtype = {info.dlpack_code, info.dlpack_bits, 1};
  tensor_.shape = const_cast<std::int64_t*>(shape_.data());
  tensor_.strides = const_cast<std::int64_t*>(strides_.data());
  tensor_.byte_offset = 0;
  return &tensor_;
}

TensorView Array::file_view(std::string name) const {
  return {std::move(name), type_, shape_, data_, static_cast<std::uint64_t>(count()) * size_of(type_)};
}

void fill_normal(const Array& array, std::uint64_t seed) {
  constexpr std::int64_t kDrawn = (std::int64_t{1} << 22) + 61;
  const std::optional<DType> type = float_type(array.type());
  const std::int64_t count = array.count(), drawn = std::min(count, kDrawn);
  if (!type) return;
  check::Random random(seed);
  for (std::int64_t i = 0; i < drawn; ++i) store_float(array.data(), *type, i, static_cast<float>(random.normal()));
  const std::size_t size = size_of(array.type());
  for (std::int64_t i = drawn; i < count; i += drawn) {
    std::memcpy(array.data() + static_cast<std::size_t>(i) * size, array.data(),
                static_cast<std::size_t>(std::min(drawn, count - i)) * size);
  }
}

}  // namespace onepass::cli
