#include "runtime/comm/switchboard.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "runtime/base/log.h"

namespace resilient {
namespace {

constexpr int kAcceptsPerTurn = 64;

}  // namespace

Switchboard::Switchboard(FileDescriptor listener, HelloRouter& router)
    : router_(router), listener_(std::move(listener)) {}

void Switchboard::AddInterest(std::vector<PollEntry>& entries) const {
  entries.push_back({.fd = listener_.get(), .events = POLLIN});
  for (const Caller& caller : greeting_)
    entries.push_back({.fd = caller.socket.get(), .events = POLLIN});
  // Parked connections are not watched: what their peers sent, or that they went away, is found
  // when the group reads them.
}

void Switchboard::OnReady(const PollEntry* entries) {
  const PollEntry& listening = *entries++;
  for (Caller& caller : greeting_) {
    const PollEntry& entry = *entries++;
    if (entry.revents != 0 && ReadHello(caller)) caller.socket.Reset();
  }
  std::erase_if(greeting_, [](const Caller& caller) { return !caller.socket.valid(); });
  if (listening.revents != 0) Accept();
}

void Switchboard::Accept() {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    Result<FileDescriptor> socket = AcceptTcp(listener_);
    if (!socket) {
      RESILIENT_LOG(kWarn, "cannot accept a connection: ", socket.status().message());
      return;
    }
    if (!socket->valid()) return;
    if (greeting_.size() >= kMaxGreeting) {
      RESILIENT_LOG(kWarn, "closed the oldest of ", kMaxGreeting,
                    " connections that never said who they are");
      greeting_.pop_front();
    }
    greeting_.emplace_back().socket = std::move(*socket);
    // The hello usually is there already.
    if (ReadHello(greeting_.back())) greeting_.pop_back();
  }
}

bool Switchboard::ReadHello(Caller& caller) {
  while (true) {
    std::size_t wanted = kHelloFixedBytes;
    if (caller.bytes.size() >= kHelloFixedBytes) {
      const Result<std::size_t> length = HelloLength(caller.bytes);
      if (!length) {
        RESILIENT_LOG(kWarn, "closed a connection: ", length.status().message());
        return true;
      }
      wanted = *length;
    }
    if (caller.bytes.size() == wanted) break;
    char buffer[kHelloFixedBytes + kMaxSecret + kMaxGroupName + kMaxShmText];
    // Not a byte more than the hello: what follows belongs to the group.
    const ssize_t n = recv(caller.socket.get(), buffer, wanted - caller.bytes.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (n <= 0) return true;
    caller.bytes.append(buffer, static_cast<std::size_t>(n));
  }
  Result<Hello> hello = DecodeHello(caller.bytes);
  if (!hello) {
    RESILIENT_LOG(kWarn, "closed a connection: ", hello.status().message());
    return true;
  }
  caller.hello = std::move(*hello);
  if (router_.Route(caller.hello, caller.socket) == Routing::kPark) Park(caller);
  return true;
}

void Switchboard::Park(Caller& caller) {
  // The peer has given its earlier try up.
  std::erase_if(parked_, [&](const Caller& other) {
    const Hello& a = other.hello;
    const Hello& b = caller.hello;
    return a.generation == b.generation && a.attempt == b.attempt && a.from == b.from &&
           a.to == b.to && a.lane == b.lane && a.group == b.group && a.secret == b.secret;
  });
  if (parked_.size() >= kMaxParked) parked_.pop_front();
  parked_.push_back(std::move(caller));
}

void Switchboard::Reroute() {
  std::deque<Caller> again = std::exchange(parked_, {});
  for (Caller& caller : again) {
    if (router_.Route(caller.hello, caller.socket) == Routing::kPark)
      parked_.push_back(std::move(caller));
  }
}

}  // namespace resilient
