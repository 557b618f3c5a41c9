#pragma once

#include <Python.h>
#include <pthread.h>

#include <memory>
#include <string>

#include "torch_plugin/csrc/host.h"
#include "torch_plugin/csrc/python/frames.h"

namespace resilient::plugin {

// The interpreter as Host: exceptions made by the installed factory and thrown as torch's
// python_error, which keeps their class through autograd; Ctrl-C by PyErr_CheckSignals on the main
// thread; call sites from the frames of the calling thread.
//
// Owner: the extension module and everything it makes. Thread: thread-safe; the methods take the
// interpreter's lock, so no mutex of ours may be held. Lifetime: its references to Python objects
// are never released, because it may outlive the interpreter.
class PythonHost final : public Host {
 public:
  // REQUIRES: the interpreter's lock, torch imported.
  PythonHost();

  // Replaces the factory. REQUIRES: the interpreter's lock.
  void InstallFactory(PyObject* factory);

  // The exception object for `status`, a new reference; null with a Python error set when the
  // factory failed or none is installed. REQUIRES: the interpreter's lock.
  PyObject* MakeException(const Status& status) const;

  // What the threads of this process do at this moment. REQUIRES: the interpreter's lock, which is
  // kept.
  ProgramStacks DescribeThreads() const;

  Status Interrupted() override;
  void RaiseLater() override;
  std::string CallSite() override;
  bool Ending() const override;
  void WithoutLock(const std::function<void()>& body) override;
  const std::shared_ptr<Observer>& observer() override { return observer_; }

 private:
  void DoThrow(const Status& status) override;
  void StayInEndingProcess() const;
  bool OnMainThread() const { return pthread_equal(pthread_self(), main_thread_) != 0; }

  const pthread_t main_thread_;
  const std::shared_ptr<const FrameNames> frames_;
  const SystemClock clock_{};
  const std::shared_ptr<Observer> observer_;
  PyObject* factory_ = nullptr;  // Guarded by the interpreter's lock.
};

}  // namespace resilient::plugin
