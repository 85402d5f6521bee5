#include "options.h"

#include <cstring>

namespace onepass::python {
namespace {

void wrong_type(const char* name, PyObject* value, const char* rule) {
  PyErr_Clear();
  PyErr_Format(PyExc_TypeError, "%s must be %s: got %R", name, rule, value);
}

/// Reads the entries of the tuple one after the other; after an error it reads no more.
class Reader {
 public:
  Reader(PyObject* tuple, Operand* operands) : tuple_(tuple), operand_(operands) {}
  bool ok() const { return ok_; }

  void flag(std::int32_t* out) {
    if (PyObject* value = next()) {
      const int truth = PyObject_IsTrue(value);
      if (truth < 0) return fail(value, "true or false");
      *out = truth;
    }
  }
  template <class Int>
  void integer(Int* out) {
    PyObject* value = next();
    if (value == nullptr || value == Py_None) return;
    Ref index(PyNumber_Index(value));
    if (!index) return fail(value, "an integer");
    const long long number = PyLong_AsLongLong(index.get());
    *out = static_cast<Int>(number);
    if (PyErr_Occurred() != nullptr || static_cast<long long>(*out) != number) fail_range(value);
  }
  void bits64(std::uint64_t* out) {
    PyObject* value = next();
    if (value == nullptr || value == Py_None) return;
    Ref index(PyNumber_Index(value));
    if (!index) return fail(value, "an integer");
    *out = PyLong_AsUnsignedLongLong(index.get());
    if (PyErr_Occurred() == nullptr) return;
    PyErr_Clear();  // a seed that was kept in an int64
    *out = static_cast<std::uint64_t>(PyLong_AsLongLong(index.get()));
    if (PyErr_Occurred() != nullptr) fail_range(value);
  }
  void real(double* out) {
    PyObject* value = next();
    if (value == nullptr || value == Py_None) return;
    *out = PyFloat_AsDouble(value);
    if (PyErr_Occurred() != nullptr) fail(value, "a number");
  }
  void tensor(const DLTensor** out) {
    const char* name = ok_ ? kOptionNames[at_] : nullptr;
    if (PyObject* value = next()) {
      ok_ = operand_->read(value, name);
      *out = operand_++->get();
    }
  }
  void text(const char** out) {
    PyObject* value = next();
    if (value == nullptr || value == Py_None) return;
    Py_ssize_t size = 0;
    *out = PyUnicode_Check(value) != 0 ? PyUnicode_AsUTF8AndSize(value, &size) : nullptr;
    if (*out == nullptr || std::strlen(*out) != static_cast<std::size_t>(size)) {
      fail(value, "a string without null characters");
    }
  }

 private:
  PyObject* next() { return ok_ ? PyTuple_GetItem(tuple_, at_++) : nullptr; }
  void fail(PyObject* value, const char* rule) {
    ok_ = false;
    wrong_type(kOptionNames[at_ - 1], value, rule);
  }
  void fail_range(PyObject* value) {
    ok_ = false;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "%s is out of range: got %R", kOptionNames[at_ - 1], value);
  }

  PyObject* tuple_;
  Operand* operand_;
  Py_ssize_t at_ = 0;
  bool ok_ = true;
};

}  // namespace

bool read_where(PyObject* where, std::int32_t* threads, void** stream, PyObject** allocate) {
  if (PyTuple_Check(where) != 0 && PyTuple_Size(where) == 2) {
    *stream = PyLong_AsVoidPtr(PyTuple_GetItem(where, 0));
    *allocate = PyTuple_GetItem(where, 1);
  } else {
    *threads = static_cast<std::int32_t>(PyLong_AsLong(where));
  }
  return PyErr_Occurred() == nullptr;
}

bool Options::read(PyObject* tuple, PyObject* where) {
  constexpr Py_ssize_t kCount = sizeof kOptionNames / sizeof kOptionNames[0];
  if (PyTuple_Check(tuple) == 0 || PyTuple_Size(tuple) != kCount) {
    PyErr_Format(PyExc_TypeError, "options must be a tuple of %zd", kCount);
    return false;
  }
  onepass_options_t& o = options_;
  Reader r(tuple, operands_);
  r.flag(&o.causal);
  r.flag(&o.align);
  r.integer(&o.window_left);
  r.integer(&o.window_right);
  r.tensor(&o.cu_seqlens_q);
  r.tensor(&o.cu_seqlens_k);
  r.integer(&o.max_seqlen_q);
  r.integer(&o.max_seqlen_k);
  r.tensor(&o.q_length);
  r.tensor(&o.k_start);
  r.tensor(&o.k_length);
  r.tensor(&o.q_position);
  r.real(&o.scale);
  r.real(&o.softcap);
  r.tensor(&o.alibi_slopes);
  r.tensor(&o.bias);
  r.tensor(&o.sinks);
  r.real(&o.dropout_p);
  r.bits64(&o.dropout_seed);
  r.bits64(&o.dropout_offset);
  r.tensor(&o.dropout_state);
  r.integer(&o.deterministic);
  r.flag(&o.validate);
  r.text(&o.kernel);
  if (!r.ok()) return false;
  return read_where(where, &o.threads, &o.stream, &allocate_);
}

}  // namespace onepass::python
