#include "torch_plugin/csrc/python/python_host.h"

#include <cstring>
#include <utility>

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include "torch_plugin/csrc/convert.h"

namespace resilient::plugin {
namespace {

namespace py = pybind11;

// What the handler of a signal raised in Interrupted, until Throw raises it on the same thread.
struct Stash {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
};
thread_local Stash stash;

std::string DirectoryOf(const char* module_name) {
  const auto path = py::module_::import(module_name).attr("__file__").cast<std::string>();
  return path.substr(0, path.rfind('/') + 1);
}

}  // namespace

PythonHost::PythonHost()
    : main_thread_(py::module_::import("threading")
                       .attr("main_thread")()
                       .attr("ident")
                       .cast<unsigned long>()),
      torch_dir_(DirectoryOf("torch")),
      package_dir_(DirectoryOf("torch_resilient")) {}

void PythonHost::InstallFactory(PyObject* factory) {
  Py_INCREF(factory);
  Py_XSETREF(factory_, factory);
}

bool PythonHost::Ending() const {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

PyObject* PythonHost::MakeException(const Status& status) const {
  if (factory_ == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, status.ToString().c_str());
    return nullptr;
  }
  const FailureDetail& detail = status.detail();
  try {
    py::dict attributes;
    attributes["rank"] = detail.rank;
    attributes["host"] = detail.host;
    attributes["pid"] = detail.pid;
    attributes["generation"] = detail.generation;
    attributes["group"] = detail.group;
    attributes["seq"] = detail.seq;
    attributes["since"] = detail.since_unix_s;
    const py::str message(PyUnicode_DecodeUTF8(
        status.ToString().data(), static_cast<Py_ssize_t>(status.ToString().size()), "replace"));
    return py::handle(factory_)(std::string(CodeName(status.code())), message, attributes)
        .release()
        .ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

void PythonHost::DoThrow(const Status& status) {
  if (Ending()) ThrowNative(status);
  {
    const py::gil_scoped_acquire lock;
    if (status.code() == StatusCode::kInterrupted && stash.type != nullptr) {
      PyErr_Restore(stash.type, stash.value, stash.traceback);
      stash = Stash{};
    } else if (PyObject* exception = MakeException(status)) {
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception);
      Py_DECREF(exception);
    }
    if (PyErr_Occurred() != nullptr) {
      // Persisted: the interpreter's error indicator must not stay set while C++ unwinds, and the
      // exception may be raised on another thread.
      python_error error;
      error.persist();
      throw std::move(error);
    }
  }
  ThrowNative(status);
}

Status PythonHost::Interrupted() {
  if (!OnMainThread() || Ending()) return Status::Ok();
  const py::gil_scoped_acquire lock;
  if (PyErr_CheckSignals() == 0) return Status::Ok();
  Py_XDECREF(stash.type);
  Py_XDECREF(stash.value);
  Py_XDECREF(stash.traceback);
  PyErr_Fetch(&stash.type, &stash.value, &stash.traceback);
  return Status(StatusCode::kInterrupted, "a signal ended the wait");
}

bool PythonHost::IsLibraryFile(const char* path, Py_ssize_t length) const {
  const auto in = [&](const std::string& dir) {
    return static_cast<std::size_t>(length) > dir.size() &&
           std::memcmp(path, dir.data(), dir.size()) == 0;
  };
  return in(torch_dir_) || in(package_dir_) || (length > 0 && path[0] == '<');
}

// Only on the main thread: there the lock is what the caller just gave up, and will take again
// anyway. The first frame outside of torch and of this package is the user's.
std::string PythonHost::CallSite() {
  constexpr int kMaxFrames = 64;
  if (!OnMainThread() || Ending()) return {};
  const py::gil_scoped_acquire lock;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  std::string site;
  for (int depth = 0; frame != nullptr && depth < kMaxFrames; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    Py_ssize_t length = 0;
    const char* path = PyUnicode_AsUTF8AndSize(code->co_filename, &length);
    if (path == nullptr) PyErr_Clear();
    if (path != nullptr && !IsLibraryFile(path, length)) {
      const char* name = PyUnicode_AsUTF8(code->co_name);
      if (name == nullptr) PyErr_Clear();
      const char* slash = std::strrchr(path, '/');
      site = std::string(slash != nullptr ? slash + 1 : path) + ":" +
             std::to_string(PyFrame_GetLineNumber(frame));
      if (name != nullptr) site.append(" ").append(name);
    }
    Py_DECREF(code);
    PyFrameObject* next = site.empty() ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = next;
  }
  Py_XDECREF(frame);
  return site;
}

void PythonHost::WithoutLock(const std::function<void()>& body) {
  if (!Ending() && PyGILState_Check() != 0) {
    const py::gil_scoped_release unlocked;
    body();
  } else {
    body();
  }
}

}  // namespace resilient::plugin
