#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "runtime/comm/byte_stream.h"

namespace resilient {
namespace {

// The kernel would end a link that is silent, or whose reader has stopped, after a time of its own.
// Who lives is for the store to say, and how long an operation waits for RESILIENT_OP_DEADLINE: a
// link outlives both, and the longest hold, and is closed with its generation.
constexpr unsigned kGiveUpAfterMs = 2 * 3600 * 1000;
// How soon what was lost is sent again on a link that is back. The kernel's own pauses double up to
// two minutes.
constexpr int kResendAtLeastEveryMs = 2000;
constexpr int kTcpRtoMaxMs = 44;  // TCP_RTO_MAX_MS, of Linux 6.15.
// So often that no firewall forgets an idle link. Each link has a time of its own: the probes of
// hundreds of ranks, sent together, fill the queue of a loopback interface, which then drops data.
constexpr int kProbeAfterS = 60;
constexpr int kProbeSpreadS = 60;
constexpr int kProbeIntervalS = 60;

class TcpStream final : public ByteStream {
 public:
  explicit TcpStream(FileDescriptor socket) : socket_(std::move(socket)) {
    // The buffer sizes are left to the kernel: asking for one switches its auto-tuning off, which
    // goes far beyond what an unprivileged process may ask for.
    Set(IPPROTO_TCP, TCP_USER_TIMEOUT, kGiveUpAfterMs);
    Set(IPPROTO_TCP, kTcpRtoMaxMs, kResendAtLeastEveryMs);
    Set(IPPROTO_TCP, TCP_KEEPIDLE, kProbeAfterS + socket_.get() % kProbeSpreadS);
    Set(IPPROTO_TCP, TCP_KEEPINTVL, kProbeIntervalS);
    Set(SOL_SOCKET, SO_KEEPALIVE, 1);
  }

  // What it still has to send to a host that has vanished is the kernel's, for its own time.
  ~TcpStream() override { Set(IPPROTO_TCP, TCP_USER_TIMEOUT, 0); }

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
  // Best effort: a socket without it still works.
  template <typename Value>
  void Set(int level, int option, Value value) {
    static_cast<void>(setsockopt(socket_.get(), level, option, &value, sizeof value));
  }

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
