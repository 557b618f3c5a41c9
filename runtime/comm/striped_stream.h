#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include <resilient/settings.h>
#include <resilient/status.h>

#include "runtime/comm/byte_stream.h"

namespace resilient {

// One stream of bytes over several sockets, for networks that limit each flow: blocks of a fixed
// size go round robin, without headers, and are read in the same order. The first block is the
// first socket's, so the others may come later: a block of a socket that is not there yet waits.
// Poll for its own descriptor, an epoll of the two sockets whose turn it is.
//
// The stream has ended when the socket whose turn it is has: a peer closes all of them at once, and
// one that ends early shows when its turn comes. Where that socket is not there yet, the end of any
// other is told (StreamEvents::end), while Read has nothing: it may come yet, or never.
// Owner: a MessageLink. Thread: loop-confined.
class StripedStream final : public ByteStream {
 public:
  static constexpr std::size_t kBlockBytes = 256u << 10;

  // kResourceExhausted when this process has no descriptor left. REQUIRES: 2 <= count <=
  // kMaxSocketStreams.
  static Result<std::unique_ptr<StripedStream>> Make(int count);

  // False when it is there already, or there is no such socket.
  bool Attach(int index, std::unique_ptr<ByteStream> socket) override;

  int fd() const override { return epoll_.get(); }
  short PollFor(const StreamEvents& wanted) const override;
  StreamEvents OnReady(short revents) override;
  IoResult Read(std::span<const iovec> into) override;
  IoResult Write(std::span<const iovec> from) override;
  void ShutdownWrite() override;

 private:
  // How far one direction has come.
  class Turn {
   public:
    explicit Turn(int count) : count_(static_cast<std::uint64_t>(count)) {}
    std::size_t socket() const { return (moved_ / kBlockBytes) % count_; }
    std::size_t left() const { return kBlockBytes - moved_ % kBlockBytes; }
    void Move(std::size_t bytes) { moved_ += bytes; }

   private:
    const std::uint64_t count_;
    std::uint64_t moved_ = 0;
  };
  struct Socket {
    std::unique_ptr<ByteStream> stream;  // Null: not there yet.
    mutable std::uint32_t watched = 0;   // What the epoll has been told of it.
    bool end_told = false;               // While another one was not there.
  };

  StripedStream(int count, FileDescriptor epoll);
  // One direction, block by block, until a socket moves less than it might.
  using Direction = IoResult (ByteStream::*)(std::span<const iovec>);
  IoResult Move(Turn& turn, std::span<const iovec> pieces, Direction direction);
  void Watch(std::size_t index, std::uint32_t events) const;
  // Whether the next block comes over a socket that is not there yet.
  bool Awaited() const { return sockets_[reading_.socket()].stream == nullptr; }

  const FileDescriptor epoll_;
  const int count_;
  std::array<Socket, kMaxSocketStreams> sockets_;
  Turn reading_;
  Turn writing_;
  bool shut_ = false;
};

}  // namespace resilient
