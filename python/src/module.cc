// onepass._core: the C interface as Python functions. Everything that a person calls is in Python, above this.
#include "calls.h"
#include "onepass/onepass.h"

namespace {

using Fast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyCFunction method(Fast function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

PyMODINIT_FUNC PyInit__core() {
  namespace op = onepass::python;
  static PyMethodDef methods[] = {
      {"forward", method(op::forward), METH_FASTCALL, "forward(options, where, q, k, v, out, lse)"},
      {"backward", method(op::backward), METH_FASTCALL,
       "backward(options, where, q, k, v, out, lse, grad_out, grad_lse, grad_q, grad_k, grad_v, grad_bias, "
       "grad_sinks)"},
      {"decode", method(op::decode), METH_FASTCALL,
       "decode(options, where, q, k_cache, v_cache, cache_seqlens, k, v, out, lse)"},
      {"merge", method(op::merge), METH_FASTCALL, "merge(out_a, lse_a, out_b, lse_b, out, lse, where)"},
      {"explain", method(op::explain), METH_FASTCALL, "explain(pass, options, where, *tensors of that pass) -> JSON"},
      {"kernels", method(op::kernels), METH_FASTCALL,
       "kernels() -> [(name, backend, arch, pass, dtypes, max_head_dim, available)]"},
      {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_core", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr && PyModule_AddStringConstant(module, "__version__", onepass_version()) != 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
