// Python arrays as DLTensors.
#pragma once

#include <cstdint>

#include "onepass/dlpack.h"
#include "python_api.h"

namespace onepass::python {

enum class Access { read, write, output };  // output: of our own making

/// One argument of a call, seen as a DLTensor for as long as the call lasts. Serves, in this order: types with DLPack's
/// C exchange table (torch), the buffer protocol (NumPy; bfloat16 of ml_dtypes through its bits), `__dlpack__`
/// (JAX and others), and a tuple (shape, dtype name), which has no data and is for planning.
class Operand {
 public:
  Operand() = default;
  ~Operand();
  Operand(const Operand&) = delete;
  Operand& operator=(const Operand&) = delete;

  /// None makes it absent. False: a Python error is set, which begins with `name`.
  bool read(PyObject* object, const char* name, Access access = Access::read);
  const DLTensor* get() const { return present_ ? &tensor_ : nullptr; }

 private:
  static constexpr int kMaxRank = 8;
  bool read_buffer(PyObject* object, const char* name, Access access);
  bool read_capsule(PyObject* object, const char* name, Access access);
  bool read_plan(PyObject* tuple, const char* name);
  bool resolve_negation(PyObject** object, PyObject* is_neg, const char* name, Access access);
  bool keep(const DLTensor& tensor, const char* name);

  bool present_ = false;
  bool has_view_ = false;
  DLTensor tensor_ = {};
  std::int64_t shape_[kMaxRank], strides_[kMaxRank];
  Py_buffer view_;
  Ref owner_;  // a capsule, the view of the bits of a bfloat16 array, a copy of a negated view
};

}  // namespace onepass::python
