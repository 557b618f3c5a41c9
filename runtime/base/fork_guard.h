#pragma once

#include <utility>

#include <resilient/per_process.h>

namespace resilient {

// Descriptors that a forked child must not keep: a DataLoader worker that holds a copy of a socket
// would keep the connection open after its rank has died. The registry is process-wide because
// pthread_atfork is; a child begins with none of them. Thread: thread-safe, without a lock.
class ForkGuard {
 public:
  // `fd` is closed in every child forked from now on.
  static void Register(int fd);
  // REQUIRES: called before `fd` is closed.
  static void Unregister(int fd);
};

// Drops an object of a forked parent without running its destructor: it would touch descriptors,
// threads and locks that are not this process's.
template <typename Pointer>
void LeakInChild(Pointer pointer) {
  new Pointer(std::move(pointer));
}

}  // namespace resilient
