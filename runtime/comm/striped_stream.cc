#include "runtime/comm/striped_stream.h"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/log.h"

namespace resilient {
namespace {

constexpr std::size_t kPieces = 16;

// The part of `pieces` that begins at `from` and is at most `bytes` long. Returns how many it is.
std::size_t Cut(std::span<const iovec> pieces, std::size_t from, std::size_t bytes,
                std::array<iovec, kPieces>* out) {
  std::size_t used = 0;
  for (const iovec& piece : pieces) {
    if (bytes == 0 || used == kPieces) break;
    if (from >= piece.iov_len) {
      from -= piece.iov_len;
      continue;
    }
    const std::size_t length = std::min(piece.iov_len - from, bytes);
    (*out)[used++] = {static_cast<std::byte*>(piece.iov_base) + from, length};
    bytes -= length;
    from = 0;
  }
  return used;
}

std::size_t Total(std::span<const iovec> pieces) {
  std::size_t bytes = 0;
  for (const iovec& piece : pieces) bytes += piece.iov_len;
  return bytes;
}

}  // namespace

Result<std::unique_ptr<StripedStream>> StripedStream::Make(int count) {
  RESILIENT_CHECK(count >= 2 && count <= kMaxSocketStreams);
  FileDescriptor epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) {
    return Status(StatusCode::kResourceExhausted,
                  StrCat("no descriptor for a link of ", count, " sockets: ", strerror(errno)));
  }
  return std::unique_ptr<StripedStream>(new StripedStream(count, std::move(epoll)));
}

StripedStream::StripedStream(int count, FileDescriptor epoll)
    : epoll_(std::move(epoll)), count_(count), reading_(count), writing_(count) {}

bool StripedStream::Attach(int index, std::unique_ptr<ByteStream> socket) {
  if (index < 0 || index >= count_) return false;
  Socket& slot = sockets_[static_cast<std::size_t>(index)];
  if (slot.stream != nullptr) return false;
  slot.stream = std::move(socket);
  if (shut_) slot.stream->ShutdownWrite();
  return true;
}

void StripedStream::Watch(std::size_t index, std::uint32_t events) const {
  const Socket& socket = sockets_[index];
  if (socket.stream == nullptr || socket.watched == events) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = index;
  const int what = events == 0           ? EPOLL_CTL_DEL
                   : socket.watched == 0 ? EPOLL_CTL_ADD
                                         : EPOLL_CTL_MOD;
  RESILIENT_CHECK(epoll_ctl(epoll_.get(), what, socket.stream->fd(), &event) == 0);
  socket.watched = events;
}

short StripedStream::PollFor(const StreamEvents& wanted) const {
  std::array<std::uint32_t, kMaxSocketStreams> events{};
  if (wanted.bytes) events[reading_.socket()] |= EPOLLIN;
  if (wanted.end) events[reading_.socket()] |= EPOLLRDHUP;
  if (wanted.room) events[writing_.socket()] |= EPOLLOUT;
  if ((wanted.bytes || wanted.end) && Awaited()) {
    for (std::size_t i = 0; i < sockets_.size(); ++i) {
      if (!sockets_[i].end_told) events[i] |= EPOLLRDHUP;
    }
  }
  bool any = false;
  for (std::size_t i = 0; i < sockets_.size(); ++i) {
    Watch(i, events[i]);
    any = any || sockets_[i].watched != 0;
  }
  return any ? POLLIN : 0;
}

StreamEvents StripedStream::OnReady(short revents) {
  StreamEvents ready;
  if (revents == 0) return ready;
  std::array<epoll_event, kMaxSocketStreams> events;
  const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    const std::uint32_t what = events[static_cast<std::size_t>(i)].events;
    const bool error = (what & (EPOLLERR | EPOLLHUP)) != 0;
    const bool end = error || (what & EPOLLRDHUP) != 0;
    ready.bytes |= end || (what & EPOLLIN) != 0;
    ready.room |= error || (what & EPOLLOUT) != 0;
    ready.end |= end;
    if (end && Awaited()) sockets_[events[static_cast<std::size_t>(i)].data.u64].end_told = true;
  }
  return ready;
}

IoResult StripedStream::Move(Turn& turn, std::span<const iovec> pieces, Direction direction) {
  const std::size_t most = std::min(Total(pieces), kMoveBytes);
  std::size_t moved = 0;
  while (moved < most) {
    ByteStream* socket = sockets_[turn.socket()].stream.get();
    std::array<iovec, kPieces> part;
    const std::size_t used = Cut(pieces, moved, turn.left(), &part);
    const std::size_t wanted = Total({part.data(), used});
    const IoResult result =
        socket == nullptr ? IoResult{} : (socket->*direction)({part.data(), used});
    if (result.state != IoResult::State::kMoved) {
      // It says so again next time.
      if (moved == 0) return result;
      break;
    }
    turn.Move(result.bytes);
    moved += result.bytes;
    if (result.bytes < wanted) break;
  }
  return {.state = IoResult::State::kMoved, .bytes = moved};
}

IoResult StripedStream::Read(std::span<const iovec> into) {
  return Move(reading_, into, &ByteStream::Read);
}

IoResult StripedStream::Write(std::span<const iovec> from) {
  return Move(writing_, from, &ByteStream::Write);
}

void StripedStream::ShutdownWrite() {
  shut_ = true;
  for (const Socket& socket : sockets_) {
    if (socket.stream != nullptr) socket.stream->ShutdownWrite();
  }
}

}  // namespace resilient
