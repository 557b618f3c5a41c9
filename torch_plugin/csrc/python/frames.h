#pragma once

#include <Python.h>

#include <string>
#include <string_view>

#include <resilient/whereabouts.h>

namespace resilient::plugin {

// True once the interpreter shuts down: nothing of it may be touched any more. Needs no lock.
bool InterpreterIsEnding();

// Names the threads of an interpreter and the frames of their stacks. A user's frame is one that is
// not of torch, of this package or of the standard library.
//
// Owner: shared. Thread: immutable; the methods REQUIRE the interpreter's lock and never give it
// up: they run no Python code. Lifetime: its reference to a Python object is never released,
// because it may outlive the interpreter.
class FrameNames {
 public:
  // REQUIRES: the interpreter's lock, torch imported.
  FrameNames();

  // "train.py:301 step" of the innermost user's frame, of the 64 innermost ones; empty: none.
  std::string UsersLine(PyFrameObject* innermost) const;

  // The same, or the innermost frame of all; and whether the thread is in a loop of a library that
  // submits no operation: a progress bar's, a writer of logs, a loader of data.
  ProgramThread DescribeThread(int id, PyFrameObject* innermost) const;

  // `top` as UsersLine, or the innermost frame of all; and the whole stack.
  ThreadStack Describe(PyFrameObject* innermost) const;

  // What the program calls a thread, on one line, at most 64 bytes; empty where the module
  // threading does not know it. `thread`: as threading.get_ident() has it.
  std::string NameOf(unsigned long thread) const;
  // The kernel's id, by that module; 0 where it does not know the thread.
  int IdOf(unsigned long thread) const;

 private:
  bool IsUsers(PyCodeObject* code) const;
  bool IsHousekeeping(std::string_view entry, std::string_view innermost) const;
  PyObject* AttributeOf(unsigned long thread, const char* name) const;

  const std::string torch_dir_;  // With a trailing slash, as the others.
  const std::string package_dir_;
  const std::string standard_dir_;
  PyObject* const active_;  // threading._active: the Thread of each thread.
};

}  // namespace resilient::plugin
