#include "torch_plugin/csrc/python/python_host.h"

#include <unistd.h>

#include <chrono>
#include <thread>
#include <utility>

#include <pybind11/pybind11.h>
#include <resilient/exit.h>
#include <torch/csrc/Exceptions.h>

#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/python/stack_source.h"

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

int RaiseStashed(void*) {
  if (stash.type == nullptr) return 0;
  PyErr_Restore(stash.type, stash.value, stash.traceback);
  stash = Stash{};
  return -1;
}

constexpr Duration kExitMoment = std::chrono::seconds(1);
constexpr Duration kExitPoll = std::chrono::milliseconds(1);

}  // namespace

PythonHost::PythonHost()
    : main_thread_(py::module_::import("threading")
                       .attr("main_thread")()
                       .attr("ident")
                       .cast<unsigned long>()),
      frames_(std::make_shared<FrameNames>()),
      observer_(MakeObserver(clock_, std::make_shared<PythonStacks>(frames_, main_thread_))) {}

void PythonHost::InstallFactory(PyObject* factory) {
  Py_INCREF(factory);
  Py_XSETREF(factory_, factory);
}

bool PythonHost::Ending() const { return InterpreterIsEnding(); }

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
    const std::string text = status.ToString();
    const auto message = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
    if (!message) throw py::error_already_set();
    return py::handle(factory_)(std::string(CodeName(status.code())), message, attributes)
        .release()
        .ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

ProgramStacks PythonHost::DescribeThreads() const {
  return DescribeProgram(*frames_, main_thread_, observer_->Submitters());
}

// A thread that comes back from a call of ours takes the interpreter's lock below frames of torch,
// and where the interpreter shuts down it is ended there, which ends the process by SIGABRT. So it
// stays in the call, as from Python 3.14 on it would stay in the lock. Before that it is held for a
// moment, in which the exit comes by: an exit handler may wait for the thread.
void PythonHost::StayInEndingProcess() const {
  if (!ExitHasBegun() || OnMainThread() || PyGILState_GetThisThreadState() == nullptr) return;
  if (PyGILState_Check() != 0) return;  // A call that keeps the lock.
  const Deadline moment = Deadline::After(clock_.Now(), kExitMoment);
  while (!Ending()) {
    if (moment.ExpiredAt(clock_.Now())) return;
    // The interpreter wakes nobody when it shuts down. tidy: allow(sleep)
    std::this_thread::sleep_for(kExitPoll);
  }
  for (;;) pause();  // Until the process has ended.
}

void PythonHost::DoThrow(const Status& status) {
  StayInEndingProcess();
  if (Ending()) ThrowNative(status);
  {
    const py::gil_scoped_acquire lock;
    if (status.code() == StatusCode::kInterrupted && stash.type != nullptr) {
      (void)RaiseStashed(nullptr);
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

void PythonHost::RaiseLater() {
  if (stash.type != nullptr && !Ending()) (void)Py_AddPendingCall(&RaiseStashed, nullptr);
}

// Only on a thread that runs Python code: there the lock is what the caller just gave up, and will
// take again anyway. Others, as those of autograd, would wait for it in the midst of their work.
std::string PythonHost::CallSite() {
  if (Ending() || PyGILState_GetThisThreadState() == nullptr) return {};
  // The interpreter ends a thread that waits for the lock by then.
  if (!OnMainThread() && ExitHasBegun()) return {};
  const py::gil_scoped_acquire lock;
  return frames_->UsersLine(PyEval_GetFrame());
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
