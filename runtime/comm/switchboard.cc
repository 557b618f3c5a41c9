#include "runtime/comm/switchboard.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "runtime/base/log.h"

namespace resilient {
namespace {

constexpr int kAcceptsPerTurn = 64;
constexpr int kNoDescriptor = -1;  // poll() passes it over.
constexpr std::size_t kLongestHello =
    kHelloFixedBytes + kMaxGroupName + kMaxShmText + kRanksTextMax + kMadeAtMax + kHmacBytes;

// The rest of the files are the program's, and the links'.
std::size_t AtMostAPartOfFiles(std::size_t limit, std::size_t part) {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == RLIM_INFINITY) return limit;
  return std::clamp<std::size_t>(files.rlim_cur / part, 1, limit);
}

// The peer has given its earlier try up. Nobody but the peer, and who reads its bytes on the way,
// knows the connector's number.
bool SameTry(const Hello& a, const Hello& b) {
  return a.connector == b.connector && a.generation == b.generation && a.attempt == b.attempt &&
         a.from == b.from && a.to == b.to && a.lane == b.lane && a.stream == b.stream &&
         a.group == b.group && a.made.digest == b.made.digest && a.from_world == b.from_world;
}

}  // namespace

Switchboard::Switchboard(FileDescriptor listener, HelloRouter& router)
    : router_(router),
      listener_(std::move(listener)),
      max_greeting_(AtMostAPartOfFiles(kMaxGreeting, 4)),
      max_parked_(AtMostAPartOfFiles(kMaxParked, 4)),
      max_ended_(AtMostAPartOfFiles(kMaxEnded, 16)) {}

void Switchboard::AddInterest(Instant now, std::vector<PollEntry>& entries) {
  if (paused_until_ && now >= *paused_until_) paused_until_.reset();
  entries.push_back(
      {.fd = listener_.get(), .events = static_cast<short>(paused_until_ ? 0 : POLLIN)});
  polled_.clear();
  for (const auto& [id, caller] : callers_) {
    // What the peer of a parked one sends is read by its group; here only its end is of interest.
    const bool greets = greeting_.Has(id);
    entries.push_back({.fd = caller.gone ? kNoDescriptor : caller.socket.get(),
                       .events = static_cast<short>(greets ? POLLIN : POLLRDHUP)});
    polled_.push_back(id);
  }
}

void Switchboard::OnReady(Instant now, const PollEntry* entries) {
  const PollEntry& listening = *entries++;
  for (const Id id : std::exchange(polled_, {})) {
    if ((entries++)->revents == 0) continue;
    if (greeting_.Has(id)) {
      ReadHello(id, now);
    } else {
      OnPeerGone(id);
    }
  }
  if (listening.revents != 0) Accept(now);
}

Instant Switchboard::NextTime() const {
  const auto oldest = greeting_.OldestAccepted();
  const Instant hello_due = oldest ? *oldest + kHelloWithin : kNever;
  return paused_until_ ? std::min(hello_due, *paused_until_) : hello_due;
}

void Switchboard::OnTime(Instant now) {
  for (const Id id : greeting_.AcceptedBy(now - kHelloWithin)) {
    Complain(now, StrCat("closed a connection from ", callers_.at(id).address,
                         " that never said who it is"));
    Close(id);
  }
}

void Switchboard::Accept(Instant now) {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    Result<FileDescriptor> socket = AcceptTcp(listener_);
    if (!socket) {
      Complain(now, StrCat("cannot accept a connection: ", socket.status().message()));
      // A connection that waits would wake this thread at once, again and again.
      paused_until_ = now + kAcceptPause;
      const UnprovenConnections& victims = greeting_.empty() ? parked_ : greeting_;
      if (!victims.empty()) Close(*victims.OfHeaviest().begin());
      return;
    }
    if (!socket->valid()) return;
    if (greeting_.size() >= max_greeting_) {
      const Id oldest = *greeting_.OfHeaviest().begin();
      Complain(now, StrCat("closed the oldest connection from ", callers_.at(oldest).address, ": ",
                           greeting_.size(), " have not said who they are"));
      Close(oldest);
    }
    const Id id = next_++;
    const std::string address = ChargedAddress(PeerHost(*socket));
    callers_.emplace_hint(
        callers_.end(), id,
        Caller{.socket = std::move(*socket), .address = address, .accepted = now, .bytes = {}});
    greeting_.Add(id, address, now);
    ReadHello(id, now);  // It usually is there already.
  }
}

bool Switchboard::ReadBytes(Id id, Caller& caller, Instant now) {
  while (true) {
    Result<std::size_t> wanted = kHelloFixedBytes;
    // Who does not mean this port may never say so much.
    if (const Status begin = CheckHelloBegin(caller.bytes); !begin.ok()) wanted = begin;
    if (wanted.ok() && caller.bytes.size() >= kHelloFixedBytes) wanted = HelloLength(caller.bytes);
    if (!wanted.ok()) {
      Complain(now, StrCat("closed a connection from ", caller.address, ": ",
                           wanted.status().message()));
      Close(id);
      return false;
    }
    if (caller.bytes.size() == *wanted) return true;
    std::array<char, kLongestHello> buffer;
    // Not a byte more than the hello: what follows belongs to the group.
    const ssize_t n =
        recv(caller.socket.get(), buffer.data(), *wanted - caller.bytes.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (n <= 0) {
      Close(id);
      return false;
    }
    caller.bytes.append(buffer.data(), static_cast<std::size_t>(n));
  }
}

void Switchboard::ReadHello(Id id, Instant now) {
  Caller& caller = callers_.at(id);
  if (!ReadBytes(id, caller, now)) return;
  Result<Hello> hello = DecodeHello(caller.bytes);
  if (!hello) {
    Complain(now,
             StrCat("closed a connection from ", caller.address, ": ", hello.status().message()));
    return Close(id);
  }
  caller.hello = std::move(*hello);
  if (router_.Route(caller.hello, caller.socket) != Routing::kPark) return Close(id);
  Park(id);
}

void Switchboard::Park(Id id) {
  const Caller& caller = callers_.at(id);
  const auto earlier = std::ranges::find_if(callers_, [&](const auto& other) {
    return !greeting_.Has(other.first) && SameTry(other.second.hello, caller.hello);
  });
  if (earlier != callers_.end()) Close(earlier->first);
  if (parked_.size() >= max_parked_) Close(*parked_.OfHeaviest().begin());
  greeting_.Remove(id);
  parked_.Add(id, caller.address, caller.accepted);
}

void Switchboard::OnPeerGone(Id id) {
  Caller& caller = callers_.at(id);
  caller.gone = true;
  int unread = 0;
  // A rank that left before this one made the group has left its goodbye there, a message.
  const bool counted = ioctl(caller.socket.get(), FIONREAD, &unread) == 0;
  if (counted && std::cmp_greater_equal(unread, kMessageHeaderBytes)) return;
  if (ended_.size() >= max_ended_) Close(*ended_.OfHeaviest().begin());
  parked_.Remove(id);
  ended_.Add(id, caller.address, caller.accepted);
}

void Switchboard::Close(Id id) {
  greeting_.Remove(id);
  parked_.Remove(id);
  ended_.Remove(id);
  callers_.erase(id);
}

void Switchboard::Complain(Instant now, std::string_view text) {
  const auto left_out = complaints_.May(now);
  if (left_out) RESILIENT_LOG(kWarn, text, MoreLikeIt(*left_out));
}

void Switchboard::Reroute() {
  for (auto next = callers_.begin(); next != callers_.end();) {
    const auto caller = next++;
    if (greeting_.Has(caller->first)) continue;
    const Routing routing = router_.Route(caller->second.hello, caller->second.socket);
    if (routing != Routing::kPark) Close(caller->first);
  }
}

}  // namespace resilient
