#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "runtime/comm/byte_stream.h"

namespace resilient {
namespace {

class TcpStream final : public ByteStream {
 public:
  // The buffer sizes are left to the kernel: asking for one switches its auto-tuning off, which
  // goes far beyond what an unprivileged process may ask for.
  explicit TcpStream(FileDescriptor socket) : socket_(std::move(socket)) {}
  ~TcpStream() override { LeaveToKernel(socket_); }

  int fd() const override { return socket_.get(); }
  short PollFor(const StreamEvents& wanted) const override {
    return static_cast<short>((wanted.bytes ? POLLIN : 0) | (wanted.room ? POLLOUT : 0) |
                              (wanted.end ? POLLRDHUP : 0));
  }
  StreamEvents OnReady(short revents) override {
    // An error shows on both sides.
    const bool error = (revents & (POLLERR | POLLHUP)) != 0;
    return {.bytes = error || (revents & POLLIN) != 0,
            .room = error || (revents & POLLOUT) != 0,
            .end = error || (revents & POLLRDHUP) != 0};
  }

  IoResult Read(std::span<const iovec> into) override {
    msghdr message = Message(into);
    const ssize_t n = Retry([&] { return recvmsg(socket_.get(), &message, MSG_DONTWAIT); });
    if (n == 0) return {.state = IoResult::State::kEnd};
    return Outcome(n);
  }

  IoResult Write(std::span<const iovec> from) override {
    const msghdr message = Message(from);
    return Outcome(
        Retry([&] { return sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL); }));
  }

  void ShutdownWrite() override { shutdown(socket_.get(), SHUT_WR); }

 private:
  static msghdr Message(std::span<const iovec> pieces) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces.data());
    message.msg_iovlen = pieces.size();
    return message;
  }

  template <typename Call>
  static ssize_t Retry(Call call) {
    ssize_t n = -1;
    do {
      n = call();
    } while (n < 0 && errno == EINTR);
    return n;
  }

  static IoResult Outcome(ssize_t n) {
    if (n >= 0) return {.state = IoResult::State::kMoved, .bytes = static_cast<std::size_t>(n)};
    if (errno == EAGAIN || errno == EWOULDBLOCK) return {.state = IoResult::State::kBlocked};
    return {.state = IoResult::State::kBroken, .error = errno};
  }

  FileDescriptor socket_;
};

}  // namespace

std::unique_ptr<ByteStream> MakeTcpStream(FileDescriptor socket) {
  return std::make_unique<TcpStream>(std::move(socket));
}

}  // namespace resilient
