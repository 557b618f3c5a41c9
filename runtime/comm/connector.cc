#include "runtime/comm/connector.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/wire.h"

namespace resilient {
namespace {

constexpr Duration kFirstDelay = Millis(5);
constexpr Duration kLongestDelay = Millis(1000);
// A connect that gets no answer at all is tried anew: the route may have changed.
constexpr Duration kConnectPatience = Millis(5000);

Hello Numbered(Hello hello) {
  hello.connector = RandomSeed();
  return hello;
}

}  // namespace

Connector::Connector(ConnectorListener& listener, std::string address, Hello hello,
                     std::string secret, std::unique_ptr<ShmStreamOffer> offer, std::uint64_t seed)
    : listener_(listener),
      peer_(hello.to),
      endpoint_(std::move(address)),
      hello_(Numbered(std::move(hello))),
      secret_(std::move(secret)),
      offer_(std::move(offer)),
      random_(seed) {}

std::string Connector::Greeting() const {
  Hello hello = hello_;
  hello.nonce = RandomBytes(kHelloNonceBytes);
  if (offer_ != nullptr) hello.shm_offer = offer_->text();
  return EncodeHello(hello, secret_);
}

short Connector::Interest() const {
  switch (stage_) {
    case Stage::kWaiting:
    case Stage::kDone:
      return 0;
    case Stage::kConnecting:
    case Stage::kSendingHello:
      return POLLOUT;
    case Stage::kAwaitingReply:
      return POLLIN;
  }
  return 0;
}

Instant Connector::NextTime() const {
  return stage_ == Stage::kWaiting || stage_ == Stage::kConnecting ? when_ : kNever;
}

void Connector::OnTime(Instant now) {
  if (now < NextTime()) return;
  if (stage_ == Stage::kWaiting) return Start(now);
  Fail(now, Status(StatusCode::kUnreachable,
                   StrCat("no answer from ", endpoint_, " within 5 s; is a firewall between?")));
}

void Connector::Start(Instant now) {
  Result<HostPort> address = ParseHostPort(endpoint_);
  if (!address) return Fail(now, address.status());
  address_ = *address;
  Result<FileDescriptor> socket = StartConnectTcp(address_);
  if (!socket) return Fail(now, socket.status());
  socket_ = std::move(*socket);
  stage_ = Stage::kConnecting;
  when_ = now + kConnectPatience;
}

void Connector::OnReady(Instant now) {
  switch (stage_) {
    case Stage::kWaiting:
    case Stage::kDone:
      return;
    case Stage::kConnecting:
      if (Status outcome = ConnectOutcome(socket_, address_); !outcome.ok())
        return Fail(now, outcome);
      stage_ = Stage::kSendingHello;
      greeting_ = Greeting();
      sent_ = 0;
      reply_.clear();
      return SendHello(now);
    case Stage::kSendingHello:
      return SendHello(now);
    case Stage::kAwaitingReply:
      return ReadReply(now);
  }
}

void Connector::SendHello(Instant now) {
  const ssize_t n = send(socket_.get(), greeting_.data() + sent_, greeting_.size() - sent_,
                         MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return;
    return Fail(now, Status(StatusCode::kUnreachable, StrCat(endpoint_, ": ", strerror(errno))));
  }
  sent_ += static_cast<std::size_t>(n);
  if (sent_ == greeting_.size()) stage_ = Stage::kAwaitingReply;
}

void Connector::ReadReply(Instant now) {
  // Not a byte more than the reply: what follows belongs to the link.
  char bytes[kHelloReplyBytes + kMaxFaultText];
  Result<HelloReply> reply = HelloReply{};
  if (reply_.size() >= kHelloReplyBytes) reply = DecodeHelloReply(reply_);
  if (!reply) return Fail(now, reply.status());
  const std::size_t wanted = kHelloReplyBytes + reply->fault_bytes - reply_.size();
  const ssize_t n = recv(socket_.get(), bytes, wanted, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (n <= 0) {
    return Fail(now, Status(StatusCode::kUnreachable,
                            StrCat(endpoint_, " closed the connection before the group was built",
                                   n < 0 ? StrCat(": ", strerror(errno)) : std::string())));
  }
  reply_.append(bytes, static_cast<std::size_t>(n));
  if (reply_.size() < kHelloReplyBytes) return;
  reply = DecodeHelloReply(reply_);
  if (!reply) return Fail(now, reply.status());
  // The rest, if there is any, has come with it or makes poll() return again.
  if (reply_.size() != kHelloReplyBytes + reply->fault_bytes) return;
  if (!ReplyProvesSecret(reply_, ProofOf(greeting_), secret_)) {
    return Fail(now, Status(StatusCode::kProtocol,
                            StrCat("what answers at ", endpoint_, " does not know the secret of ",
                                   "this job: another program may have taken its port")));
  }
  OnReply(now, *reply);
}

void Connector::OnReply(Instant now, const HelloReply& reply) {
  switch (reply.verdict) {
    case HelloVerdict::kAccepted:
      stage_ = Stage::kDone;
      offer_.reset();
      return listener_.OnConnected(*this, MakeTcpStream(std::move(socket_)));
    case HelloVerdict::kAcceptedShared:
      if (offer_ == nullptr) {
        return Fail(now, Status(StatusCode::kProtocol,
                                StrCat(endpoint_, " takes shared memory that nobody offered")));
      }
      stage_ = Stage::kDone;
      return listener_.OnConnected(*this, offer_->MakeStream(std::move(socket_)));
    case HelloVerdict::kLeft:
      Cancel();
      return listener_.OnPeerLeft(*this);
    case HelloVerdict::kOtherRanks: {
      const auto mismatch = DecodeFault(std::string_view(reply_).substr(kHelloReplyBytes));
      if (!mismatch) {
        return Fail(now, Status(StatusCode::kProtocol,
                                StrCat(endpoint_, " refuses the group, unreadably")));
      }
      Cancel();
      return listener_.OnOtherRanks(*this, *mismatch);
    }
  }
}

void Connector::Fail(Instant now, const Status& why) {
  socket_.Reset();
  // A peer that took it on the connection that is gone: the memory is used.
  if (offer_ != nullptr && offer_->taken()) offer_.reset();
  stage_ = Stage::kWaiting;
  const Duration ceiling = std::min(kLongestDelay, kFirstDelay * (1 << std::min(failures_, 10)));
  ++failures_;
  // Between half and all of the delay, so that many ranks do not knock in step.
  when_ = now + ceiling / 2 +
          Duration(random_.Below(static_cast<std::uint64_t>((ceiling / 2).count()) + 1));
  listener_.OnAttemptFailed(*this, why);
}

std::unique_ptr<ByteStream> Connector::TakeStreamEarly() {
  if (stage_ != Stage::kAwaitingReply) return nullptr;
  stage_ = Stage::kDone;
  // The peer may be about to take the offer, or have done so with its reply still on its way: who
  // comes first decides.
  if (offer_ != nullptr && !offer_->Withdraw()) return offer_->MakeStream(std::move(socket_));
  offer_.reset();
  return MakeTcpStream(std::move(socket_));
}

void Connector::Cancel() {
  stage_ = Stage::kDone;
  socket_.Reset();
  offer_.reset();
}

}  // namespace resilient
