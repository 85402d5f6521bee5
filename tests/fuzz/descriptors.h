// Tensors and options drawn from a fuzzer's bytes: mostly consistent, sometimes anything.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <limits>
#include <memory>
#include <vector>

#include "onepass/onepass.h"

namespace onepass::fuzz {

/// The input, byte by byte; zeros when it is used up.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  std::uint8_t next() { return at_ < size_ ? data_[at_++] : 0; }
  int below(int n) { return next() % n; }
  /// One in n; never once the input is used up.
  bool rarely(int n) { return at_ < size_ && below(n) == n - 1; }
  template <class T>
  T pick(std::initializer_list<T> list) {
    return list.begin()[below(static_cast<int>(list.size()))];
  }
  std::int64_t any_size() {
    return pick<std::int64_t>({0, 1, 2, 3, 5, 16, 17, -1, 255, 65536, INT32_MAX, std::int64_t{1} << 31,
                               std::int64_t{1} << 32, (std::int64_t{1} << 60) + 1, INT64_MAX / 2, INT64_MAX,
                               INT64_MIN});
  }
  double any_number() {
    return pick<double>({NAN, 0, 1, -1, 0.5, 1e-30, 1e30, INFINITY, -INFINITY, 30, 1e-310, 1e300});
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_, at_ = 0;
};

struct Shape {
  std::int64_t batch, seq_q, seq_k, heads_kv, heads_q, dim, dim_v;
};

/// All tensors of one call. Each has a heap block of exactly the bytes it describes, so that one byte too far is seen;
/// where that would be too many, `runnable` says that the call may only be planned.
class Tensors {
 public:
  explicit Tensors(Bytes& bytes) : bytes_(bytes) {}

  bool runnable = true;

  const DLTensor* floats(DLDataType type, std::vector<std::int64_t> shape) {
    return make(type, std::move(shape), false);
  }
  /// int32 `values` as a tensor, with its description sometimes wrong.
  const DLTensor* ints(const std::vector<std::int32_t>& values) {
    const DLTensor* tensor = make({kDLInt, 32, 1}, {static_cast<std::int64_t>(values.size())}, true);
    if (tensor != nullptr && last_bytes_ >= 4 * values.size() && tensor->byte_offset == 0 && tensor->data != nullptr) {
      std::copy(values.begin(), values.end(), static_cast<std::int32_t*>(tensor->data));
    }
    return tensor;
  }

  /// Every byte of every block, to see what a call changed.
  std::vector<std::vector<unsigned char>> snapshot() const {
    std::vector<std::vector<unsigned char>> copy;
    for (const auto& entry : entries_) copy.emplace_back(entry.block.get(), entry.block.get() + entry.size);
    return copy;
  }

 private:
  struct Entry {
    DLTensor tensor = {};
    std::vector<std::int64_t> shape, strides;
    std::unique_ptr<unsigned char[]> block;
    std::size_t size = 0;
  };
  static constexpr std::int64_t kMostBytes = 1 << 16;

  const DLTensor* make(DLDataType type, std::vector<std::int64_t> shape, bool integers) {
    if (bytes_.rarely(60)) return nullptr;
    Entry& entry = entries_.emplace_back();
    if (bytes_.rarely(40))
      type = {bytes_.next(), bytes_.next(), bytes_.below(3) == 0 ? std::uint16_t{2} : std::uint16_t{1}};
    if (bytes_.rarely(40) && !shape.empty()) shape[bytes_.next() % shape.size()] = bytes_.any_size();
    if (bytes_.rarely(60)) shape.resize(static_cast<std::size_t>(bytes_.below(6)), 1);
    entry.shape = std::move(shape);
    lay_out(entry);

    DLTensor& t = entry.tensor;
    t.device = {bytes_.rarely(80) ? static_cast<DLDeviceType>(bytes_.pick({0, 1, 2, 3, 13})) : kDLCPU, 0};
    t.dtype = type;
    t.ndim = bytes_.rarely(80) ? bytes_.pick({-1, 0, 1, INT32_MAX}) : static_cast<std::int32_t>(entry.shape.size());
    // Only sizes that the arrays hold can be read.
    if (t.ndim > static_cast<std::int32_t>(entry.shape.size())) {
      entry.shape.resize(8, 1);
      entry.strides.resize(8, 1);
      if (t.ndim <= 8) runnable = false;
    }
    t.shape = entry.shape.data();
    t.strides = entry.strides.empty() && t.ndim != 0 ? nullptr : entry.strides.data();
    if (bytes_.rarely(80)) t.shape = nullptr;
    t.byte_offset = bytes_.rarely(60) ? bytes_.pick<std::uint64_t>({1, 2, 4, 64, UINT64_MAX}) : 0;
    give_memory(entry, integers);
    return &t;
  }

  /// Compact, permuted, gapped, broadcast, or anything.
  void lay_out(Entry& entry) {
    const std::size_t rank = entry.shape.size();
    const int kind = bytes_.below(8);
    if (kind < 4 || rank == 0) {
      if (kind == 0) entry.strides.clear();
      if (kind == 0) return;
    }
    entry.strides.assign(rank, 1);
    std::vector<std::size_t> order(rank);
    for (std::size_t i = 0; i < rank; ++i) order[i] = rank - 1 - i;
    if (kind == 5 && rank > 2) std::swap(order[1], order[2]);
    std::int64_t stride = 1;
    for (const std::size_t axis : order) {
      entry.strides[axis] = stride;
      if (__builtin_mul_overflow(stride, std::max<std::int64_t>(entry.shape[axis], 1), &stride)) stride = 1;
      if (kind == 6 && stride < kMostBytes) stride += bytes_.below(3);
    }
    if (kind == 7 && rank > 0) {
      entry.strides[bytes_.next() % rank] = bytes_.rarely(2) ? bytes_.any_size() : 0;
    }
  }

  /// Bytes from the data pointer to the end of the last element, or -1 if too many.
  static std::int64_t extent(const Entry& entry) {
    __int128 elements = 1, stride = 1;
    for (std::size_t i = entry.shape.size(); i-- > 0;) {
      const std::int64_t size = entry.shape[i];
      if (size < 0) return -1;
      if (size == 0) return 0;
      const __int128 step = entry.strides.empty() ? stride : static_cast<__int128>(entry.strides[i]);
      if (step < 0) return -1;
      elements += step * (size - 1);
      stride *= size;
      if (elements > kMostBytes || stride > kMostBytes) return -1;
    }
    const __int128 bytes = elements * ((entry.tensor.dtype.bits + 7) / 8) + entry.tensor.byte_offset;
    return bytes > kMostBytes ? -1 : static_cast<std::int64_t>(bytes);
  }

  void give_memory(Entry& entry, bool integers) {
    const std::int64_t needed = entry.tensor.shape == nullptr ? -1 : extent(entry);
    if (needed < 0) {
      // Lengths are read even when planning: an array that cannot be had in full is no valid request.
      runnable = false;
      entry.tensor.data = nullptr;
      last_bytes_ = 0;
      return;
    }
    entry.size = static_cast<std::size_t>(needed);
    entry.block = std::make_unique<unsigned char[]>(std::max<std::size_t>(entry.size, 1));
    // float32 between 1 and 2 or so; as 16-bit types small numbers of both signs. Rarely raw bytes: NaN, Inf.
    const std::uint8_t flavour = bytes_.next();
    for (std::size_t i = 0; i < entry.size; ++i) {
      const unsigned char pattern[4] = {static_cast<unsigned char>(i * 7), 0x3c,
                                        static_cast<unsigned char>(i * 5 + flavour), 0x3f};
      entry.block[i] = integers ? 0 : flavour > 250 ? bytes_.next() : pattern[i % 4];
    }
    last_bytes_ = entry.size;
    entry.tensor.data = bytes_.rarely(100) ? nullptr : entry.block.get();
    // Another tensor's memory: an overlap, refused for outputs. Only a block that is large enough.
    if (bytes_.rarely(40)) {
      const Entry& other = entries_[bytes_.next() % entries_.size()];
      if (other.size >= entry.size && other.block != nullptr) entry.tensor.data = other.block.get();
    }
  }

  Bytes& bytes_;
  std::deque<Entry> entries_;
  std::size_t last_bytes_ = 0;
};

}  // namespace onepass::fuzz
