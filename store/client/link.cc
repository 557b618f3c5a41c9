#include "store/client/link.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <utility>
#include <variant>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "store/core/codec.h"

namespace resilient::store {
namespace {

constexpr Duration kConnectTimeout = std::chrono::seconds(5);
constexpr Duration kGreetTimeout = std::chrono::seconds(5);
// A host that vanished acknowledges nothing: the system's default would go on for a quarter of an
// hour before another connection is tried.
constexpr unsigned kUnacknowledgedMaxMs = 20000;
constexpr std::size_t kReadChunk = 64u << 10;
constexpr int kReadChunksPerStep =
    64;  // So that one flood does not starve the caller's other work.
constexpr std::size_t kNumericMax = 16;  // Addresses of one name that are tried.

Result<std::vector<HostPort>> Resolve(const HostPort& name) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  int error = ::getaddrinfo(name.host.c_str(), nullptr, &hints, &found);
  if (error != 0) {
    return Status(StatusCode::kResolve,
                  StrCat("the name of ", FormatHostPort(name), " does not resolve (",
                         ::gai_strerror(error), "): does that host or pod exist yet? wrong name?"));
  }
  std::vector<HostPort> numeric;
  for (addrinfo* one = found; one != nullptr && numeric.size() < kNumericMax; one = one->ai_next) {
    char host[NI_MAXHOST];
    if (::getnameinfo(one->ai_addr, one->ai_addrlen, host, sizeof host, nullptr, 0,
                      NI_NUMERICHOST) == 0) {
      numeric.push_back(HostPort{host, name.port});
    }
  }
  ::freeaddrinfo(found);
  return numeric;
}

bool IsNumeric(const std::string& host) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return false;
  ::freeaddrinfo(found);
  return true;
}

// A refusal in the words of a store.
Status Explain(const Status& failure, const HostPort& where) {
  if (failure.code() != StatusCode::kRefused) return failure;
  return Status(
      StatusCode::kRefused,
      StrCat("connection refused by ", FormatHostPort(where),
             ": the host is up, nothing listens there; is the store started? wrong port?"));
}

// From now on a recv without MSG_DONTWAIT blocks for kQuickAnswer. False: it does not.
bool AllowToReceive(int fd) {
  timeval limit{};
  limit.tv_usec = std::chrono::duration_cast<std::chrono::microseconds>(kQuickAnswer).count();
  if (::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) != 0) return false;
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && ::fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) == 0;
}

Status SocketError(const HostPort& where, int error) {
  return Status(StatusCode::kUnreachable,
                StrCat("the connection to the store at ", FormatHostPort(where), " broke (",
                       ::strerror(error), ")"));
}

}  // namespace

Result<std::vector<HostPort>> ParseAddresses(const std::vector<std::string>& addresses) {
  if (addresses.empty()) {
    return Status(StatusCode::kSetting, "no address of a store was given (\"host:port\")");
  }
  std::vector<HostPort> parsed;
  for (const std::string& text : addresses) {
    Result<HostPort> address = ParseHostPort(text);
    if (!address.ok()) return address.status();
    parsed.push_back(std::move(*address));
  }
  return parsed;
}

LinkInput Perform(const LinkStep& step, const WakeFd& wake, const Clock& clock, Instant until) {
  LinkInput input;
  if (step.resolve) {
    input.resolved = Resolve(*step.resolve);
    return input;
  }
  std::vector<PollEntry> entries{{wake.fd(), POLLIN, 0}};
  if (step.fd >= 0) entries.push_back({step.fd, step.events, 0});
  PollUntil(entries, clock, Deadline::At(std::min(step.due, until)));
  if (entries[0].revents != 0) wake.Drain();
  if (step.fd >= 0) input.revents = entries[1].revents;
  return input;
}

LinkInput PerformQuickly(const LinkStep& step) {
  LinkInput input;
  const ssize_t got = ::recv(step.fd, input.bytes.data(), input.bytes.size(), 0);
  input.error = got < 0 ? errno : 0;
  const bool nothing = input.error == EAGAIN || input.error == EWOULDBLOCK || input.error == EINTR;
  if (!nothing) input.received = got;
  return input;
}

StoreLink::StoreLink(std::vector<HostPort> addresses, std::uint64_t seed, Credentials credentials)
    : addresses_(std::move(addresses)),
      credentials_(std::move(credentials)),
      backoff_(seed),
      splitter_(kMaxFrameBody) {
  RESILIENT_CHECK(!addresses_.empty());
}

StoreLink::~StoreLink() = default;

LinkStep StoreLink::NextStep() const {
  LinkStep step;
  switch (state_) {
    case State::kPaused:
      step.due = due_;
      break;
    case State::kResolving:
      step.resolve = target_;
      break;
    case State::kConnecting:
      step = {socket_.get(), POLLOUT, false, due_, std::nullopt};
      break;
    case State::kGreeting:
    case State::kOpen:
      step.fd = socket_.get();
      step.events = static_cast<short>(output_.empty() ? POLLIN : POLLIN | POLLOUT);
      if (state_ == State::kGreeting) step.due = due_;
      if (write_failed_) step.due = Instant{};
      step.may_receive =
          may_receive_ && state_ == State::kOpen && output_.empty() && !write_failed_;
      break;
    case State::kClosed:
      break;
  }
  return step;
}

void StoreLink::Advance(const LinkInput& input, const ClientCore& core, Instant now,
                        std::vector<ServerMessage>& inbox) {
  switch (state_) {
    case State::kPaused:
      if (now >= due_) TryNext(now);
      break;
    case State::kResolving:
      if (!input.resolved) break;
      if (!input.resolved->ok()) {
        Fail(input.resolved->status(), false, now);
        break;
      }
      numeric_.assign((*input.resolved)->begin(), (*input.resolved)->end());
      StartConnect(now);
      break;
    case State::kConnecting:
      if (input.revents != 0) {
        FinishConnect(core, now);
      } else if (now >= due_) {
        Fail(Status(StatusCode::kUnreachable,
                    StrCat("no answer from ", FormatHostPort(current_),
                           " within 5 s: is the host up? a firewall in between? wrong address?")),
             false, now);
      }
      break;
    case State::kGreeting:
    case State::kOpen:
      if ((input.revents & POLLOUT) != 0) Flush();
      if ((input.revents & ~POLLOUT) != 0 || input.received || write_failed_) {
        Receive(input, now, inbox);
      }
      if (state_ == State::kGreeting && now >= due_) {
        Fail(Status(StatusCode::kUnreachable,
                    StrCat("something accepted the connection at ", FormatHostPort(current_),
                           " and did not answer the greeting ",
                           tls_ != nullptr && !tls_->established() ? "of TLS " : "",
                           "within 5 s: is that a store? is it stopped or overloaded?")),
             false, now);
      }
      break;
    case State::kClosed:
      break;
  }
}

// The next numeric address, else the next given one. One failed turn through all of them pauses.
void StoreLink::TryNext(Instant now) {
  if (numeric_.empty()) {
    target_ = addresses_[address_];
    address_ = (address_ + 1) % addresses_.size();
    if (!IsNumeric(target_.host)) {
      state_ = State::kResolving;
      return;
    }
    numeric_.push_back(target_);
  }
  StartConnect(now);
}

void StoreLink::StartConnect(Instant now) {
  if (numeric_.empty()) {
    Fail(Status(StatusCode::kResolve,
                StrCat("the name of ", FormatHostPort(target_), " has no address")),
         false, now);
    return;
  }
  current_ = std::move(numeric_.front());
  numeric_.pop_front();
  Result<FileDescriptor> socket = StartConnectTcp(current_);
  if (!socket.ok()) {
    Fail(Explain(socket.status(), current_), false, now);
    return;
  }
  socket_ = std::move(*socket);
  state_ = State::kConnecting;
  due_ = now + kConnectTimeout;
}

void StoreLink::FinishConnect(const ClientCore& core, Instant now) {
  Status outcome = ConnectOutcome(socket_, current_);
  if (!outcome.ok()) {
    Fail(Explain(outcome, current_), false, now);
    return;
  }
  // Best effort: without it a vanished host is noticed later.
  static_cast<void>(::setsockopt(socket_.get(), IPPROTO_TCP, TCP_USER_TIMEOUT,
                                 &kUnacknowledgedMaxMs, sizeof kUnacknowledgedMaxMs));
  may_receive_ = AllowToReceive(socket_.get());
  state_ = State::kGreeting;
  due_ = now + kGreetTimeout;
  if (credentials_.tls != nullptr) {
    tls_ = credentials_.tls->Begin(target_.host);
    static_cast<void>(tls_->Receive({}, decrypted_));  // Says the first word.
  }
  Queue(EncodePreamble());
  const Frame hello = EncodeRequest(core.MakeHello());
  if (credentials_.tokens == nullptr) {
    Queue(EncodeFrame(hello));
  } else {
    handshake_.emplace(credentials_.tokens->Begin());
    Queue(handshake_->Begin(hello));
  }
  Flush();
}

// An error of TLS comes to light when the next bytes are received.
void StoreLink::Queue(std::string bytes) {
  if (tls_ != nullptr) {
    static_cast<void>(tls_->Send(bytes));
    bytes = tls_->TakeOutput();
    if (bytes.empty()) return;
  }
  output_.push_back(std::move(bytes));
}

void StoreLink::Receive(const LinkInput& input, Instant now, std::vector<ServerMessage>& inbox) {
  if (input.received) {
    if (*input.received <= 0) return OnNothing(*input.received, input.error, now);
    const auto bytes = static_cast<std::size_t>(*input.received);
    if (!OnReceived(std::string_view(input.bytes.data(), bytes), now, inbox)) return;
    if (bytes < input.bytes.size() && !write_failed_) return;
  }
  char chunk[kReadChunk];
  for (int i = 0; i < kReadChunksPerStep; ++i) {
    const ssize_t got = ::recv(socket_.get(), chunk, sizeof chunk, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return OnNothing(got, errno, now);
    const auto bytes = static_cast<std::size_t>(got);
    if (!OnReceived(std::string_view(chunk, bytes), now, inbox)) return;
    if (bytes < sizeof chunk && !write_failed_) return;
  }
}

// False when the connection was given up.
bool StoreLink::OnReceived(std::string_view bytes, Instant now, std::vector<ServerMessage>& inbox) {
  received_ += bytes.size();
  return tls_ == nullptr ? Take(bytes, now, inbox) : TakeEncrypted(bytes, now, inbox);
}

void StoreLink::OnNothing(ssize_t got, int error, Instant now) {
  if (got == 0) {
    OnClosed(now);
  } else if (error != EAGAIN && error != EWOULDBLOCK) {
    Fail(SocketError(current_, error), false, now);
  } else if (write_failed_) {
    Fail(SocketError(current_, EPIPE), false, now);
  }
}

void StoreLink::OnClosed(Instant now) {
  Fail(Status(StatusCode::kUnreachable,
              StrCat("the store at ", FormatHostPort(current_), " closed the connection")),
       false, now);
}

// False when the connection was given up.
bool StoreLink::Take(std::string_view bytes, Instant now, std::vector<ServerMessage>& inbox) {
  const Status fed = splitter_.Feed(bytes);
  if (!TakeFrames(now, inbox)) return false;
  if (fed.ok()) return true;
  Fail(Status(fed.code(), StrCat(FormatHostPort(current_), ": ", fed.message())), true, now);
  return false;
}

// False when the connection was given up.
bool StoreLink::TakeEncrypted(std::string_view bytes, Instant now,
                              std::vector<ServerMessage>& inbox) {
  decrypted_.clear();
  const Status received = tls_->Receive(bytes, decrypted_);
  Queue({});
  Flush();
  if (!decrypted_.empty() && !Take(decrypted_, now, inbox)) return false;
  if (!received.ok()) {
    // What a certificate is refused for does not pass by itself. Later an error is one of the line.
    Fail(Status(received.code(), StrCat("TLS with the store at ", FormatHostPort(target_), ": ",
                                        received.message())),
         state_ == State::kGreeting, now);
    return false;
  }
  if (!tls_->ended()) return true;
  OnClosed(now);
  return false;
}

// False when the connection was given up.
bool StoreLink::TakeFrames(Instant now, std::vector<ServerMessage>& inbox) {
  while (splitter_.HasFrame()) {
    Frame frame = splitter_.TakeFrame();
    if (state_ == State::kGreeting && handshake_ && ClientHandshake::Owns(frame)) {
      if (!OnHandshake(frame, now)) return false;
      continue;
    }
    Result<ServerMessage> message = DecodeServerMessage(std::move(frame));
    // An event that a newer server knows and this build does not.
    if (message.status().code() == StatusCode::kUnimplemented) continue;
    if (!message.ok()) {
      Fail(Status(message.status().code(),
                  StrCat(FormatHostPort(current_), ": ", message.status().message())),
           true, now);
      return false;
    }
    if (state_ == State::kGreeting) {
      if (!OnWelcome(*message, now)) return false;
      continue;
    }
    backoff_.Reset();
    inbox.push_back(std::move(*message));
  }
  return true;
}

// False when the connection was given up.
bool StoreLink::OnHandshake(const Frame& frame, Instant now) {
  const Result<std::optional<Frame>> answer = handshake_->OnFrame(frame);
  if (!answer.ok()) {
    Fail(Status(answer.status().code(),
                StrCat("the store at ", FormatHostPort(current_), ": ", answer.status().message())),
         true, now);
    return false;
  }
  if (answer->has_value()) {
    Queue(EncodeFrame(**answer));
    Flush();
  }
  return true;
}

bool StoreLink::OnWelcome(const ServerMessage& message, Instant now) {
  const Reply* reply = std::get_if<Reply>(&message);
  if (reply == nullptr || (reply->status.ok() && reply->welcome.server.empty())) {
    Fail(Status(StatusCode::kProtocol, StrCat("the store at ", FormatHostPort(current_),
                                              " did not answer the greeting with a welcome")),
         true, now);
    return false;
  }
  if (reply->status.code() == StatusCode::kAuth) {
    Fail(Status(StatusCode::kAuth, StrCat("the store at ", FormatHostPort(current_),
                                          " refused access: ", reply->status.message())),
         true, now);
    return false;
  }
  if (!reply->status.ok()) {
    // A full store may have room later.
    Fail(reply->status, reply->status.code() != StatusCode::kResourceExhausted, now);
    return false;
  }
  if (handshake_ && !handshake_->proven()) {
    Fail(Status(StatusCode::kAuth,
                StrCat("the store at ", FormatHostPort(current_),
                       " asked for no token and did not prove that it knows the one of this "
                       "process: another program may have taken its address")),
         true, now);
    return false;
  }
  welcome_ = reply->welcome;
  state_ = State::kOpen;
  opened_ = true;
  trouble_ = Status();
  refused_ = false;
  return true;
}

bool StoreLink::TakeOpened() { return std::exchange(opened_, false); }

bool StoreLink::Send(const Request& request) {
  RESILIENT_CHECK(open());
  if (tls_ == nullptr) {
    AppendRequest(request, &output_.emplace_back());
  } else {
    Queue(EncodeFrame(EncodeRequest(request)));
  }
  return Flush();
}

// Never closes: another thread may be polling the descriptor.
bool StoreLink::Flush() {
  while (!output_.empty() && !write_failed_) {
    const std::string& front = output_.front();
    ssize_t sent = ::send(socket_.get(), front.data() + output_sent_, front.size() - output_sent_,
                          MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) {
      write_failed_ = errno != EAGAIN && errno != EWOULDBLOCK;
      return false;
    }
    output_sent_ += static_cast<std::size_t>(sent);
    if (output_sent_ == front.size()) {
      output_.pop_front();
      output_sent_ = 0;
    }
  }
  return !write_failed_;
}

void StoreLink::Drop(Status why, Instant now) {
  if (state_ == State::kClosed) return;
  Fail(std::move(why), false, now);
}

void StoreLink::Fail(Status why, bool refused, Instant now) {
  bool was_open = state_ == State::kOpen;
  socket_.Reset();
  tls_.reset();
  splitter_ = FrameSplitter(kMaxFrameBody);
  handshake_.reset();
  output_.clear();
  output_sent_ = 0;
  write_failed_ = false;
  opened_ = false;
  trouble_ = std::move(why);
  refused_ = refused;
  state_ = State::kPaused;
  if (was_open) {  // The address that worked comes first.
    numeric_.clear();
    address_ = (address_ + addresses_.size() - 1) % addresses_.size();
  }
  tried_all_ = numeric_.empty() && address_ == 0;
  due_ = tried_all_ || was_open ? now + backoff_.Next() : now;
}

void StoreLink::Close() {
  if (tls_ != nullptr && output_.empty()) {
    tls_->End();
    Queue({});
    Flush();
  }
  tls_.reset();
  socket_.Reset();
  output_.clear();
  opened_ = false;
  state_ = State::kClosed;
}

std::string StoreLink::peer() const {
  if (!current_.host.empty()) return FormatHostPort(current_);
  std::string all;
  for (const HostPort& address : addresses_) {
    all += StrCat(all.empty() ? "" : ", ", FormatHostPort(address));
  }
  return all;
}

}  // namespace resilient::store
