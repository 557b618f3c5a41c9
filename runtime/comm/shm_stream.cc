#include "runtime/comm/shm_stream.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <new>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/base/numbers.h"

namespace resilient {
namespace {

// Copied before the other side is told: it then works on them while the next are copied.
constexpr std::size_t kPieceBytes = 32u << 10;
constexpr std::size_t kBellBytes = 64;  // More may wait; poll() tells again.
constexpr int kCorrupt = EBADMSG;       // An index that makes no sense.

// The control page: who has the memory, and the two rings.
struct Control {
  enum State : std::uint32_t { kOffered, kAttached, kWithdrawn };
  alignas(64) std::atomic<std::uint32_t> state;
  alignas(256) ShmRingControl forward;
  alignas(256) ShmRingControl backward;
};
static_assert(sizeof(Control) <= ShmStreamGeometry::kControlBytes);

Control& ControlOf(std::span<std::byte> memory) {
  return *std::launder(reinterpret_cast<Control*>(memory.data()));
}

ShmRingControl& ControlOf(std::span<std::byte> memory, bool forward) {
  Control& control = ControlOf(memory);
  return forward ? control.forward : control.backward;
}

std::span<std::byte> RingOf(std::span<std::byte> memory, const ShmStreamGeometry& geometry,
                            bool forward) {
  const std::span<std::byte> rings = memory.subspan(ShmStreamGeometry::kControlBytes);
  return forward ? rings.first(geometry.forward_bytes)
                 : rings.subspan(geometry.forward_bytes, geometry.backward_bytes);
}

// From kOffered to `next`; false when it was something else.
bool Claim(std::span<std::byte> memory, Control::State next) {
  std::uint32_t offered = Control::kOffered;
  return ControlOf(memory).state.compare_exchange_strong(offered, next);
}

IoResult Moved(std::size_t bytes) { return {.state = IoResult::State::kMoved, .bytes = bytes}; }
IoResult Broken(int error) { return {.state = IoResult::State::kBroken, .error = error}; }

bool GoodRing(std::size_t bytes) {
  return std::has_single_bit(bytes) && bytes >= ShmStreamGeometry::kLeastRingBytes &&
         bytes <= ShmStreamGeometry::kMostRingBytes;
}

// The number behind the last space of `text`, which loses both.
std::optional<std::size_t> TakeLastNumber(std::string_view& text) {
  const std::size_t space = text.rfind(' ');
  if (space == std::string_view::npos) return std::nullopt;
  const std::string_view digits = text.substr(space + 1);
  text = text.substr(0, space);
  return ParseNumber<std::size_t>(digits);
}

}  // namespace

bool ShmStreamGeometry::Valid() const {
  return GoodRing(forward_bytes) && GoodRing(backward_bytes);
}

ShmStream::ShmStream(FileDescriptor bell, std::span<std::byte> memory,
                     const ShmStreamGeometry& geometry, Side side,
                     std::unique_ptr<ShmSegment> keeps)
    : bell_(std::move(bell)),
      keeps_(std::move(keeps)),
      out_(ControlOf(memory, side == Side::kOffers),
           RingOf(memory, geometry, side == Side::kOffers)),
      in_(ControlOf(memory, side == Side::kAttaches),
          RingOf(memory, geometry, side == Side::kAttaches)),
      worth_waking_((side == Side::kOffers ? geometry.forward_bytes : geometry.backward_bytes) /
                    4) {
  RESILIENT_CHECK(geometry.Valid() && memory.size() >= geometry.TotalBytes());
}

void ShmStream::FormatMemory(std::span<std::byte> memory) {
  // Nobody has looked yet: the first bytes are to be told.
  ControlOf(memory).forward.reader_sleeps.store(1);
  ControlOf(memory).backward.reader_sleeps.store(1);
}

short ShmStream::PollFor(const StreamEvents& wanted) const {
  // Behind its end the connection is always readable, and tells nothing any more.
  return wanted.any() && !peer_ended_ ? POLLIN : 0;
}

StreamEvents ShmStream::OnReady(short /*revents*/) {
  std::array<char, kBellBytes> drained;
  ssize_t n = -1;
  do {
    n = recv(bell_.get(), drained.data(), drained.size(), MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK)) {
    peer_ended_ = true;
    peer_error_ = n == 0 ? 0 : errno;
  }
  // What the bell was rung for is in memory.
  return {.bytes = true, .room = true, .end = peer_ended_ || in_.Closed()};
}

void ShmStream::Ring() {
  // A connection that takes no more holds bytes that the peer has not read: it will wake. One that
  // has broken shows so when it is polled.
  const char byte = 0;
  ssize_t n = -1;
  do {
    n = send(bell_.get(), &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (n < 0 && errno == EINTR);
}

IoResult ShmStream::Read(std::span<const iovec> into) {
  in_.WakeUp();
  std::optional<std::size_t> available = in_.Available();
  if (available && *available == 0) {
    const bool closed = in_.Closed();
    in_.PrepareSleep();
    // The last look: what came before the writer closed, ended or saw no sleeper is seen here.
    available = in_.Available();
    if (available && *available == 0) {
      if (closed || (peer_ended_ && peer_error_ == 0)) return {.state = IoResult::State::kEnd};
      return peer_ended_ ? Broken(peer_error_) : IoResult{};
    }
    in_.WakeUp();
  }
  std::size_t moved = 0;
  for (const iovec& piece : into) {
    std::span<std::byte> left(static_cast<std::byte*>(piece.iov_base), piece.iov_len);
    while (!left.empty() && available && *available > 0 && moved < kMoveBytes) {
      const std::size_t part = std::min({*available, left.size(), kPieceBytes});
      in_.Take(left.first(part));
      left = left.subspan(part);
      moved += part;
      if (in_.unpublished() >= kPieceBytes) TellWriter();
      available = in_.Available();
    }
  }
  if (!available) return Broken(kCorrupt);
  TellWriter();
  return Moved(moved);
}

void ShmStream::TellWriter() {
  if (in_.unpublished() == 0) return;
  in_.Publish();
  if (in_.TakeSleeper()) Ring();
}

IoResult ShmStream::Write(std::span<const iovec> from) {
  if (peer_ended_) return Broken(peer_error_ == 0 ? EPIPE : peer_error_);
  out_.WakeUp();
  std::optional<std::size_t> room = out_.Room();
  if (room && *room == 0) {
    out_.PrepareSleep();
    room = out_.Room();
    if (room && *room == 0) return {};
    out_.WakeUp();
  }
  std::size_t moved = 0;
  for (const iovec& piece : from) {
    std::span<const std::byte> left(static_cast<const std::byte*>(piece.iov_base), piece.iov_len);
    while (!left.empty() && room && *room > 0 && moved < kMoveBytes) {
      const std::size_t part = std::min({*room, left.size(), kPieceBytes});
      out_.Append(left.first(part));
      left = left.subspan(part);
      moved += part;
      if (out_.unpublished() >= kPieceBytes) {
        out_.Publish();
        if (moved >= worth_waking_ && out_.TakeSleeper()) Ring();
      }
      room = out_.Room();
    }
  }
  if (!room) return Broken(kCorrupt);
  out_.Publish();
  if (out_.TakeSleeper()) Ring();
  return Moved(moved);
}

void ShmStream::ShutdownWrite() {
  out_.Close();
  // The reader may not sleep for bytes, and wait for just this.
  Ring();
}

Result<std::unique_ptr<ShmStreamOffer>> ShmStreamOffer::Make(const ShmStreamGeometry& geometry) {
  RESILIENT_CHECK(geometry.Valid());
  Result<std::unique_ptr<ShmSegment>> segment = ShmSegment::Create(geometry.TotalBytes());
  if (!segment) return segment.status();
  ShmStream::FormatMemory((*segment)->memory());
  return std::unique_ptr<ShmStreamOffer>(new ShmStreamOffer(std::move(*segment), geometry));
}

std::string ShmStreamOffer::text() const {
  return StrCat(ShmSegment::EncodeOffer(segment_->MakeOffer()), " ", geometry_.forward_bytes, " ",
                geometry_.backward_bytes);
}

bool ShmStreamOffer::taken() const {
  return ControlOf(segment_->memory()).state.load() == Control::kAttached;
}

bool ShmStreamOffer::Withdraw() { return Claim(segment_->memory(), Control::kWithdrawn); }

std::unique_ptr<ByteStream> ShmStreamOffer::MakeStream(FileDescriptor connection) {
  segment_->CloseOffer();
  const std::span<std::byte> memory = segment_->memory();
  return std::make_unique<ShmStream>(std::move(connection), memory, geometry_,
                                     ShmStream::Side::kOffers, std::move(segment_));
}

Result<std::unique_ptr<ByteStream>> AttachShmStream(std::string_view offer,
                                                    FileDescriptor& connection) {
  const std::optional<std::size_t> backward = TakeLastNumber(offer);
  const std::optional<std::size_t> forward = backward ? TakeLastNumber(offer) : std::nullopt;
  const std::optional<ShmSegment::Offer> where = ShmSegment::DecodeOffer(offer);
  const ShmStreamGeometry geometry{.forward_bytes = forward.value_or(0),
                                   .backward_bytes = backward.value_or(0)};
  if (!where || !geometry.Valid())
    return Status(StatusCode::kProtocol, "the offer of shared memory cannot be read");
  Result<std::unique_ptr<ShmSegment>> segment = ShmSegment::Attach(*where, geometry.TotalBytes());
  if (!segment) return segment.status();
  (*segment)->CloseOffer();
  const std::span<std::byte> memory = (*segment)->memory();
  if (!Claim(memory, Control::kAttached))
    return Status(StatusCode::kCancelled, "the offer of shared memory was withdrawn");
  return std::unique_ptr<ByteStream>(std::make_unique<ShmStream>(
      std::move(connection), memory, geometry, ShmStream::Side::kAttaches, std::move(*segment)));
}

}  // namespace resilient
