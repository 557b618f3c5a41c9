#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <span>

#include "runtime/net/socket.h"

namespace resilient {

// What one non-blocking read or write has done.
struct IoResult {
  enum class State {
    kMoved,    // `bytes` > 0 were moved.
    kBlocked,  // Nothing can be moved now; poll() tells when.
    kEnd,      // Read: the peer sends no more. Never for a write.
    kBroken    // `error` is the errno.
  };
  State state = State::kBlocked;
  std::size_t bytes = 0;
  int error = 0;
};

// A two-way stream of bytes to one peer process: the seam at which transports differ (TCP; shared
// memory). Owner: a MessageLink. Thread: loop-confined. Nothing blocks.
class ByteStream {
 public:
  virtual ~ByteStream() = default;
  // For poll().
  virtual int fd() const = 0;
  virtual IoResult Read(std::span<const iovec> into) = 0;
  virtual IoResult Write(std::span<const iovec> from) = 0;
  // No more bytes follow; those written still arrive. Reading goes on.
  virtual void ShutdownWrite() = 0;
};

std::unique_ptr<ByteStream> MakeTcpStream(FileDescriptor socket);

}  // namespace resilient
