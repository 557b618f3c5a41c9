#include "store/client/link.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <utility>
#include <variant>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/net/local_socket.h"
#include "store/core/codec.h"

namespace resilient::store {
namespace {

constexpr Duration kConnectTimeout = std::chrono::seconds(5);
constexpr Duration kGreetTimeout = std::chrono::seconds(5);
// A host that vanished acknowledges nothing, neither what is sent nor a probe of an idle
// connection: the system's default would go on for a quarter of an hour before another connection
// is tried.
constexpr unsigned kUnacknowledgedMaxMs = 20000;
constexpr int kProbeAfterS = 15;
constexpr int kProbeIntervalS = 5;
constexpr std::size_t kReadChunk = 64u << 10;
constexpr int kReadChunksPerStep =
    64;  // So that one flood does not starve the caller's other work.
// From then on that a name is not resolved yet is told instead of an earlier trouble.
constexpr Duration kSlowLookup = std::chrono::seconds(1);

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

// Best effort: without it a vanished host is noticed later.
void NoticeVanishedHost(int fd) {
  const int on = 1;
  static_cast<void>(::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUnacknowledgedMaxMs,
                                 sizeof kUnacknowledgedMaxMs));
  static_cast<void>(
      ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kProbeAfterS, sizeof kProbeAfterS));
  static_cast<void>(
      ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kProbeIntervalS, sizeof kProbeIntervalS));
  static_cast<void>(::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on));
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

StoreLink::StoreLink(std::vector<HostPort> addresses, std::uint64_t seed, Credentials credentials,
                     Resolver& resolver)
    : addresses_(std::move(addresses)),
      resolver_(resolver),
      credentials_(std::move(credentials)),
      backoff_(seed),
      round_(addresses_.size()),
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
      step = {lookup_->fd(), POLLIN, false, due_};
      break;
    case State::kConnecting:
      step = {socket_.get(), POLLOUT, false, due_};
      break;
    case State::kPreparing:
      step = {credentials_.fd(), POLLIN, false, due_};
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
      AdvanceLookup(now);
      break;
    case State::kConnecting:
      if (input.revents != 0) {
        FinishConnect(now);
        if (state_ == State::kPreparing && !credentials_.reading()) Greet(core, now);
      } else if (now >= due_) {
        Fail(Status(StatusCode::kUnreachable,
                    StrCat("no answer from ", FormatHostPort(current_),
                           " within 5 s: is the host up? a firewall in between? wrong address?")),
             false, now);
      }
      break;
    case State::kPreparing:
      if (!credentials_.reading() || now >= due_) Greet(core, now);
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
  if (tried_all_) BeginRound();
  if (numeric_.empty()) {
    target_ = addresses_[address_];
    if (!NumericForm(target_.host)) {
      lookup_ = resolver_.Begin(target_.host, now);
      state_ = State::kResolving;
      due_ = resolver_.Known(target_.host).empty() ? now + kLookupPatience
                                                   : lookup_->since() + kFreshAnswerPatience;
      AdvanceLookup(now);
      return;
    }
    numeric_.push_back(target_);
  }
  StartConnect(now);
}

// The address that worked last comes first.
void StoreLink::BeginRound() {
  round_.assign(addresses_.size(), {});
  tried_all_ = false;
  address_ = home_.value_or(0);
}

void StoreLink::AdvanceLookup(Instant now) {
  if (lookup_->done()) {
    const Result<Addresses>& found = lookup_->result();
    if (!found.ok()) return Fail(found.status(), false, now);
    return ConnectTo(*found, now);
  }
  const Addresses known = resolver_.Known(target_.host);
  if (known.empty() && (trouble_.ok() || now - lookup_->since() >= kSlowLookup)) {
    trouble_ = NotResolvedYet(target_.host, *lookup_, now);
  }
  if (now < due_) return;
  if (known.empty()) return Fail(NotResolvedYet(target_.host, *lookup_, now), false, now);
  ConnectTo(known, now);
}

void StoreLink::ConnectTo(const Addresses& hosts, Instant now) {
  for (const std::string& host : hosts) numeric_.push_back({host, target_.port});
  lookup_.reset();  // They may be its own.
  StartConnect(now);
}

void StoreLink::StartConnect(Instant now) {
  current_ = std::move(numeric_.front());
  numeric_.pop_front();
  socket_ = ConnectLocally(current_);
  local_ = socket_.valid();
  if (!local_) {
    Result<FileDescriptor> socket = StartConnectTcp(current_);
    if (!socket.ok()) {
      Fail(Explain(socket.status(), current_), false, now);
      return;
    }
    socket_ = std::move(*socket);
  }
  state_ = State::kConnecting;
  due_ = now + kConnectTimeout;
}

void StoreLink::FinishConnect(Instant now) {
  if (!local_) {
    Status outcome = ConnectOutcome(socket_, current_);
    if (!outcome.ok()) {
      Fail(Explain(outcome, current_), false, now);
      return;
    }
    NoticeVanishedHost(socket_.get());
  }
  may_receive_ = AllowToReceive(socket_.get());
  state_ = State::kPreparing;
  due_ = credentials_.Refresh(now) + kFreshFilesPatience;
}

void StoreLink::Greet(const ClientCore& core, Instant now) {
  state_ = State::kGreeting;
  due_ = now + kGreetTimeout;
  const Credentials& credentials = credentials_.Latest(now);
  if (credentials.tls != nullptr) {
    tls_ = credentials.tls->Begin(target_.host);
    static_cast<void>(tls_->Receive({}, decrypted_));  // Says the first word.
  }
  Queue(EncodePreamble());
  const Frame hello = EncodeRequest(core.MakeHello());
  if (credentials.tokens == nullptr) {
    Queue(EncodeFrame(hello));
  } else {
    handshake_.emplace(credentials.tokens->Begin());
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
  if (reply == nullptr || (reply->status.ok() && !reply->welcome)) {
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
  dropped_.Reset();
  welcome_ = *reply->welcome;
  state_ = State::kOpen;
  opened_ = true;
  home_ = address_;
  trouble_ = Status();
  refused_ = false;
  return true;
}

bool StoreLink::TakeOpened() { return std::exchange(opened_, false); }

bool StoreLink::unacknowledged() const {
  RESILIENT_CHECK(open());
  if (!output_.empty()) return true;
  if (local_) return false;  // There SIOCOUTQ counts what the store has not read.
  int bytes = 0;
  return ::ioctl(socket_.get(), SIOCOUTQ, &bytes) != 0 || bytes > 0;
}

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
  dropped_ = std::move(socket_);
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
  lookup_.reset();
  state_ = State::kPaused;
  if (was_open) {
    BeginRound();
    numeric_.clear();
    trouble_ = std::move(why);
    refused_ = refused;
    due_ = now + backoff_.Next();
    return;
  }
  NoteAttempt(std::move(why), refused);
  due_ = tried_all_ ? now + backoff_.Next() : now;
}

// An address that refuses this process does not speak for the others. When all were asked and the
// store of this session refuses it, or any does where there is no session yet, waiting is no use.
void StoreLink::NoteAttempt(Status why, bool refused) {
  const bool final = refused && why.code() == StatusCode::kStaleGeneration;
  trouble_ = why;
  Attempt& attempt = round_[address_];
  // That something there refuses is more than that one of its addresses is silent.
  if (refused || !attempt.refused) attempt = {std::move(why), refused, numeric_.empty()};
  attempt.over = numeric_.empty();
  if (attempt.over) address_ = (address_ + 1) % addresses_.size();
  tried_all_ = std::ranges::all_of(round_, &Attempt::over);
  refused_ = final;
  if (!tried_all_ || final) return;
  const auto refuses = std::ranges::find_if(round_, &Attempt::refused);
  refused_ = home_ ? round_[*home_].refused : refuses != round_.end();
  trouble_ = RoundTrouble(home_ && refused_ ? *home_ : refuses - round_.begin());
}

// Why each address does not take this process. `first`: whose code counts; else the last one's.
Status StoreLink::RoundTrouble(std::size_t first) const {
  const Status& decisive = first < round_.size() ? round_[first].why : trouble_;
  if (round_.size() == 1) return round_.front().why;
  std::string text = "none of the addresses of the store takes this process:";
  for (std::size_t i = 0; i < round_.size(); ++i) {
    text += StrCat(i == 0 ? " " : "; ", FormatHostPort(addresses_[i]), " (",
                   CodeName(round_[i].why.code()), "): ", round_[i].why.message());
  }
  return {decisive.code(), std::move(text), decisive.detail()};
}

void StoreLink::Close() {
  if (tls_ != nullptr && output_.empty()) {
    tls_->End();
    Queue({});
    Flush();
  }
  tls_.reset();
  socket_.Reset();
  dropped_.Reset();
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
