#include <Python.h>

#include "torch_plugin/csrc/python/module.h"

// SystemExit reaches no hook of Python's and no exit handler is given its code: a program that ends
// by `raise SystemExit(main())` is known by the making of that exception alone.
namespace resilient::plugin {
namespace {

// Both are set once and live as long as the interpreter. Thread: the GIL, which a forked child has
// as its parent had it.
initproc make_system_exit = nullptr;  // tidy: allow(static)
PyObject* on_system_exit = nullptr;   // tidy: allow(static)

// An exception of the callback must not take the place of the one that is being made.
int MakeSystemExit(PyObject* self, PyObject* args, PyObject* kwargs) {
  const int made = make_system_exit(self, args, kwargs);
  if (made != 0 || on_system_exit == nullptr) return made;
  PyObject* told = PyObject_CallFunctionObjArgs(on_system_exit, self, nullptr);
  if (told == nullptr) PyErr_Clear();
  Py_XDECREF(told);
  return made;
}

}  // namespace

void RegisterEnding(pybind11::module_& m) {
  // From now on `callback(error)` is called for each SystemExit that is made, also by subclasses
  // that call its __init__.
  m.def("watch_system_exit", [](const pybind11::function& callback) {
    Py_XSETREF(on_system_exit, pybind11::object(callback).release().ptr());
    auto* type = reinterpret_cast<PyTypeObject*>(PyExc_SystemExit);
    if (type->tp_init == &MakeSystemExit) return;
    make_system_exit = type->tp_init;
    type->tp_init = &MakeSystemExit;
  });
}

}  // namespace resilient::plugin
