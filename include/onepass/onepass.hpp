// onepass from C++20: a thin face over the C interface in onepass.h, which has the meaning of every argument.
//
//   onepass::Tensor<float> q({1, 1024, 8, 64}), k({1, 1024, 8, 64}), v({1, 1024, 8, 64}), out({1, 1024, 8, 64});
//   ... fill q, k, v ...
//   onepass::forward({.q = q, .k = k, .v = v, .out = out}, {.causal = true}).or_throw();
//
// Nothing here throws but Status::or_throw() and, where memory runs out, the standard library. Calls allocate their
// workspace unless they are given one to reuse:
//
//   onepass::Workspace workspace;                                            // grows to what is needed, then stays
//   for (;;) onepass::forward(call, options, &workspace).or_throw();
#ifndef ONEPASS_ONEPASS_HPP
#define ONEPASS_ONEPASS_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "onepass/onepass.h"

namespace onepass {
inline namespace v0 {

/// float16 and bfloat16 as bits, for programs without such types of their own.
struct float16 {
  std::uint16_t bits;
};
struct bfloat16 {
  std::uint16_t bits;
};

/// The DLPack type of an element. Specialise it for other half types: template <> struct onepass::ElementType<half> ...
template <class T>
struct ElementType;
template <>
struct ElementType<float> {
  static constexpr DLDataType value{kDLFloat, 32, 1};
};
template <>
struct ElementType<double> {
  static constexpr DLDataType value{kDLFloat, 64, 1};
};
template <>
struct ElementType<float16> {
  static constexpr DLDataType value{kDLFloat, 16, 1};
};
template <>
struct ElementType<bfloat16> {
  static constexpr DLDataType value{kDLBfloat, 16, 1};
};
template <>
struct ElementType<std::int32_t> {
  static constexpr DLDataType value{kDLInt, 32, 1};
};
template <>
struct ElementType<std::int64_t> {
  static constexpr DLDataType value{kDLInt, 64, 1};
};

/// Somebody else's array: address, type, sizes and strides, by value. Does not own the elements.
class View {
 public:
  static constexpr int kMaxDims = 8;  // more than any operand has, so that the library can name the fault

  /// No tensor: an optional operand left out.
  View() = default;

  /// Strides in elements, one a dimension (else std::invalid_argument); row-major and compact if left out.
  template <class T>
  View(T* data, std::initializer_list<std::int64_t> shape, std::initializer_list<std::int64_t> strides = {})
      : View(data, ElementType<std::remove_const_t<T>>::value, shape.begin(), static_cast<int>(shape.size()),
             one_each(shape.size(), strides)) {}

  /// Any element type and device.
  View(const void* data, DLDataType type, const std::int64_t* shape, int dims, const std::int64_t* strides = nullptr,
       DLDevice device = {kDLCPU, 0})
      : data_(const_cast<void*>(data)), type_(type), device_(device), dims_(std::min(dims, kMaxDims)), present_(true) {
    std::int64_t compact = 1;
    for (int i = dims_ - 1; i >= 0; --i) {
      shape_[i] = shape[i];
      strides_[i] = strides != nullptr ? strides[i] : compact;
      compact *= shape[i];
    }
  }

  explicit operator bool() const { return present_; }
  int dims() const { return dims_; }
  std::int64_t size(int dim) const { return shape_[dim]; }
  std::int64_t stride(int dim) const { return strides_[dim]; }

  /// The C descriptor; points into this view.
  DLTensor descriptor() const {
    DLTensor t{};
    t.data = data_;
    t.device = device_;
    t.ndim = dims_;
    t.dtype = type_;
    t.shape = const_cast<std::int64_t*>(shape_);
    t.strides = const_cast<std::int64_t*>(strides_);
    return t;
  }

 private:
  static const std::int64_t* one_each(std::size_t dims, const std::initializer_list<std::int64_t>& strides) {
    if (strides.size() != 0 && strides.size() != dims) {
      throw std::invalid_argument("onepass::View: " + std::to_string(strides.size()) + " strides for " +
                                  std::to_string(dims) + " dimensions; pass one a dimension, or none");
    }
    return strides.size() != 0 ? strides.begin() : nullptr;
  }

  void* data_ = nullptr;
  DLDataType type_{};
  DLDevice device_{kDLCPU, 0};
  int dims_ = 0;
  bool present_ = false;
  std::int64_t shape_[kMaxDims] = {};
  std::int64_t strides_[kMaxDims] = {};
};

/// A compact row-major array that owns its elements, zero at first.
template <class T>
class Tensor {
 public:
  explicit Tensor(std::vector<std::int64_t> shape)
      : shape_(std::move(shape)),
        elements_(static_cast<std::size_t>(
            std::accumulate(shape_.begin(), shape_.end(), std::int64_t{1}, std::multiplies<>()))) {}

  const std::vector<std::int64_t>& shape() const { return shape_; }
  T* data() { return elements_.data(); }
  const T* data() const { return elements_.data(); }
  std::size_t size() const { return elements_.size(); }
  T& operator[](std::size_t i) { return elements_[i]; }
  const T& operator[](std::size_t i) const { return elements_[i]; }
  auto begin() { return elements_.begin(); }
  auto end() { return elements_.end(); }
  auto begin() const { return elements_.begin(); }
  auto end() const { return elements_.end(); }

  /// Element (b, s, h, d), or as many indices as there are dimensions.
  template <class... Index>
  T& operator()(Index... index) {
    return elements_[offset({static_cast<std::int64_t>(index)...})];
  }
  template <class... Index>
  const T& operator()(Index... index) const {
    return elements_[offset({static_cast<std::int64_t>(index)...})];
  }

  operator View() const {  // NOLINT: passing a tensor as an operand is what it is for
    return View(elements_.data(), ElementType<T>::value, shape_.data(), static_cast<int>(shape_.size()));
  }

 private:
  std::size_t offset(std::initializer_list<std::int64_t> index) const {
    std::int64_t at = 0;
    for (std::size_t i = 0; i < index.size(); ++i) at = at * shape_[i] + index.begin()[i];
    return static_cast<std::size_t>(at);
  }

  std::vector<std::int64_t> shape_;
  std::vector<T> elements_;
};

/// What Status::or_throw() throws.
class Error : public std::runtime_error {
 public:
  Error(onepass_status_t code, const std::string& text) : std::runtime_error(text), code_(code) {}
  onepass_status_t code() const { return code_; }

 private:
  onepass_status_t code_;
};

/// The outcome of a call: a code and, after a failure, one line with the rule, the value and the nearest choice.
class [[nodiscard]] Status {
 public:
  Status() = default;
  explicit Status(onepass_status_t code) : code_(code), text_(code == ONEPASS_OK ? "" : onepass_last_error()) {
    if (!ok() && text_.empty()) text_ = onepass_status_string(code);  // where memory ran out
  }
  Status(onepass_status_t code, std::string text) : code_(code), text_(std::move(text)) {}

  bool ok() const { return code_ == ONEPASS_OK; }
  explicit operator bool() const { return ok(); }
  onepass_status_t code() const { return code_; }
  const std::string& text() const { return text_; }
  void or_throw() const {
    if (!ok()) throw Error(code_, text_);
  }

 private:
  onepass_status_t code_ = ONEPASS_OK;
  std::string text_;
};

enum class Align { bottom_right = ONEPASS_BOTTOM_RIGHT, top_left = ONEPASS_TOP_LEFT };

/// onepass_options_t with defaults; see there.
struct Options {
  bool causal = false;
  Align align = Align::bottom_right;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;

  View cu_seqlens_q{}, cu_seqlens_k{};
  std::int64_t max_seqlen_q = 0;
  std::int64_t max_seqlen_k = 0;
  View q_length{}, k_start{}, k_length{}, q_position{};

  double scale = std::numeric_limits<double>::quiet_NaN();  // NaN: 1 / sqrt(head_dim)
  double softcap = 0;
  View alibi_slopes{}, bias{}, sinks{};

  double dropout_p = 0;
  std::uint64_t dropout_seed = 0;
  std::uint64_t dropout_offset = 0;
  View dropout_state{};

  std::optional<bool> deterministic{};
  bool validate = false;
  int threads = 0;
  const char* kernel = nullptr;
  void* stream = nullptr;
};

/// The operands of each call. Views left out are absent.
struct Forward {
  View q, k, v, out, lse{};
};
struct Backward {
  View q, k, v, out, lse, grad_out, grad_q, grad_k, grad_v;
  View grad_lse{}, grad_bias{}, grad_sinks{};
};
struct Decode {
  View q, k_cache, v_cache, cache_seqlens, out;
  View lse{}, k_new{}, v_new{};
};
struct Merge {
  View out_a, lse_a, out_b, lse_b, out, lse;
};

}  // namespace v0
}  // namespace onepass

#include "onepass/calls.hpp"

#endif  // ONEPASS_ONEPASS_HPP
