#pragma once

#include <utility>

namespace resilient {

// Descriptors that a forked child must not keep: a DataLoader worker that holds a copy of a socket
// would keep the connection open after its rank has died. The registry is process-wide because
// pthread_atfork is; it is the one piece of global state in the library. Thread: thread-safe.
class ForkGuard {
 public:
  // `fd` is closed in every child forked from now on.
  static void Register(int fd);
  // REQUIRES: called before `fd` is closed.
  static void Unregister(int fd);
};

// The identity of the process that made an object: tells a forked child from its parent. Thread:
// immutable.
class ProcessMark {
 public:
  ProcessMark();
  // True in a child (of any depth) of the process that made this object. Costs one load after the
  // first call.
  bool InChild() const;

 private:
  unsigned long fork_count_;
};

// Drops an object of a forked parent without running its destructor: it would touch descriptors,
// threads and locks that are not this process's.
template <typename Pointer>
void LeakInChild(Pointer pointer) {
  new Pointer(std::move(pointer));
}

}  // namespace resilient
