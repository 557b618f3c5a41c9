#include "store/server/connection.h"

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "runtime/base/log.h"
#include "store/core/codec.h"

namespace resilient::store {

namespace {

constexpr char kTlsHandshake = 0x16;                    // The first byte of a TLS client.
constexpr std::size_t kPartialInputCounted = 4u << 10;  // What most requests stay below.

}  // namespace

Connection::Connection(ConnectionId id, UvLoop& loop, Owner& owner, Instant accepted,
                       std::unique_ptr<TlsStream> tls)
    : id_(id),
      accepted_(accepted),
      owner_(owner),
      socket_(loop, {
                        .on_connection = {},
                        .on_read = [this](std::string_view bytes) { OnRead(bytes); },
                        .on_end =
                            [this](const std::string& error) {
                              owner_.OnEnd(*this, error.empty()
                                                      ? Status::Ok()
                                                      : Status(StatusCode::kUnreachable, error));
                            },
                        .on_written = [this] { OnWritten(); },
                    }),
      tls_(std::move(tls)),
      spoken_(tls_ == nullptr),
      splitter_(kMaxFrameBodyBeforeHello) {}

bool Connection::AcceptFrom(UvStream& listener) {
  if (!socket_.AcceptFrom(listener)) return false;
  name_ = peer_ = socket_.PeerName();
  out_.tail() = EncodePreamble();
  return true;
}

void Connection::OnRead(std::string_view bytes) {
  if (ending_) return;
  has_spoken_ = true;
  if (tls_ == nullptr || tls_->established()) return Process(bytes);
  handshake_ = bytes;
  UpdateReading();
  owner_.OnHandshake(*this);
}

void Connection::GoOn() {
  const std::string bytes = std::exchange(handshake_, {});
  if (closed() || ending_ || bytes.empty()) return;
  UpdateReading();
  Process(bytes);
}

void Connection::Process(std::string_view bytes) {
  if (!std::exchange(spoken_, true) && !Recognise(bytes.front())) return OnUnwritable();
  if (tls_ != nullptr) return OnDecrypted(bytes);
  Take(bytes);
}

void Connection::RecogniseTcpStore() {
  may_be_tcpstore_ = true;
  spoken_ = false;
}

bool Connection::Recognise(char first) {
  if (first == kTlsHandshake && tls_ != nullptr) return true;
  tls_.reset();
  if (may_be_tcpstore_ && first == tcpstore::kFirstByte) {
    tcpstore_ = std::make_unique<tcpstore::Client>(id_);
    out_.tail().clear();  // Our preamble, which it would take for an answer.
  }
  return Flush();  // Our preamble: the peer may wait for it.
}

void Connection::OnUnwritable() {
  owner_.OnEnd(*this, Status(StatusCode::kUnreachable, "it does not take our answer"));
}

void Connection::OnDecrypted(std::string_view bytes) {
  std::string plain;
  plain.reserve(bytes.size());
  const Status received = tls_->Receive(bytes, plain);
  if (!Flush()) return OnUnwritable();
  if (!plain.empty()) Take(plain);
  if (closed() || ending_) return;
  if (!received.ok() || tls_->ended()) owner_.OnEnd(*this, received);
}

void Connection::Take(std::string_view bytes) {
  Split(bytes);
  if (!closed() && !ending_) TellOfPartialInput();
}

void Connection::TellOfPartialInput() {
  const std::size_t partial =
      tcpstore_ != nullptr ? tcpstore_->PartialBytes() : splitter_.PartialBytes();
  const bool counts = partial >= kPartialInputCounted;
  if (!counts && !partial_told_) return;
  partial_told_ = counts;
  owner_.OnPartialInput(*this, counts ? partial : 0);
}

void Connection::Split(std::string_view bytes) {
  if (tcpstore_ != nullptr) {
    const Status fed = tcpstore_->Feed(bytes);
    if (HasInput()) return owner_.OnFrames(*this);
    if (!fed.ok()) owner_.OnEnd(*this, fed);
    return;
  }
  const Status fed = splitter_.Feed(bytes);
  // What came complete before the offending bytes is still valid, but its sender is not to be
  // trusted with an order of ours: the connection ends as a whole.
  if (!fed.ok()) return owner_.OnEnd(*this, fed);
  if (HasInput()) owner_.OnFrames(*this);
}

void Connection::OnWritten() {
  if (!Flush()) return OnUnwritable();
  if (ending_ && !EndIfWritten()) return OnUnwritable();
  if (WantsInput()) owner_.OnFrames(*this);
}

void Connection::Send(Frame frame) {
  if (closed() || ending_) return;
  const std::string bytes = EncodeFrame(std::move(frame));
  out_.tail() += bytes;
  unflushed_ += bytes.size();
}

void Connection::Send(ServerMessage&& message) {
  if (closed() || ending_) return;
  const std::size_t before = out_.bytes();
  if (tcpstore_ != nullptr) {
    if (const auto* reply = std::get_if<Reply>(&message)) out_.tail() += reply->value;
    unflushed_ += out_.bytes() - before;
    return;
  }
  auto shared = AppendServerMessage(std::move(message), &out_.tail());
  if (shared != nullptr) out_.Append(std::move(shared));
  unflushed_ += out_.bytes() - before;
}

bool Connection::Flush() {
  if (closed()) return false;
  unflushed_ = 0;
  if (unwritable_) out_.Clear();
  if (Opening()) return WriteTls();
  while (!out_.empty()) {
    const bool room = socket_.QueuedBytes() == 0;
    if (room) out_.JoinStep(StepBytes());
    if (std::string& own = out_.next_own(); !own.empty()) {
      if (!Write(own)) return false;
      continue;
    }
    if (!room) break;  // OnWritten goes on.
    if (!WriteShared()) return false;
  }
  return WriteTls();
}

bool Connection::WriteShared() {
  if (tls_ == nullptr) {
    const std::string_view shared = out_.next_shared();
    const std::optional<std::size_t> written = socket_.TryWrite(shared);
    if (!written) {
      GiveUpWriting();
      return true;
    }
    flushed_ += *written;
    out_.DropShared(*written);
    if (*written == shared.size()) return true;
  }
  std::string step = out_.TakeStep(StepBytes());  // Queued, it tells when there is room again.
  return Write(step);
}

bool Connection::Write(std::string& bytes) {
  if (tls_ != nullptr) return tls_->Send(std::exchange(bytes, {})).ok() && WriteTls();
  WriteToSocket(bytes);
  return true;
}

bool Connection::WriteTls() {
  if (tls_ == nullptr) return true;
  std::string bytes = tls_->TakeOutput();
  if (!bytes.empty()) WriteToSocket(bytes);
  return true;
}

void Connection::WriteToSocket(std::string& bytes) {
  flushed_ += bytes.size();
  if (unwritable_ || !socket_.Write(bytes)) GiveUpWriting();
}

// Its last words, a leave perhaps, may still wait to be read: their end ends the connection.
void Connection::GiveUpWriting() {
  unwritable_ = true;
  out_.Clear();
}

std::uint64_t Connection::WrittenBytes() const {
  return closed() ? flushed_ : flushed_ - socket_.QueuedBytes();
}

std::size_t Connection::QueuedBytes() const {
  if (closed()) return 0;
  return socket_.QueuedBytes() + (Opening() ? 0 : out_.bytes());
}

std::size_t Connection::QueuedMemory() const {
  if (closed()) return 0;
  return socket_.QueuedBytes() + (Opening() ? 0 : out_.memory_bytes());
}

void Connection::UpdateReading() {
  if (closed()) return;
  const bool read = ending_ || (WantsInput() && !HasInput() && handshake_.empty());
  if (read == reading_) return;
  reading_ = read;
  if (read) {
    socket_.ReadStart();
  } else {
    socket_.ReadStop();
  }
}

void Connection::BeginEnd(Instant now) {
  if (ending_) return;
  ending_ = true;
  ending_since_ = now;
  if (!Flush() || !EndIfWritten()) return Close();
  UpdateReading();
}

bool Connection::EndIfWritten() {
  if (tls_ != nullptr && !tls_ended_ && (Opening() || out_.empty())) {
    tls_ended_ = true;
    tls_->End();
    if (!WriteTls()) return false;
  }
  if (QueuedBytes() == 0) socket_.EndWriting();
  return true;
}

void Connection::SetHello(const Hello& hello) {
  if (greeted_) return;
  greeted_ = true;
  role_ = hello.role;
  job_ = hello.job;
  host_ = hello.process.host;
  pid_ = hello.process.pid;
  splitter_.set_body_limit(kMaxFrameBody);
  name_ = StrCat("host ", hello.process.host, ", pid ", hello.process.pid, " (", name_, ")");
}

void Connection::SetTcpStore() {
  greeted_ = true;
  job_ = tcpstore::kJob;
  name_ = StrCat("the TCPStore client ", peer_);
}

LogRecord Connection::Record(std::string_view event, std::string text) const {
  return {event,
          {{"job", job_},
           {"host", host_},
           {"pid", pid_ == 0 ? std::string() : std::to_string(pid_)},
           {"peer", peer_}},
          std::move(text)};
}

int& Connection::TakenInTurn(std::uint64_t turn) {
  if (turn_ != turn) {
    turn_ = turn;
    taken_ = 0;
  }
  return taken_;
}

}  // namespace resilient::store
