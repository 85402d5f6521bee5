#include "operand.h"

#include <cstring>
#include <string>
#include <string_view>

#include "dlpack_exchange.h"

namespace onepass::python {
namespace {

enum class Protocol { exchange, buffer, capsule };

struct TypeEntry {
  PyTypeObject* type;
  Protocol protocol;
  const ExchangeApi* api;
  PyObject* is_neg;  // torch's method: it negates lazily, and memory may hold the opposite of the values; or null
};

/// How each type seen so far is read; guarded by the interpreter's lock. It holds its types, so that an address is
/// never that of another type later; programs have a handful of array types.
TypeEntry g_types[16];
int g_type_count = 0;

const ExchangeApi* exchange_api(PyTypeObject* type) {
  Ref capsule(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__"));
  void* pointer = capsule ? PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api") : nullptr;
  PyErr_Clear();
  auto* header = static_cast<ExchangeHeader*>(pointer);
  while (header != nullptr && header->version.major != 1) header = header->previous;
  auto* api = reinterpret_cast<const ExchangeApi*>(header);
  return api != nullptr && api->describe != nullptr ? api : nullptr;
}

TypeEntry entry_of(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  for (int i = 0; i < g_type_count; ++i) {
    if (g_types[i].type == type) return g_types[i];
  }
  auto* as_object = reinterpret_cast<PyObject*>(type);
  TypeEntry entry{type, Protocol::buffer, exchange_api(type), nullptr};
  if (entry.api != nullptr) {
    entry.protocol = Protocol::exchange;
    entry.is_neg = PyObject_GetAttrString(as_object, "is_neg");  // kept, as the type is
    PyErr_Clear();
  } else if (PyObject_HasAttrString(as_object, "__array_interface__") == 0 &&
             PyObject_HasAttrString(as_object, "__dlpack__") != 0) {
    entry.protocol = Protocol::capsule;
  }
  constexpr int kCapacity = sizeof g_types / sizeof g_types[0];
  if (g_type_count < kCapacity) {
    Py_INCREF(as_object);
    g_types[g_type_count++] = entry;
  } else {
    Py_XDECREF(entry.is_neg);  // the type has it
  }
  return entry;
}

struct NamedType {
  const char* name;
  std::uint8_t code, bits;
};
constexpr NamedType kTypes[] = {{"f32", kDLFloat, 32}, {"f16", kDLFloat, 16}, {"bf16", kDLBfloat, 16},
                                {"f64", kDLFloat, 64}, {"i32", kDLInt, 32},   {"i64", kDLInt, 64}};

bool known(const DLDataType& type) {
  for (const NamedType& t : kTypes) {
    if (t.code == type.code && t.bits == type.bits && type.lanes == 1) return true;
  }
  return false;
}

constexpr const char* kChoices = "float32, float16, bfloat16, float64, and int32 for lengths";

/// The type of a struct-module format, or lanes = 0.
DLDataType type_of_format(const char* format, Py_ssize_t item_size) {
  const char* f = format != nullptr ? format : "B";
  if (*f == '@' || *f == '=' || *f == '<') ++f;
  DLDataType type{0, static_cast<std::uint8_t>(8 * item_size), 0};
  if (f[0] == 0 || f[1] != 0 || item_size > 8) return type;
  if (std::strchr("efd", *f) != nullptr) type.code = kDLFloat, type.lanes = 1;
  if (std::strchr("ilq", *f) != nullptr) type.code = kDLInt, type.lanes = 1;
  return type;
}

bool is_bfloat16(PyObject* array) {
  Ref dtype(PyObject_GetAttrString(array, "dtype"));
  Ref name(dtype ? PyObject_GetAttrString(dtype.get(), "name") : nullptr);
  PyErr_Clear();
  return name && PyUnicode_Check(name.get()) && PyUnicode_CompareWithASCIIString(name.get(), "bfloat16") == 0;
}

const char* type_name(PyObject* object, Ref* keeper) {
  keeper->reset(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__"));
  const char* name = *keeper ? PyUnicode_AsUTF8AndSize(keeper->get(), nullptr) : nullptr;
  PyErr_Clear();
  return name != nullptr ? name : "object";
}

bool not_an_array(PyObject* object, const char* name) {
  Ref keeper;
  PyErr_Clear();
  PyErr_Format(PyExc_TypeError, "%s must be an array with DLPack or the buffer protocol (NumPy, torch, JAX): got %s",
               name, type_name(object, &keeper));
  return false;
}

/// NumPy's arrays of types that it does not hand out: dates, float8 and so on.
bool not_exported(PyObject* object, const char* name) {
  PyErr_Clear();
  Ref dtype(PyObject_GetAttrString(object, "dtype"));
  if (!dtype) return not_an_array(object, name);
  PyErr_Format(PyExc_TypeError, "%s: its dtype (%S) is not served; supported: %s", name, dtype.get(), kChoices);
  return false;
}

/// What the exporter said, in one line: sparse, quantized, traced and so on.
bool not_described(const char* name) {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  Ref keep_type(type), keep_value(value), keep_trace(trace), text(value != nullptr ? PyObject_Str(value) : nullptr);
  const char* said = text ? PyUnicode_AsUTF8AndSize(text.get(), nullptr) : nullptr;
  PyErr_Clear();
  const std::string line = said != nullptr ? std::string(said, std::strcspn(said, "\n")) : "no reason given";
  PyErr_Format(PyExc_TypeError, "%s cannot be read through DLPack: %s", name, line.c_str());
  return false;
}

bool read_only(const char* name) {
  PyErr_Clear();
  PyErr_Format(PyExc_ValueError, "%s is written in place and this array is read-only; pass a writable copy", name);
  return false;
}

}  // namespace

Operand::~Operand() {
  if (has_view_) PyBuffer_Release(&view_);
}

bool Operand::keep(const DLTensor& tensor, const char* name) {
  if (!known(tensor.dtype)) {
    PyErr_Format(PyExc_TypeError, "%s: its dtype (DLPack code %d, %d bits) is not served; supported: %s", name,
                 static_cast<int>(tensor.dtype.code), static_cast<int>(tensor.dtype.bits), kChoices);
    return false;
  }
  if (tensor.ndim > kMaxRank) {
    PyErr_Format(PyExc_ValueError, "%s must have at most 4 dimensions: got %d", name, tensor.ndim);
    return false;
  }
  tensor_ = tensor;
  for (int i = 0; i < tensor.ndim; ++i) shape_[i] = tensor.shape[i];
  tensor_.shape = shape_;
  if (tensor.strides != nullptr) {
    for (int i = 0; i < tensor.ndim; ++i) strides_[i] = tensor.strides[i];
    tensor_.strides = strides_;
  }
  return present_ = true;
}

bool Operand::read_buffer(PyObject* object, const char* name, Access access) {
  constexpr int kFlags = PyBUF_STRIDES | PyBUF_FORMAT;
  bool bfloat16 = false;
  if (PyObject_GetBuffer(object, &view_, kFlags) != 0) {
    PyErr_Clear();
    bfloat16 = is_bfloat16(object);  // NumPy exports no type that it does not define itself
    if (bfloat16) owner_.reset(PyObject_CallMethod(object, "view", "s", "uint16"));
    if (!owner_ || PyObject_GetBuffer(owner_.get(), &view_, kFlags) != 0) return not_exported(object, name);
  }
  has_view_ = true;
  if (access != Access::read && view_.readonly != 0) return read_only(name);
  DLTensor t = {};
  t.data = view_.buf;
  t.device.device_type = kDLCPU;
  t.ndim = view_.ndim;
  t.dtype = bfloat16 ? DLDataType{kDLBfloat, 16, 1} : type_of_format(view_.format, view_.itemsize);
  if (!known(t.dtype)) {
    PyErr_Format(PyExc_TypeError, "%s: its dtype (format '%s', %zd bytes) is not served; supported: %s", name,
                 view_.format != nullptr ? view_.format : "B", view_.itemsize, kChoices);
    return false;
  }
  std::int64_t shape[kMaxRank], strides[kMaxRank];
  for (int i = 0; i < t.ndim && i < kMaxRank; ++i) {
    shape[i] = view_.shape[i];
    if (view_.strides[i] % view_.itemsize != 0) {
      PyErr_Format(PyExc_ValueError,
                   "%s: the stride of dimension %d is %zd bytes, no multiple of the element; pass a copy", name, i,
                   view_.strides[i]);
      return false;
    }
    strides[i] = view_.strides[i] / view_.itemsize;
  }
  t.shape = shape;
  t.strides = strides;
  return keep(t, name);
}

bool Operand::read_capsule(PyObject* object, const char* name, Access access) {
  Ref method(PyObject_GetAttrString(object, "__dlpack__"));
  if (!method) return not_an_array(object, name);
  Ref none(PyTuple_New(0)), version(Py_BuildValue("{s(ii)}", "max_version", 1, 0));
  if (!none || !version) return false;
  // On a device the call goes onto the exporter's own current stream: nothing to wait for, which -1 says.
  Ref device(PyObject_CallMethod(object, "__dlpack_device__", nullptr));
  PyErr_Clear();
  long type = kDLCPU, ordinal = 0;
  if (device && PyArg_ParseTuple(device.get(), "ll", &type, &ordinal) == 0) PyErr_Clear();
  Ref no_wait(PyLong_FromLong(-1));
  if (type == kDLCUDA && PyDict_SetItemString(version.get(), "stream", no_wait.get()) != 0) return false;
  owner_.reset(PyObject_Call(method.get(), none.get(), version.get()));
  if (!owner_ && PyErr_ExceptionMatches(PyExc_TypeError) != 0) {  // an exporter older than max_version
    PyErr_Clear();
    owner_.reset(PyObject_Call(method.get(), none.get(), nullptr));
  }
  if (!owner_) return false;
  // The capsule is left as it is: its destructor gives the tensor back.
  if (PyCapsule_IsValid(owner_.get(), "dltensor_versioned") != 0) {
    auto* managed = static_cast<ManagedTensorVersioned*>(PyCapsule_GetPointer(owner_.get(), "dltensor_versioned"));
    if (managed->version.major == 1) {
      if (access != Access::read && (managed->flags & ManagedTensorVersioned::kReadOnly) != 0) return read_only(name);
      return keep(managed->tensor, name);
    }
  } else if (PyCapsule_IsValid(owner_.get(), "dltensor") != 0) {
    return keep(static_cast<ManagedTensor*>(PyCapsule_GetPointer(owner_.get(), "dltensor"))->tensor, name);
  }
  PyErr_Format(PyExc_TypeError, "%s: __dlpack__ returned no DLPack 1.x tensor", name);
  return false;
}

bool Operand::resolve_negation(PyObject** object, PyObject* is_neg, const char* name, Access access) {
  Ref negated(PyObject_CallFunctionObjArgs(is_neg, *object, nullptr));
  if (!negated) return false;
  if (negated.get() != Py_True) return true;
  if (access == Access::write) {
    PyErr_Format(PyExc_ValueError, "%s is written in place and this tensor is a negated view; pass resolve_neg()",
                 name);
    return false;
  }
  owner_.reset(PyObject_CallMethod(*object, "resolve_neg", nullptr));
  *object = owner_.get();
  return static_cast<bool>(owner_);
}

bool Operand::read_plan(PyObject* tuple, const char* name) {
  PyObject* sizes = PyTuple_Size(tuple) == 2 ? PyTuple_GetItem(tuple, 0) : nullptr;
  const char* type = sizes != nullptr && PyTuple_Check(sizes) != 0 && PyUnicode_Check(PyTuple_GetItem(tuple, 1)) != 0
                         ? PyUnicode_AsUTF8AndSize(PyTuple_GetItem(tuple, 1), nullptr)
                         : nullptr;
  DLTensor t = {};
  t.device.device_type = kDLCPU;
  for (const NamedType& known_type : kTypes) {
    if (type != nullptr && std::string_view(type) == known_type.name) t.dtype = {known_type.code, known_type.bits, 1};
  }
  if (t.dtype.lanes == 0 || PyTuple_Size(sizes) > kMaxRank) {
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "%s must be an array or (shape tuple, 'f32' | 'f16' | 'bf16' | 'f64' | 'i32')", name);
    return false;
  }
  std::int64_t shape[kMaxRank];
  t.ndim = static_cast<int>(PyTuple_Size(sizes));
  for (int i = 0; i < t.ndim; ++i) {
    shape[i] = PyLong_AsLongLong(PyTuple_GetItem(sizes, i));
    if (shape[i] == -1 && PyErr_Occurred() != nullptr) return false;
  }
  t.shape = shape;
  return keep(t, name);
}

bool Operand::read(PyObject* object, const char* name, Access access) {
  if (object == Py_None) return true;
  if (PyTuple_Check(object) != 0) return read_plan(object, name);
  const TypeEntry entry = entry_of(object);
  if (entry.protocol == Protocol::buffer) return read_buffer(object, name, access);
  if (entry.protocol == Protocol::capsule) return read_capsule(object, name, access);
  if (entry.is_neg != nullptr && access != Access::output && !resolve_negation(&object, entry.is_neg, name, access)) {
    return false;
  }
  DLTensor tensor = {};
  return (entry.api->describe(object, &tensor) == 0 || not_described(name)) && keep(tensor, name);
}

}  // namespace onepass::python
