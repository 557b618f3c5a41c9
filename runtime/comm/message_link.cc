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
constexpr std::size_t kWritePieces = 17;
constexpr std::size_t kMessagePieces = 3;
// What is summed ahead of the kernel: it shall find it in the cache.
constexpr std::size_t kSumAheadBytes = 128u << 10;
// Read ahead of a held message once the peer has ended the stream: what the kernel had buffered.
constexpr std::size_t kLookAheadLimitBytes = 64u << 20;

std::span<const std::byte> BytesOf(std::string_view text) {
  return std::as_bytes(std::span<const char>(text));
}

}  // namespace

MessageLink::MessageLink(std::unique_ptr<ByteStream> stream, LinkListener& listener, int peer,
                         Lane lane, bool checksums)
    : listener_(listener),
      peer_(peer),
      lane_(lane),
      checksums_(checksums),
      stream_(std::move(stream)),
      staging_(kStagingBytes) {}

MessageLink::Output& MessageLink::Queue(const MessageHeader& header) {
  Output& out = outbox_.emplace_back();
  out.checksum = checksums_ && header.payload_bytes > 0;
  out.head = EncodeMessage(header, out.checksum);
  return out;
}

void MessageLink::Send(const MessageHeader& header, std::span<const std::byte> payload,
                       std::uint64_t token) {
  RESILIENT_CHECK(header.payload_bytes == payload.size() && !finishing_);
  if (dead()) return;
  Output& out = Queue(header);
  out.payload = payload;
  out.token = token;
}

void MessageLink::SendOwned(const MessageHeader& header, std::string payload) {
  RESILIENT_CHECK(header.payload_bytes == payload.size() && !finishing_);
  if (dead()) return;
  Output& out = Queue(header);
  out.owned = std::move(payload);  // The deque never moves it: the span stays valid.
  out.payload = BytesOf(out.owned);
}

void MessageLink::Output::KeepRest() {
  const std::size_t of_head = std::min(sent, head.size());
  const std::size_t of_payload = std::min(sent - of_head, payload.size());
  head.erase(0, of_head);
  payload = payload.subspan(of_payload);
  owned.assign(reinterpret_cast<const char*>(payload.data()), payload.size());
  payload = BytesOf(owned);
  summed -= std::min(summed, of_payload);  // Without checksums nothing is.
  sent -= of_head + of_payload;
  token = 0;
}

std::size_t MessageLink::DetachSends() {
  const std::size_t before = outbox_.size();
  std::deque<Output> kept;
  for (Output& out : outbox_) {
    const bool begun = out.sent > 0;
    const bool borrowed = out.token != 0;
    if (borrowed && !begun) continue;
    kept.push_back(std::move(out));
    if (borrowed) {
      kept.back().KeepRest();
    } else {
      kept.back().payload = BytesOf(kept.back().owned);
    }
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
  while (!dead() && (!outbox_.empty() || stream_->holds_output()) && budget > 0) {
    const bool held_alone = outbox_.empty();
    const IoResult result = held_alone ? stream_->Flush() : WriteSome();
    switch (result.state) {
      case IoResult::State::kMoved:
        budget -= std::min(budget, result.bytes);
        if (held_alone) {
          moved_ = true;
        } else {
          AfterWrite(result.bytes);
        }
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
    finished_ = !stream_->holds_output();
    write_blocked_ = !finished_;
  }
}

IoResult MessageLink::WriteSome() {
  std::array<iovec, kWritePieces> pieces;
  std::size_t used = 0;
  for (Output& out : outbox_) {
    if (used + kMessagePieces > kWritePieces) break;
    const std::size_t ready = SumUp(out);
    std::size_t skip = out.sent;
    for (const std::span<const std::byte> part :
         {BytesOf(out.head), out.payload.first(ready), BytesOf(out.trailer)}) {
      const std::span<const std::byte> rest = part.subspan(std::min(skip, part.size()));
      skip -= part.size() - rest.size();
      if (!rest.empty()) pieces[used++] = {const_cast<std::byte*>(rest.data()), rest.size()};
    }
    if (ready < out.payload.size()) break;
  }
  return stream_->Write({pieces.data(), used});
}

std::size_t MessageLink::SumUp(Output& out) {
  if (!out.checksum || !out.trailer.empty()) return out.payload.size();
  if (!std::exchange(out.summing, true)) {
    sent_sum_.Begin();
    sent_sum_.Update(BytesOf(out.head));
  }
  const std::size_t gone = out.sent - std::min(out.sent, out.head.size());
  const std::size_t end = std::min(out.payload.size(), gone + kSumAheadBytes);
  sent_sum_.Update(out.payload.subspan(out.summed, end - out.summed));
  out.summed = end;
  if (end == out.payload.size()) out.trailer = EncodeChecksum(sent_sum_.Value());
  return end;
}

void MessageLink::AfterWrite(std::size_t bytes) {
  moved_ = true;
  while (bytes > 0 && !dead()) {
    Output& out = outbox_.front();
    const std::size_t total =
        out.head.size() + out.payload.size() + (out.checksum ? kChecksumBytes : 0);
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
      return EndReading(Status(StatusCode::kCommFailed,
                               result.what != nullptr ? result.what : std::strerror(result.error)));
    moved_ = true;
    const std::size_t direct = std::min(result.bytes, space.size());
    staged_end_ += result.bytes - direct;
    if (direct > 0) {
      payload_left_ -= direct;
      Commit(space.first(direct));
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
    case Stage::kTrailer:
      return StepTrailer();
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
    if (header_.checksum) {
      received_sum_.Begin();
      received_sum_.Update(BytesOf(Staged().substr(0, kMessageHeaderBytes)));
    }
    Consume(kMessageHeaderBytes);
    stage_ = Stage::kCallSite;
  }
  if (Staged().size() < header_.call_site_bytes) return false;
  header_.call_site = Staged().substr(0, header_.call_site_bytes);
  if (header_.checksum) received_sum_.Update(BytesOf(header_.call_site));
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
  if (payload_left_ == 0) PayloadDone();
  return true;
}

bool MessageLink::StepPayload() {
  if (payload_left_ == 0) {
    PayloadDone();
    return true;
  }
  std::span<const std::byte> staged = BytesOf(Staged());
  staged = staged.first(std::min<std::uint64_t>(staged.size(), payload_left_));
  if (sink_ != nullptr) {
    const std::span<std::byte> space = sink_->Space();
    if (space.empty()) {
      stalled_ = true;
      return false;
    }
    staged = staged.first(std::min(staged.size(), space.size()));
    std::copy(staged.begin(), staged.end(), space.begin());
    staged = space.first(staged.size());
  }
  if (staged.empty()) return false;
  Consume(staged.size());
  payload_left_ -= staged.size();
  Commit(staged);
  return true;
}

void MessageLink::Commit(std::span<const std::byte> bytes) {
  if (header_.checksum) received_sum_.Update(bytes);
  if (sink_ != nullptr) sink_->Commit(bytes.size());
}

void MessageLink::PayloadDone() {
  if (header_.checksum) {
    stage_ = Stage::kTrailer;
    return;
  }
  stage_ = Stage::kHeader;
  sink_ = nullptr;
  listener_.OnMessage(*this, header_);
}

bool MessageLink::StepTrailer() {
  if (Staged().size() < kChecksumBytes) return false;
  const std::uint64_t told = DecodeChecksum(Staged().substr(0, kChecksumBytes));
  Consume(kChecksumBytes);
  stage_ = Stage::kHeader;
  sink_ = nullptr;
  // Also where it was dropped: perhaps because its header is damaged.
  if (told != received_sum_.Value()) {
    listener_.OnDamaged(*this, header_);
  } else {
    listener_.OnMessage(*this, header_);
  }
  return true;
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
  // A stream over several sockets, one of which will not come any more.
  const bool unread = !dead() && !read_ended_ && !stalled_;
  if (ready.end && unread && !std::exchange(looked_ahead_, true))
    listener_.OnEndAhead(*this, std::nullopt);
}

void MessageLink::Kill() {
  stream_.reset();
  outbox_.clear();
  sink_ = nullptr;
}

}  // namespace resilient
