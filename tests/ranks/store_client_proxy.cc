#include "tests/ranks/store_client_proxy.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <string_view>
#include <utility>

#include <gtest/gtest.h>

namespace resilient::store {
namespace {

constexpr Duration kForwardPatience = std::chrono::seconds(10);

bool SendAll(const FileDescriptor& to, std::string_view bytes, const Clock& clock) {
  const Deadline deadline = Deadline::After(clock.Now(), kForwardPatience);
  while (!bytes.empty()) {
    const ssize_t sent = ::send(to.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(sent));
      continue;
    }
    if (errno != EAGAIN && errno != EINTR) return false;
    std::vector<PollEntry> entries{{to.get(), POLLOUT, 0}};
    if (PollUntil(entries, clock, deadline) == 0) return false;
  }
  return true;
}

}  // namespace

CuttingProxy::CuttingProxy(HostPort upstream) : upstream_(std::move(upstream)) {
  Result<FileDescriptor> listener = ListenTcp(HostPort{"127.0.0.1", 0}, 64);
  EXPECT_TRUE(listener.ok()) << listener.status().ToString();
  listener_ = std::move(*listener);
  address_ = FormatHostPort(*LocalAddress(listener_));
  thread_ = Thread("test-proxy", [this] { Run(); });
}

CuttingProxy::~CuttingProxy() {
  ended_ = true;
  wake_.Wake();
  thread_.Join();
}

void CuttingProxy::Cut() {
  cut_now_ = true;
  wake_.Wake();
}

CuttingProxy::Recording CuttingProxy::Recorded() const {
  std::lock_guard lock(mutex_);
  return recording_;
}

void CuttingProxy::Run() {
  while (!ended_) {
    std::vector<PollEntry> entries{{wake_.fd(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const auto& pair : pairs_) {
      entries.push_back({pair->client.get(), POLLIN, 0});
      entries.push_back({pair->server.get(), POLLIN, 0});
    }
    PollUntil(entries, clock_, Deadline::Never());
    wake_.Drain();
    if (cut_now_.exchange(false)) {
      cuts_ += static_cast<int>(pairs_.size());
      pairs_.clear();
      continue;
    }
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      if (entries[2 + 2 * i].revents != 0) Forward(*pairs_[i], true);
      if (!pairs_[i]->ended && entries[3 + 2 * i].revents != 0) Forward(*pairs_[i], false);
    }
    std::erase_if(pairs_, [](const auto& pair) { return pair->ended; });
    if (entries[1].revents != 0) Accept();
  }
}

void CuttingProxy::Accept() {
  Result<FileDescriptor> client = AcceptTcp(listener_);
  if (!client.ok() || !client->valid()) return;
  Result<FileDescriptor> server =
      ConnectTcp(upstream_, clock_, Deadline::After(clock_.Now(), kForwardPatience), -1);
  if (!server.ok()) return;
  auto pair = std::make_unique<Pair>();
  pair->client = std::move(*client);
  pair->server = std::move(*server);
  pairs_.push_back(std::move(pair));
}

void CuttingProxy::Forward(Pair& pair, bool from_client) {
  const FileDescriptor& from = from_client ? pair.client : pair.server;
  const FileDescriptor& to = from_client ? pair.server : pair.client;
  char chunk[16384];
  const ssize_t got = ::recv(from.get(), chunk, sizeof chunk, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) {
    pair.ended = true;
    return;
  }
  {
    std::lock_guard lock(mutex_);
    (from_client ? recording_.requests : recording_.answers)
        .append(chunk, static_cast<std::size_t>(got));
  }
  if (!from_client) {
    pair.answered += static_cast<std::uint64_t>(got);
    const std::uint64_t limit = bytes_per_life_;
    if (limit != 0 && pair.answered > limit) {
      ++cuts_;
      pair.ended = true;  // With what was read just now.
      return;
    }
  }
  if (!SendAll(to, std::string_view(chunk, static_cast<std::size_t>(got)), clock_)) {
    pair.ended = true;
  }
}

}  // namespace resilient::store
