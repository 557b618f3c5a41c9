#include "runtime/net/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstring>
#include <memory>
#include <system_error>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/base/numbers.h"
#include "runtime/net/resolver.h"

namespace resilient {
namespace {

// The kernel would end a connection that is silent, or whose reader has stopped, after a time of
// its own, though its processes may live. The store decides whether they do, RESILIENT_OP_DEADLINE
// how long an operation waits. So the kernel gets 20 days, near the most that it takes. A caller
// that has to notice a vanished host sooner sets less (store/client/link.cc).
constexpr int kGiveUpAfterMs = 20 * 24 * 3600 * 1000;
// So often that no firewall forgets an idle connection. Each has a time of its own: the probes of
// hundreds of ranks, sent together, fill the queue of a loopback interface, which then drops data.
constexpr int kProbeAfterS = 60;
constexpr int kProbeSpreadS = 60;
constexpr int kProbeIntervalS = 60;
// Of the resolver, for a name to listen at.
constexpr Duration kListenLookupPatience = std::chrono::seconds(30);
// Time for one address of a name that has several.
constexpr Duration kOneOfSeveralMax = std::chrono::seconds(5);

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

std::string ErrorText(int error) { return std::generic_category().message(error); }

std::string ErrorText() { return ErrorText(errno); }

// Best effort: a socket without it still works.
void SetOption(int fd, int level, int option, int value) {
  static_cast<void>(setsockopt(fd, level, option, &value, sizeof value));
}

void TuneStream(int fd) {
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kGiveUpAfterMs);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, kProbeAfterS + fd % kProbeSpreadS);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, kProbeIntervalS);
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
}

// Of an address that is a number: asks no resolver.
Result<SocketAddress> ToSocketAddress(const HostPort& numeric) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(numeric.port);
  // tidy: allow(blocking-resolve): of a number.
  const int error = getaddrinfo(numeric.host.c_str(), port.c_str(), &hints, &found);
  if (error != 0) {
    return Status(StatusCode::kResolve,
                  StrCat("'", numeric.host, "' is no numeric address: ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  SocketAddress address;
  RESILIENT_CHECK(found->ai_addrlen <= sizeof address.storage);
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.size = found->ai_addrlen;
  return address;
}

HostPort ToHostPort(const SocketAddress& address) {
  char host[NI_MAXHOST] = {};
  char port[NI_MAXSERV] = {};
  if (getnameinfo(address.get(), address.size, host, sizeof host, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return {};
  }
  HostPort result{.host = host, .port = 0};
  std::from_chars(port, port + std::strlen(port), result.port);
  return result;
}

Status SocketFailed() {
  const bool exhausted = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
  return {exhausted ? StatusCode::kResourceExhausted : StatusCode::kInternal,
          StrCat("a socket cannot be made: ", ErrorText(),
                 exhausted ? "; raise the limit of open files (ulimit -n)" : "")};
}

Result<FileDescriptor> NewSocket(int family) {
  FileDescriptor socket_fd(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket_fd.valid()) return SocketFailed();
  return socket_fd;
}

Status TimedOut(const HostPort& address) {
  return {StatusCode::kUnreachable,
          StrCat("no answer from ", FormatHostPort(address),
                 " before the deadline: the host is down, or a firewall drops the packets; check "
                 "the address and the rules between the two hosts")};
}

Status GivenUp(const HostPort& address) {
  return {StatusCode::kCancelled,
          StrCat("connecting to ", FormatHostPort(address), " was given up")};
}

Status ConnectFailed(const HostPort& address, int error) {
  const std::string where = FormatHostPort(address);
  if (error == ECONNREFUSED || error == ECONNRESET) {
    return {StatusCode::kRefused, StrCat("connection to ", where,
                                         " was refused: the host is up but nothing listens on that "
                                         "port (yet); check the port and that the peer runs")};
  }
  if (error == ETIMEDOUT) return TimedOut(address);
  return {StatusCode::kUnreachable,
          StrCat(where, " cannot be reached: ", ErrorText(error),
                 "; check the address, the network interface and the routes of this host")};
}

// A connect to a free port of the ephemeral range may meet itself: it would then talk to itself.
bool ConnectedToItself(int fd) {
  SocketAddress local;
  SocketAddress remote;
  local.size = remote.size = sizeof(sockaddr_storage);
  return getsockname(fd, local.get(), &local.size) == 0 &&
         getpeername(fd, remote.get(), &remote.size) == 0 &&
         ToHostPort(local) == ToHostPort(remote);
}

Result<FileDescriptor> StartConnect(const SocketAddress& target, const HostPort& named) {
  Result<FileDescriptor> made = NewSocket(target.storage.ss_family);
  if (!made.ok()) return made.status();
  TuneStream(made->get());
  int outcome = connect(made->get(), target.get(), target.size);
  if (outcome != 0 && errno != EINPROGRESS && errno != EINTR) return ConnectFailed(named, errno);
  return std::move(made).value();
}

Result<FileDescriptor> ConnectOne(const SocketAddress& target, const HostPort& named,
                                  const Clock& clock, Deadline deadline, int interrupt_fd) {
  Result<FileDescriptor> started = StartConnect(target, named);
  if (!started.ok()) return started.status();
  std::vector<PollEntry> entries{{.fd = started->get(), .events = POLLOUT}};
  if (interrupt_fd >= 0) entries.push_back({.fd = interrupt_fd, .events = POLLIN});
  if (PollUntil(entries, clock, deadline) == 0) return TimedOut(named);
  if (interrupt_fd >= 0 && entries.back().revents != 0) {
    return GivenUp(named);
  }
  RESILIENT_RETURN_IF_ERROR(ConnectOutcome(*started, named));
  return std::move(started).value();
}

// One of several addresses must not use up the time of the others by swallowing packets.
Deadline ShareOf(Deadline deadline, Instant now, std::size_t addresses_left) {
  if (addresses_left == 1) return deadline;
  const Duration equal = deadline.LeftAt(now) / static_cast<std::int64_t>(addresses_left);
  return Deadline::After(now, std::min<Duration>(equal, kOneOfSeveralMax));
}

Status ListenFailed(const HostPort& address, int error) {
  const std::string where = FormatHostPort(address);
  if (error == EADDRINUSE) {
    return {StatusCode::kRefused, StrCat("the port of ", where,
                                         " is taken by another socket; choose another port or end "
                                         "the process that holds it")};
  }
  return {StatusCode::kUnreachable, StrCat("cannot listen on ", where, ": ", ErrorText(error),
                                           "; the address must belong to this host")};
}

Result<FileDescriptor> ListenOne(const SocketAddress& target, const HostPort& named, int backlog) {
  Result<FileDescriptor> made = NewSocket(target.storage.ss_family);
  if (!made.ok()) return made.status();
  const int on = 1;
  // Connections of an earlier life in TIME_WAIT do not hold the port; a listener does.
  setsockopt(made->get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(made->get(), target.get(), target.size) != 0 || listen(made->get(), backlog) != 0) {
    return ListenFailed(named, errno);
  }
  return std::move(made).value();
}

}  // namespace

FileDescriptor::FileDescriptor(int fd) : fd_(fd) {
  if (fd_ >= 0) ForkGuard::Register(fd_);
}

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), mark_(other.mark_) {}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    Reset();
    fd_ = std::exchange(other.fd_, -1);
    mark_ = other.mark_;
  }
  return *this;
}

void FileDescriptor::Reset() {
  const int fd = std::exchange(fd_, -1);
  // In a child the number is closed already and may belong to somebody else by now.
  if (fd < 0 || mark_.InChild()) return;
  ForkGuard::Unregister(fd);
  close(fd);
}

Result<HostPort> ParseHostPort(std::string_view text) {
  const auto malformed = [&] {
    return Status(
        StatusCode::kSetting,
        StrCat("'", text, "' is not an address: accepted are \"host:port\" and, for IPv6, ",
               "\"[address]:port\", with a port from 0 to 65535"));
  };
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return malformed();
  std::string_view host = text.substr(0, colon);
  const std::string_view digits = text.substr(colon + 1);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
    if (host.find(':') == std::string_view::npos) return malformed();
  } else if (host.find(':') != std::string_view::npos) {
    return malformed();
  }
  if (host.empty() || host.find_first_of("[] \t\n") != std::string_view::npos) return malformed();
  HostPort address{.host = std::string(host), .port = 0};
  if (!ReadNumbers(digits, &address.port)) return malformed();
  return address;
}

std::string FormatHostPort(const HostPort& address) {
  const bool brackets = address.host.find(':') != std::string::npos;
  return StrCat(brackets ? "[" : "", address.host, brackets ? "]:" : ":", address.port);
}

Result<FileDescriptor> ListenTcp(const HostPort& address, int backlog) {
  const SystemClock clock;
  const Result<Addresses> hosts =
      ResolveWithin(Resolver::OfProcess(), address.host, {}, clock,
                    Deadline::After(clock.Now(), kListenLookupPatience));
  if (!hosts.ok()) return hosts.status();
  Status first_error;
  for (const std::string& host : *hosts) {
    const Result<SocketAddress> target = ToSocketAddress({host, address.port});
    if (!target.ok()) return target.status();
    Result<FileDescriptor> listener = ListenOne(*target, address, backlog);
    if (listener.ok()) return listener;
    if (first_error.ok()) first_error = listener.status();
  }
  return first_error;
}

Result<HostPort> LocalAddress(const FileDescriptor& socket) {
  SocketAddress address;
  address.size = sizeof address.storage;
  if (getsockname(socket.get(), address.get(), &address.size) != 0) {
    return Status(StatusCode::kInternal, StrCat("getsockname failed: ", ErrorText()));
  }
  return ToHostPort(address);
}

std::string PeerHost(const FileDescriptor& socket) {
  SocketAddress address;
  address.size = sizeof address.storage;
  if (getpeername(socket.get(), address.get(), &address.size) != 0) return "?";
  return ToHostPort(address).host;
}

Result<std::string> OwnAddressTowards(const std::string& numeric_host) {
  // The port counts for nothing: connecting a datagram socket only picks a route.
  const Result<SocketAddress> target = ToSocketAddress({.host = numeric_host, .port = 9});
  if (!target.ok()) return target.status();
  const FileDescriptor datagram(socket(target->storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (datagram.valid() && connect(datagram.get(), target->get(), target->size) == 0) {
    const Result<HostPort> own = LocalAddress(datagram);
    if (own.ok()) return own->host;
  }
  return Status(StatusCode::kUnreachable, StrCat("this host has no way to ", numeric_host));
}

Result<FileDescriptor> ConnectTcp(const HostPort& address, const Clock& clock, Deadline deadline,
                                  int interrupt_fd) {
  InterruptCheck interrupt;
  if (interrupt_fd >= 0) {
    interrupt = [&] {
      std::vector<PollEntry> entries{{.fd = interrupt_fd, .events = POLLIN}};
      return PollUntil(entries, clock, Deadline::At(clock.Now())) > 0 ? GivenUp(address) : Status();
    };
  }
  const Result<Addresses> hosts =
      ResolveWithin(Resolver::OfProcess(), address.host, interrupt, clock, deadline);
  if (!hosts.ok()) return hosts.status();
  Status outcome = TimedOut(address);
  for (std::size_t i = 0; i < hosts->size(); ++i) {
    const Result<SocketAddress> target = ToSocketAddress({(*hosts)[i], address.port});
    if (!target.ok()) return target.status();
    const Deadline share = ShareOf(deadline, clock.Now(), hosts->size() - i);
    Result<FileDescriptor> connected = ConnectOne(*target, address, clock, share, interrupt_fd);
    if (connected.ok() || connected.status().code() == StatusCode::kCancelled) return connected;
    // That something refused is the better news: the host is there.
    if (i == 0 || outcome.code() != StatusCode::kRefused) outcome = connected.status();
  }
  return outcome;
}

Result<FileDescriptor> StartConnectTcp(const HostPort& numeric_address) {
  const Result<SocketAddress> target = ToSocketAddress(numeric_address);
  if (!target.ok()) return target.status();
  return StartConnect(*target, numeric_address);
}

Status ConnectOutcome(const FileDescriptor& socket, const HostPort& address) {
  int error = 0;
  socklen_t size = sizeof error;
  if (getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error != 0) return ConnectFailed(address, error);
  if (ConnectedToItself(socket.get())) return ConnectFailed(address, ECONNREFUSED);
  return {};
}

void LeaveToKernel(const FileDescriptor& socket) {
  SetOption(socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, 0);
}

Result<FileDescriptor> AcceptTcp(const FileDescriptor& listener) {
  FileDescriptor accepted(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (accepted.valid()) {
    TuneStream(accepted.get());
    return accepted;
  }
  // Only what is wrong on this side is an error; errors of the one connection mean "none now".
  switch (errno) {
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
    case EBADF:
    case EINVAL:
    case ENOTSOCK:
      return SocketFailed();
    default:
      return FileDescriptor();
  }
}

int PollUntil(std::vector<PollEntry>& entries, const Clock& clock, Deadline deadline) {
  int ready = 0;
  while (true) {
    int timeout_ms = -1;
    if (!deadline.IsNever()) {
      // Rounded up, or the last millisecond would be spent in a busy loop.
      const auto left = std::chrono::ceil<Millis>(deadline.LeftAt(clock.Now())).count();
      timeout_ms = static_cast<int>(std::min<std::int64_t>(left, INT_MAX));
    }
    ready = poll(entries.data(), entries.size(), timeout_ms);
    if (ready > 0 || timeout_ms == 0) break;
    if (ready < 0) RESILIENT_CHECK(errno == EINTR || errno == EAGAIN);
  }
  return std::max(ready, 0);
}

WakeFd::WakeFd() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) { RESILIENT_CHECK(fd_.valid()); }

void WakeFd::Wake() const {
  const int saved_errno = errno;  // For signal handlers.
  const std::uint64_t one = 1;
  // Fails only when the counter is full: then the reader is awake anyway.
  [[maybe_unused]] const ssize_t written = write(fd_.get(), &one, sizeof one);
  errno = saved_errno;
}

void WakeFd::Drain() const {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = read(fd_.get(), &count, sizeof count);
}

}  // namespace resilient
