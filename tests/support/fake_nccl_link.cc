#include "tests/support/fake_nccl_link.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace resilient::testing {
namespace {

bool IsLater() { return errno == EAGAIN || errno == EWOULDBLOCK; }

}  // namespace

void NcclLink::Send(const NcclMessage& message, const void* payload) {
  if (!is_open()) return;
  std::string bytes(sizeof(message) + message.payload, 0);
  std::memcpy(bytes.data(), &message, sizeof(message));
  if (message.payload > 0) std::memcpy(bytes.data() + sizeof(message), payload, message.payload);
  unsent_.push_back(std::move(bytes));
  Flush();
}

void NcclLink::Flush() {
  while (is_open() && !unsent_.empty()) {
    const std::string& first = unsent_.front();
    const ssize_t n = send(socket_.get(), first.data() + sent_, first.size() - sent_,
                           MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && IsLater()) return;
    // What the peer had said before it went is still to be read: Receive finds the end.
    if (n < 0) break;
    sent_ += static_cast<std::size_t>(n);
    if (sent_ < first.size()) continue;
    unsent_.pop_front();
    sent_ = 0;
  }
  unsent_.clear();
  sent_ = 0;
}

void NcclLink::Close() {
  socket_.Reset();
  unsent_.clear();
  sent_ = 0;
}

void NcclLink::Receive(
    const std::function<void(const NcclMessage&, const std::byte* payload)>& each) {
  std::array<char, 1 << 16> part;
  while (is_open()) {
    const ssize_t n = recv(socket_.get(), part.data(), part.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && IsLater()) break;
    if (n <= 0) {
      Close();
      break;
    }
    received_.append(part.data(), static_cast<std::size_t>(n));
  }
  std::size_t at = 0;
  NcclMessage message;
  while (received_.size() - at >= sizeof(message)) {
    std::memcpy(&message, received_.data() + at, sizeof(message));
    const std::size_t whole = sizeof(message) + message.payload;
    if (received_.size() - at < whole) break;
    each(message, reinterpret_cast<const std::byte*>(received_.data() + at + sizeof(message)));
    at += whole;
  }
  received_.erase(0, at);
}

PollEntry NcclLink::entry() const {
  const int events = is_flushed() ? POLLIN : POLLIN | POLLOUT;
  return {.fd = socket_.get(), .events = static_cast<short>(events)};
}

}  // namespace resilient::testing
