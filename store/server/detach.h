#pragma once

#include "runtime/net/socket.h"

namespace resilient::store {

// The server's side of `serve --detach`. The process that was started stays until the server, a
// process of its own, listens or has failed, and ends with its exit code: so who has started it is
// told how that went, and has no child afterwards that it would wait for, or end with its others.
// Owner and thread: the serve command. Lifetime: from before any thread until the server listens.
class Detachment {
 public:
  // Forks. Returns in the server; in the process that was started it does not.
  Detachment();

  // The server listens: the process that was started ends. False: that one has ended before, so
  // nobody waits for this server any more.
  bool TellReady();

 private:
  FileDescriptor ready_;
};

}  // namespace resilient::store
