#include "runtime/comm/message_link.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/log.h"

namespace resilient {
namespace {

constexpr std::size_t kStagingBytes = 16u << 10;
constexpr std::size_t kReadBudgetBytes = 1u << 20;   // One turn of one link.
constexpr std::size_t kWriteBudgetBytes = 1u << 20;  // One turn of one link.
constexpr std::size_t kWritePieces = 16;
// Read ahead of a held message once the peer has ended the stream: what the kernel had buffered.
constexpr std::size_t kLookAheadLimitBytes = 64u << 20;

}  // namespace

MessageLink::MessageLink(std::unique_ptr<ByteStream> stream, LinkListener& listener, int peer,
                         Lane lane)
    : listener_(listener),
      peer_(peer),
      lane_(lane),
      stream_(std::move(stream)),
      staging_(kStagingBytes) {}

void MessageLink::Send(const MessageHeader& header, std::span<const std::byte> payload,
                       std::uint64_t token) {
  RESILIENT_CHECK(header.payload_bytes == payload.size() && !finishing_);
  if (dead()) return;
  Output& out = outbox_.emplace_back();
  out.head = EncodeMessage(header);
  out.payload = payload;
  out.token = token;
}

void MessageLink::SendOwned(const MessageHeader& header, std::string payload) {
  RESILIENT_CHECK(header.payload_bytes == payload.size() && !finishing_);
  if (dead()) return;
  Output& out = outbox_.emplace_back();
  out.head = EncodeMessage(header);
  out.owned = std::move(payload);  // The deque never moves it: the span stays valid.
  out.payload = std::as_bytes(std::span<const char>(out.owned));
}

std::size_t MessageLink::DetachSends() {
  const std::size_t before = outbox_.size();
  std::deque<Output> kept;
  for (Output& out : outbox_) {
    const bool begun = out.sent > 0;
    const bool borrowed = out.token != 0;
    if (borrowed && !begun) continue;
    kept.push_back(std::move(out));
    Output& copy = kept.back();
    if (borrowed)
      copy.owned.assign(reinterpret_cast<const char*>(copy.payload.data()), copy.payload.size());
    copy.payload = std::as_bytes(std::span<const char>(copy.owned));
    copy.token = 0;
  }
  outbox_ = std::move(kept);
  return before - outbox_.size();
}

void MessageLink::DetachReceive() {
  sink_ = nullptr;
  if (stage_ == Stage::kPayload) Resume();
}

void MessageLink::FinishSending() { finishing_ = true; }

void MessageLink::Resume() {
  if (stalled_) resumed_ = true;
}

void MessageLink::Flush() {
  if (write_broken_) {
    outbox_.clear();
    finished_ = finishing_;
    return;
  }
  std::size_t budget = kWriteBudgetBytes;
  while (!dead() && !outbox_.empty() && budget > 0) {
    std::array<iovec, kWritePieces> pieces;
    std::size_t used = 0;
    for (auto out = outbox_.begin(); out != outbox_.end() && used + 2 <= kWritePieces; ++out) {
      const std::size_t of_head = std::min(out->sent, out->head.size());
      if (of_head < out->head.size())
        pieces[used++] = {out->head.data() + of_head, out->head.size() - of_head};
      const std::span<const std::byte> rest = out->payload.subspan(out->sent - of_head);
      if (!rest.empty()) pieces[used++] = {const_cast<std::byte*>(rest.data()), rest.size()};
    }
    const IoResult result = stream_->Write({pieces.data(), used});
    switch (result.state) {
      case IoResult::State::kMoved:
        budget -= std::min(budget, result.bytes);
        AfterWrite(result.bytes);
        break;
      case IoResult::State::kBlocked:
        write_blocked_ = true;
        return;
      case IoResult::State::kEnd:
      case IoResult::State::kBroken:
        // Only the reading side judges the end of a link: bytes of the peer, even its goodbye, may
        // still wait to be read. Operations with bytes left stay pending.
        write_broken_ = true;
        outbox_.clear();
        finished_ = finishing_;
        return;
    }
  }
  if (!dead() && outbox_.empty() && finishing_ && !finished_) {
    stream_->ShutdownWrite();
    finished_ = true;
  }
}

void MessageLink::AfterWrite(std::size_t bytes) {
  moved_ = true;
  while (bytes > 0 && !dead()) {
    Output& out = outbox_.front();
    const std::size_t total = out.head.size() + out.payload.size();
    const std::size_t part = std::min(bytes, total - out.sent);
    out.sent += part;
    bytes -= part;
    if (out.sent < total) return;
    const std::uint64_t token = out.token;
    outbox_.pop_front();
    if (token != 0) listener_.OnSent(*this, token);
  }
}

std::string_view MessageLink::Staged() const {
  return {reinterpret_cast<const char*>(staging_.data()) + staged_begin_,
          staged_end_ - staged_begin_};
}

void MessageLink::Read() {
  resumed_ = false;
  stalled_ = false;
  std::size_t budget = kReadBudgetBytes;
  while (!dead() && !read_ended_) {
    while (Step()) {
    }
    if (dead() || read_ended_ || stalled_) return;
    // Large payloads go straight to their place, the bytes behind them to the staging buffer.
    std::array<iovec, 2> pieces;
    std::size_t used = 0;
    std::span<std::byte> space;
    if (stage_ == Stage::kPayload && sink_ != nullptr) {
      space = sink_->Space();
      space = space.first(std::min<std::uint64_t>(space.size(), payload_left_));
      pieces[used++] = {space.data(), space.size()};
    }
    if (staged_begin_ == staged_end_) staged_begin_ = staged_end_ = 0;
    if (staged_begin_ > 0) {
      std::memmove(staging_.data(), staging_.data() + staged_begin_, staged_end_ - staged_begin_);
      staged_end_ -= staged_begin_;
      staged_begin_ = 0;
    }
    // Behind a partly filled sink there may be more of the same payload: only a sink that takes the
    // whole rest may be followed by the staging buffer.
    if (space.size() == payload_left_ || stage_ != Stage::kPayload || sink_ == nullptr)
      pieces[used++] = {staging_.data() + staged_end_, staging_.size() - staged_end_};
    const IoResult result = stream_->Read({pieces.data(), used});
    if (result.state == IoResult::State::kBlocked) return;
    if (result.state == IoResult::State::kEnd) {
      const bool between = stage_ == Stage::kHeader && staged_begin_ == staged_end_;
      return EndReading(between ? Status()
                                : Status(StatusCode::kCommFailed,
                                         "the connection ended in the middle of a message"));
    }
    if (result.state == IoResult::State::kBroken)
      return EndReading(Status(StatusCode::kCommFailed, std::strerror(result.error)));
    moved_ = true;
    const std::size_t direct = std::min(result.bytes, space.size());
    staged_end_ += result.bytes - direct;
    if (direct > 0) {
      payload_left_ -= direct;
      sink_->Commit(direct);
    }
    if (result.bytes >= budget) {
      // More may be staged than poll() knows of.
      stalled_ = resumed_ = !dead() && !read_ended_;
      return;
    }
    budget -= result.bytes;
  }
}

bool MessageLink::Step() {
  if (dead() || read_ended_ || stalled_) return false;
  switch (stage_) {
    case Stage::kHeader:
    case Stage::kCallSite:
      return StepHeader();
    case Stage::kHeld:
      return Offer();
    case Stage::kPayload:
      return StepPayload();
  }
  return false;
}

bool MessageLink::StepHeader() {
  if (stage_ == Stage::kHeader) {
    if (Staged().size() < kMessageHeaderBytes) return false;
    Result<MessageHeader> header = DecodeMessage(Staged().substr(0, kMessageHeaderBytes));
    if (!header) {
      EndReading(header.status());
      return false;
    }
    header_ = std::move(*header);
    Consume(kMessageHeaderBytes);
    stage_ = Stage::kCallSite;
  }
  if (Staged().size() < header_.call_site_bytes) return false;
  header_.call_site = Staged().substr(0, header_.call_site_bytes);
  Consume(header_.call_site_bytes);
  stage_ = Stage::kHeld;
  return Offer();
}

bool MessageLink::Offer() {
  const HeaderVerdict verdict = listener_.OnHeader(*this, header_);
  if (dead()) return false;
  switch (verdict.action) {
    case HeaderVerdict::Action::kHold:
      stalled_ = true;
      return false;
    case HeaderVerdict::Action::kInvalid:
      EndReading(Status(StatusCode::kProtocol, "the peer sent a message that is not allowed here"));
      return false;
    case HeaderVerdict::Action::kTake:
      break;
  }
  stage_ = Stage::kPayload;
  sink_ = verdict.sink;
  payload_left_ = header_.payload_bytes;
  if (payload_left_ == 0) MessageDone();
  return true;
}

bool MessageLink::StepPayload() {
  if (payload_left_ == 0) {
    MessageDone();
    return true;
  }
  const std::string_view staged = Staged();
  std::size_t part = std::min<std::uint64_t>(staged.size(), payload_left_);
  if (sink_ != nullptr) {
    const std::span<std::byte> space = sink_->Space();
    if (space.empty()) {
      stalled_ = true;
      return false;
    }
    part = std::min(part, space.size());
    if (part == 0) return false;
    std::memcpy(space.data(), staged.data(), part);
  }
  if (part == 0) return false;
  Consume(part);
  payload_left_ -= part;
  if (sink_ != nullptr) sink_->Commit(part);
  return true;
}

void MessageLink::MessageDone() {
  stage_ = Stage::kHeader;
  sink_ = nullptr;
  listener_.OnMessage(*this, header_);
}

void MessageLink::EndReading(const Status& why) {
  if (dead() || read_ended_) return;
  read_ended_ = true;
  listener_.OnEnd(*this, why);
}

short MessageLink::Interest() const {
  if (dead()) return 0;
  return stream_->PollFor({.bytes = !read_ended_ && !stalled_,
                           .room = write_blocked_ && HasOutput() && !write_broken_,
                           .end = !read_ended_ && stalled_ && !resumed_ && !looked_ahead_});
}

void MessageLink::LookAhead() {
  looked_ahead_ = true;
  IoResult result;
  while (staging_.size() < kLookAheadLimitBytes) {
    if (staged_end_ == staging_.size()) staging_.resize(2 * staging_.size());
    const iovec space{staging_.data() + staged_end_, staging_.size() - staged_end_};
    result = stream_->Read({&space, 1});
    if (result.state != IoResult::State::kMoved) break;
    staged_end_ += result.bytes;
  }
  if (result.state == IoResult::State::kMoved || result.state == IoResult::State::kBlocked) return;
  std::optional<MessageHeader> goodbye;
  if (Staged().size() >= kMessageHeaderBytes) {
    const Result<MessageHeader> last =
        DecodeMessage(Staged().substr(Staged().size() - kMessageHeaderBytes));
    if (last && last->type == MessageType::kGoodbye) goodbye = *last;
  }
  listener_.OnEndAhead(*this, goodbye);
}

void MessageLink::OnReady(short revents) {
  if (dead()) return;
  const StreamEvents ready = stream_->OnReady(revents);
  // The peer has ended the stream while we hold a message of it: it has left or it died, and
  // nobody must wait for that to be known until the message is wanted.
  if (ready.end && stalled_ && !resumed_ && !looked_ahead_) LookAhead();
  if (dead()) return;
  // If it is an error that shows, the write that follows finds it and gives up.
  if (ready.room) write_blocked_ = false;
  if (ready.bytes && !stalled_ && !read_ended_) Read();
}

void MessageLink::Kill() {
  stream_.reset();
  outbox_.clear();
  sink_ = nullptr;
}

}  // namespace resilient
