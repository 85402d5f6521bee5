#include "check/array.h"

#include <algorithm>
#include <cstring>

namespace onepass::check {
namespace {

constexpr std::int64_t kMarginBytes = 128;
constexpr unsigned char kNanByte = 0xff, kGuardByte = 0xa5;  // all ones is a NaN in every float type

}  // namespace

Array::Array(DType dtype, const Index& size, bool output) : dtype_(dtype), size_(size) {
  stride_ = {size[1] * size[2] * size[3], size[2] * size[3], size[3], 1};
  allocate(output);
}

Array::Array(DType dtype, const Index& size, const Layout& layout, bool output)
    : dtype_(dtype), size_(size), start_(layout.start) {
  stride_[3] = 1;
  std::int64_t next = size[3];
  for (int n = 2; n >= 0; --n) {
    const int axis = layout.order[n];
    next += layout.gap[n];
    const bool broadcast = layout.broadcast[axis] && !output;
    stride_[axis] = broadcast ? 0 : std::max<std::int64_t>(next, 1);
    if (!broadcast) next = stride_[axis] * std::max<std::int64_t>(size[axis], 1);
  }
  allocate(output);
}

Array Array::rows(std::int64_t batch, std::int64_t heads, std::int64_t seq, int row_gap, bool output) {
  Array array;
  array.size_ = {batch, heads, seq, 1};
  const std::int64_t row = std::max<std::int64_t>(seq + row_gap, 1);
  array.stride_ = {heads * row + row_gap, row, 1, 1};
  array.allocate(output);
  return array;
}

Array Array::bias(DType dtype, const Index& size, const std::array<bool, 4>& broadcast, bool output) {
  Array array;
  array.dtype_ = dtype;
  std::int64_t next = 1;
  for (int axis = 3; axis >= 0; --axis) {
    array.size_[axis] = broadcast[axis] ? 1 : size[axis];
    array.stride_[axis] = broadcast[axis] ? 0 : next;
    if (!broadcast[axis]) next *= std::max<std::int64_t>(size[axis], 1);
  }
  array.allocate(output);
  return array;
}

std::int64_t Array::span() const {
  if (count() == 0) return 0;
  return 1 + offset({size_[0] - 1, size_[1] - 1, size_[2] - 1, size_[3] - 1});
}

void* Array::data() const {
  char* bytes = reinterpret_cast<char*>(const_cast<std::uint64_t*>(memory_.data()));
  return bytes + kMarginBytes + start_ * dtype_size(dtype_);
}

void Array::set(std::int64_t offset, double x) {
  if (dtype_ == DType::f64) {
    static_cast<double*>(data())[offset] = x;
  } else {
    store_float(data(), dtype_, offset, static_cast<float>(x));
  }
}

void Array::allocate(bool output) {
  const std::int64_t bytes = (start_ + span()) * dtype_size(dtype_) + 2 * kMarginBytes;
  memory_.assign(ceil_div(bytes, 8), 0);
  std::memset(memory_.data(), output ? kGuardByte : kNanByte, memory_.size() * 8);
  if (!output) return;
  each([this](const Index&, std::int64_t at) {
    std::memset(static_cast<char*>(data()) + at * dtype_size(dtype_), kNanByte, dtype_size(dtype_));
  });
}

void Array::poison_unmarked(const std::vector<bool>& marks) {
  each([this, &marks](const Index&, std::int64_t at) {
    if (!marks[at]) set(at, NAN);
  });
}

void Array::seal() {
  sealed_ = memory_;
}
void Array::reset() {
  memory_ = sealed_;
}
bool Array::unchanged() const {
  return memory_ == sealed_;
}

bool Array::unchanged_outside() const {
  if (memory_.empty()) return true;
  std::vector<std::uint64_t> expected = sealed_;
  const std::ptrdiff_t shift = static_cast<char*>(data()) - reinterpret_cast<const char*>(memory_.data());
  char* target = reinterpret_cast<char*>(expected.data()) + shift;
  const std::int64_t bytes = dtype_size(dtype_);
  each([&](const Index&, std::int64_t at) {
    std::memcpy(target + at * bytes, static_cast<const char*>(data()) + at * bytes, bytes);
  });
  return expected == memory_;
}

std::uint64_t Array::bits() const {
  std::uint64_t hash = 0xcbf29ce484222325u;
  const std::int64_t bytes = dtype_size(dtype_);
  each([&](const Index&, std::int64_t at) {
    std::uint64_t word = 0;
    std::memcpy(&word, static_cast<const char*>(data()) + at * bytes, bytes);
    hash = (hash ^ word) * 0x100000001b3u;
    hash ^= hash >> 29;
  });
  return hash;
}

Tensor Array::tensor(bool packed) const {
  if (!*this) return {};
  return {data(), dtype_, packed ? 0 : stride_[0], stride_[1], stride_[2]};
}

RowTensor Array::row_tensor(bool packed) const {
  if (!*this) return {};
  return {static_cast<float*>(data()), packed ? 0 : stride_[0], stride_[1]};
}

BiasTensor Array::bias_tensor() const {
  if (!*this) return {};
  return {data(), dtype_, stride_[0], stride_[1], stride_[2], stride_[3]};
}

HeadTensor Array::head_tensor() const {
  if (!*this) return {};
  return {data(), dtype_, size_[0] > 1 ? stride_[0] : 0, stride_[1]};
}

IntArray::IntArray(const std::vector<std::int32_t>& values) {
  if (values.empty()) return;
  memory_.assign(kGuard, -1000000007);
  memory_.insert(memory_.end(), values.begin(), values.end());
  memory_.insert(memory_.end(), kGuard, 1000000007);
}

}  // namespace onepass::check
