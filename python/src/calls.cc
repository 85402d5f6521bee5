#include "calls.h"

#include <unistd.h>

#include <cstdlib>
#include <string>
#include <type_traits>

#include "options.h"

namespace onepass::python {
namespace {

/// Runs `body` without the interpreter's lock. A daemon thread that comes back when the interpreter is gone is ended by
/// it, before CPython 3.14 by pthread_exit, whose unwinding would run destructors that need the lock: it waits here for
/// the end of the process instead.
template <class Body>
void unlocked(Body&& body) {
  PyThreadState* state = PyEval_SaveThread();
  body();
  try {
    PyEval_RestoreThread(state);
  } catch (...) {
    for (;;) ::pause();
  }
}

PyObject* raise(onepass_status_t status) {
  const char* text = onepass_last_error();
  if (*text == 0) text = onepass_status_string(status);
  PyObject* type = status == ONEPASS_INVALID_ARGUMENT ? PyExc_ValueError
                   : status == ONEPASS_UNSUPPORTED    ? PyExc_NotImplementedError
                   : status == ONEPASS_OUT_OF_MEMORY  ? PyExc_MemoryError
                                                      : PyExc_RuntimeError;
  PyErr_SetString(type, text);
  return nullptr;
}

PyObject* wrong_count(const char* function, Py_ssize_t expected, Py_ssize_t got) {
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments: got %zd", function, expected, got);
  return nullptr;
}

/// A tensor argument of a call: its name, and the member of the args struct that it fills.
template <class Args>
struct Slot {
  const char* name;
  const DLTensor* Args::*member;
  Access access = Access::read;
};

template <class Args, std::size_t kSlots>
struct Signature {
  const char* function;
  onepass_pass_t pass;
  onepass_status_t (*run)(const Args*);
  Slot<Args> slots[kSlots];
};

using F = onepass_forward_args_t;
using B = onepass_backward_args_t;
using D = onepass_decode_args_t;
using M = onepass_merge_args_t;

constexpr Signature<F, 5> kForward{
    "forward",
    ONEPASS_FORWARD,
    &onepass_forward,
    {{"q", &F::q}, {"k", &F::k}, {"v", &F::v}, {"out", &F::out, Access::output}, {"lse", &F::lse, Access::output}}};
constexpr Signature<B, 12> kBackward{"backward",
                                     ONEPASS_BACKWARD,
                                     &onepass_backward,
                                     {{"q", &B::q},
                                      {"k", &B::k},
                                      {"v", &B::v},
                                      {"out", &B::out},
                                      {"lse", &B::lse},
                                      {"grad_out", &B::grad_out},
                                      {"grad_lse", &B::grad_lse},
                                      {"grad_q", &B::grad_q, Access::output},
                                      {"grad_k", &B::grad_k, Access::output},
                                      {"grad_v", &B::grad_v, Access::output},
                                      {"grad_bias", &B::grad_bias, Access::output},
                                      {"grad_sinks", &B::grad_sinks, Access::output}}};
constexpr Signature<D, 8> kDecode{"decode",
                                  ONEPASS_DECODE,
                                  &onepass_decode,
                                  {{"q", &D::q},
                                   {"k_cache", &D::k_cache},
                                   {"v_cache", &D::v_cache},
                                   {"cache_seqlens", &D::cache_seqlens},
                                   {"k", &D::k_new},
                                   {"v", &D::v_new},
                                   {"out", &D::out, Access::output},
                                   {"lse", &D::lse, Access::output}}};

/// The arguments (options, where, tensors...) of one call as the C struct.
template <class Args, std::size_t kSlots>
class Call {
 public:
  Call(const Signature<Args, kSlots>& signature, const Args& defaults) : signature_(signature), args_(defaults) {}

  bool read(PyObject* const* given, Py_ssize_t count) {
    if (count != static_cast<Py_ssize_t>(kSlots) + 2) return wrong_count(signature_.function, kSlots + 2, count), false;
    if (!options_.read(given[0], given[1])) return false;
    args_.options = options_.get();
    for (std::size_t i = 0; i < kSlots; ++i) {
      const Slot<Args>& slot = signature_.slots[i];
      if (!operands_[i].read(given[i + 2], slot.name, access(slot, given))) return false;
      args_.*slot.member = operands_[i].get();
    }
    return true;
  }

  /// The workspace lives for this call.
  PyObject* run() {
    onepass_status_t status = ONEPASS_OK;
    if (options_.allocate() != nullptr) return run_on_device();
    unlocked([&] {
      std::size_t bytes = 0;
      status = onepass_workspace_size(signature_.pass, &args_, &bytes);
      if (status != ONEPASS_OK) return;
      constexpr std::size_t kAlign = 64;
      void* workspace = bytes > 0 ? std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign) : nullptr;
      args_.workspace = workspace;
      args_.workspace_size = workspace != nullptr ? bytes : 0;
      status = bytes > 0 && workspace == nullptr ? ONEPASS_OUT_OF_MEMORY : signature_.run(&args_);
      std::free(workspace);
    });
    if (status != ONEPASS_OK) return raise(status);
    Py_INCREF(Py_None);
    return Py_None;
  }

  PyObject* explain() {
    std::size_t length = 0;
    onepass_status_t status = onepass_explain(signature_.pass, &args_, nullptr, 0, &length);
    std::string text(length + 1, 0);
    if (status == ONEPASS_OK) status = onepass_explain(signature_.pass, &args_, text.data(), text.size(), &length);
    return status == ONEPASS_OK ? PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(length))
                                : raise(status);
  }

 private:
  /// The workspace comes from the framework, whose allocator hands it out again in the order of the stream.
  PyObject* run_on_device() {
    std::size_t bytes = 0;
    onepass_status_t status = onepass_workspace_size(signature_.pass, &args_, &bytes);
    Ref memory;
    if (status == ONEPASS_OK && bytes > 0) {
      memory.reset(PyObject_CallFunction(options_.allocate(), "n", static_cast<Py_ssize_t>(bytes)));
      if (!memory) return nullptr;
      PyObject* address = PyTuple_Check(memory.get()) != 0 ? PyTuple_GetItem(memory.get(), 1) : memory.get();
      args_.workspace = PyLong_AsVoidPtr(address);
      if (PyErr_Occurred() != nullptr) return nullptr;
      args_.workspace_size = bytes;
    }
    if (status == ONEPASS_OK) unlocked([&] { status = signature_.run(&args_); });
    if (status != ONEPASS_OK) return raise(status);
    Py_INCREF(Py_None);
    return Py_None;
  }

  /// Caches are written where there is something to append.
  static Access access(const Slot<Args>& slot, PyObject* const* given) {
    if constexpr (std::is_same_v<Args, D>) {
      const bool cache = slot.member == &D::k_cache || slot.member == &D::v_cache;
      if (cache && given[6] != Py_None) return Access::write;
    }
    return slot.access;
  }

  const Signature<Args, kSlots>& signature_;
  Args args_;
  Options options_;
  Operand operands_[kSlots];
};

template <class Args, std::size_t kSlots>
PyObject* call(const Signature<Args, kSlots>& signature, const Args& defaults, PyObject* const* args,
               Py_ssize_t count) {
  Call<Args, kSlots> c(signature, defaults);
  return c.read(args, count) ? c.run() : nullptr;
}

template <class Args, std::size_t kSlots>
PyObject* explain_call(const Signature<Args, kSlots>& signature, const Args& defaults, PyObject* const* args,
                       Py_ssize_t count) {
  Call<Args, kSlots> c(signature, defaults);
  return c.read(args, count) ? c.explain() : nullptr;
}

}  // namespace

PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return call(kForward, F ONEPASS_FORWARD_ARGS_INIT, args, count);
}

PyObject* backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return call(kBackward, B ONEPASS_BACKWARD_ARGS_INIT, args, count);
}

PyObject* decode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return call(kDecode, D ONEPASS_DECODE_ARGS_INIT, args, count);
}

PyObject* merge(PyObject*, PyObject* const* args, Py_ssize_t count) {
  constexpr struct {
    const char* name;
    const DLTensor* M::*member;
    Access access;
  } kSlots[] = {{"out_a", &M::out_a, Access::read}, {"lse_a", &M::lse_a, Access::read},
                {"out_b", &M::out_b, Access::read}, {"lse_b", &M::lse_b, Access::read},
                {"out", &M::out, Access::output},   {"lse", &M::lse, Access::output}};
  if (count != 7) return wrong_count("merge", 7, count);
  M m = ONEPASS_MERGE_ARGS_INIT;
  Operand operands[6];
  for (int i = 0; i < 6; ++i) {
    if (!operands[i].read(args[i], kSlots[i].name, kSlots[i].access)) return nullptr;
    m.*kSlots[i].member = operands[i].get();
  }
  PyObject* allocate = nullptr;  // a merge needs no workspace
  if (!read_where(args[6], &m.threads, &m.stream, &allocate)) return nullptr;
  onepass_status_t status = ONEPASS_OK;
  unlocked([&] { status = onepass_merge(&m); });
  if (status != ONEPASS_OK) return raise(status);
  Py_INCREF(Py_None);
  return Py_None;
}

PyObject* explain(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count < 1) return wrong_count("explain", 2, count);
  const long pass = PyLong_AsLong(args[0]);
  if (pass == -1 && PyErr_Occurred() != nullptr) return nullptr;
  if (pass == ONEPASS_BACKWARD) return explain_call(kBackward, B ONEPASS_BACKWARD_ARGS_INIT, args + 1, count - 1);
  if (pass == ONEPASS_DECODE) return explain_call(kDecode, D ONEPASS_DECODE_ARGS_INIT, args + 1, count - 1);
  return explain_call(kForward, F ONEPASS_FORWARD_ARGS_INIT, args + 1, count - 1);
}

PyObject* kernels(PyObject*, PyObject* const*, Py_ssize_t) {
  const int total = onepass_kernel_count();
  Ref list(PyList_New(0));
  for (int i = 0; list && i < total; ++i) {
    onepass_kernel_info_t info = ONEPASS_KERNEL_INFO_INIT;
    const onepass_status_t status = onepass_kernel_info(i, &info);
    if (status != ONEPASS_OK) return raise(status);
    const char* pass = info.pass == ONEPASS_BACKWARD ? "backward" : info.pass == ONEPASS_DECODE ? "decode" : "forward";
    Ref row(Py_BuildValue("(sssssLO)", info.name, info.backend, info.arch, pass, info.dtypes,
                          static_cast<long long>(info.max_head_dim), info.available != 0 ? Py_True : Py_False));
    if (!row || PyList_Append(list.get(), row.get()) != 0) return nullptr;
  }
  return list.release();
}

}  // namespace onepass::python
