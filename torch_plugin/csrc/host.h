#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>

#include <resilient/status.h>
#include <resilient/whereabouts.h>

namespace resilient::plugin {

// The language around us: everything that differs between a C++ program and Python. The Python
// extension makes one and hands it down; a C++ program gets NativeHost.
//
// Owner: everything that may raise or wait, by shared_ptr. Thread: thread-safe. No method may be
// called with a mutex of ours held: most of them wait for the interpreter's lock under Python.
class Host {
 public:
  virtual ~Host() = default;

  // Raises `status` as the host's exception. REQUIRES: !status.ok().
  [[noreturn]] void Throw(const Status& status) {
    DoThrow(status);
    __builtin_unreachable();
  }

  // Not OK when the calling thread's wait must end (Ctrl-C); Throw of that status raises what the
  // signal handler raised.
  virtual Status Interrupted() = 0;

  // After a call that ends what it does first and has no error to tell of the interrupt: what the
  // signal handler raised comes up in the program once that call has returned.
  virtual void RaiseLater() {}

  // "train.py:301 step": the user's line that the calling thread is in; empty when it is not to be
  // had cheaply.
  virtual std::string CallSite() = 0;

  // True once the interpreter shuts down: nothing of it may be touched or released any more.
  virtual bool Ending() const = 0;

  // Runs `body`, which may block, without the interpreter's lock, whether or not the caller has it.
  virtual void WithoutLock(const std::function<void()>& body) = 0;

  // Tells where the program is. Shared by all sessions.
  virtual const std::shared_ptr<Observer>& observer() = 0;

 private:
  // Never returns; a virtual function cannot promise that.
  virtual void DoThrow(const Status& status) = 0;
};

// The exception that Throw raises, to be put into a future.
std::exception_ptr ToException(Host& host, const Status& status);

// C++ exceptions, no interrupts, no call sites.
std::shared_ptr<Host> NativeHost();

}  // namespace resilient::plugin
