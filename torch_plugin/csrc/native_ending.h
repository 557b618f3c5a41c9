#pragma once

#include <memory>
#include <string>

#include "torch_plugin/csrc/context.h"

namespace resilient::plugin {

// What ends a C++ program: the other ranks hear it on the way out, as of a Python program
// (torch_resilient/_ending.py). A rank that ends by an exception that nobody catches, or by exit(n)
// with n != 0, is lost, and only it knows why.
//
// From the first call on, a handler for std::terminate and one for exit tell the worlds of this
// process that are still open, each once and for at most a second; then what was there before goes
// on. A process forked from this one tells nothing. Thread: any.
void WatchEnding(const std::shared_ptr<SessionContext>& world);

// The exception that is being handled goes on its way out, which the program may still catch: an
// exit(n) that follows names it.
void NoteException();

}  // namespace resilient::plugin
