// The functions of the module `onepass._core`.
#pragma once

#include "python_api.h"

namespace onepass::python {

PyObject* forward(PyObject* module, PyObject* const* args, Py_ssize_t count);
PyObject* backward(PyObject* module, PyObject* const* args, Py_ssize_t count);
PyObject* decode(PyObject* module, PyObject* const* args, Py_ssize_t count);
PyObject* merge(PyObject* module, PyObject* const* args, Py_ssize_t count);
PyObject* explain(PyObject* module, PyObject* const* args, Py_ssize_t count);
PyObject* kernels(PyObject* module, PyObject* const* args, Py_ssize_t count);

}  // namespace onepass::python
