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
    kBlocked,  // Nothing can be moved now; see ByteStream::PollFor.
    kEnd,      // Read: the peer sends no more. Never for a write.
    kBroken    // `error` is the errno.
  };
  State state = State::kBlocked;
  std::size_t bytes = 0;
  int error = 0;
  const char* what = nullptr;  // In place of `error`, where errno has no word for it.
};

// What one Read or Write moves at most, within a piece: other peers and an abort wait meanwhile,
// and the far end may keep up for as long as there are bytes.
inline constexpr std::size_t kMoveBytes = std::size_t{1} << 20;

// What the owner of a stream waits for, or what has come. Thread: value type.
struct StreamEvents {
  bool bytes = false;  // Read may do something.
  bool room = false;   // Write may do something.
  bool end = false;    // The peer sends no more: Read says so behind what is left.

  bool any() const { return bytes || room || end; }
};

// A two-way stream of bytes to one peer process: the seam at which transports differ (TCP, plain or
// encrypted; shared memory). Owner: a MessageLink or, before there is one, a Connector. Thread:
// loop-confined. Nothing blocks.
class ByteStream {
 public:
  virtual ~ByteStream() = default;
  // What to poll for until one of `wanted` comes; OnReady tells from what poll() said which of the
  // three there may be. Bytes are waited for behind a Read that was blocked, room behind a Write.
  virtual int fd() const = 0;
  virtual short PollFor(const StreamEvents& wanted) const = 0;
  virtual StreamEvents OnReady(short revents) = 0;
  virtual IoResult Read(std::span<const iovec> into) = 0;
  virtual IoResult Write(std::span<const iovec> from) = 0;
  // Nothing can be written before the peer has answered.
  virtual bool opening() const { return false; }
  // Of what a Write has taken some is here still. Flush moves it on: kMoved when none is left.
  virtual bool holds_output() const { return false; }
  virtual IoResult Flush() { return {.state = IoResult::State::kMoved}; }
  // No more bytes follow; those written still arrive, once nothing is held. Reading goes on.
  virtual void ShutdownWrite() = 0;
  // Its bytes leave no memory of this host.
  virtual bool in_memory() const { return false; }
  // One more socket of a stream over several; false where it does not belong.
  virtual bool Attach(int /*index*/, std::unique_ptr<ByteStream> /*socket*/) { return false; }
};

std::unique_ptr<ByteStream> MakeTcpStream(FileDescriptor socket);

}  // namespace resilient
