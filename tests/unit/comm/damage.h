#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <deque>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <resilient/clock.h>

#include "runtime/net/socket.h"

namespace resilient::testing {

// What damage does to a byte. No field of a header is valid with this bit the other way round.
inline constexpr std::byte kFlip{0x40};

// Stands before a listener and flips byte number `at` of what each connection sends to it; all else
// passes as it is. Thread: runs one of its own.
class DamagingProxy {
 public:
  DamagingProxy(const std::string& target, std::size_t at) : target_(target), at_(at) {
    auto listener = ListenTcp({.host = "127.0.0.1", .port = 0}, 16);
    EXPECT_TRUE(listener.ok()) << listener.status().ToString();
    listener_ = std::move(*listener);
    thread_ = std::thread([this] { Body(); });
  }
  ~DamagingProxy() {
    stop_.store(true);
    wake_.Wake();
    thread_.join();
  }
  std::string address() const { return FormatHostPort(*LocalAddress(listener_)); }
  int flips() const { return flips_.load(); }

 private:
  struct Connection {
    FileDescriptor client, server;
    std::size_t passed = 0;  // From the client.
    bool client_ended = false, server_ended = false;
  };

  void Body() {
    while (!stop_.load()) {
      std::vector<PollEntry> entries = {{.fd = wake_.fd(), .events = POLLIN},
                                        {.fd = listener_.get(), .events = POLLIN}};
      for (const Connection& one : connections_) {
        if (!one.client_ended) entries.push_back({.fd = one.client.get(), .events = POLLIN});
        if (!one.server_ended) entries.push_back({.fd = one.server.get(), .events = POLLIN});
      }
      PollUntil(entries, clock_, Deadline::Never());
      if (auto client = AcceptTcp(listener_); client.ok() && client->valid()) {
        auto server = ConnectTcp(*ParseHostPort(target_), clock_, Deadline::Never(), wake_.fd());
        if (server.ok()) connections_.push_back({std::move(*client), std::move(*server)});
      }
      for (Connection& one : connections_) {
        Pass(one.client, one.server, &one.client_ended, &one.passed);
        Pass(one.server, one.client, &one.server_ended, nullptr);
      }
    }
  }
  void Pass(const FileDescriptor& from, const FileDescriptor& to, bool* ended,
            std::size_t* passed) {
    if (*ended) return;
    std::array<std::byte, 16u << 10> bytes;
    const ssize_t n = recv(from.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    *ended = n <= 0;
    if (*ended) {
      shutdown(to.get(), SHUT_WR);
      return;
    }
    const auto size = static_cast<std::size_t>(n);
    if (passed != nullptr) {
      if (at_ >= *passed && at_ - *passed < size) {
        bytes[at_ - *passed] ^= kFlip;
        ++flips_;
      }
      *passed += size;
    }
    for (std::size_t sent = 0; sent < size && !stop_.load();) {
      const ssize_t m = send(to.get(), bytes.data() + sent, size - sent, MSG_NOSIGNAL);
      if (m >= 0) {
        sent += static_cast<std::size_t>(m);
        continue;
      }
      if (errno != EAGAIN && errno != EINTR) return;
      std::vector<PollEntry> room = {{.fd = to.get(), .events = POLLOUT},
                                     {.fd = wake_.fd(), .events = POLLIN}};
      PollUntil(room, clock_, Deadline::Never());
    }
  }

  const std::string target_;
  const std::size_t at_;
  SystemClock clock_;
  WakeFd wake_;
  FileDescriptor listener_;
  std::deque<Connection> connections_;
  std::atomic<bool> stop_ = false;
  std::atomic<int> flips_ = 0;
  std::thread thread_;
};

// As memory that fails does, in no order with who reads it.
__attribute__((no_sanitize("thread"))) inline void FlipUnseen(unsigned char* byte) {
  *byte = static_cast<unsigned char>(*byte ^ static_cast<unsigned char>(kFlip));
}

// Flips a byte of each segment of shared memory that this process has mapped. Returns how many
// there are.
inline int DamageSegments(const std::set<std::size_t>& offsets) {
  std::ifstream maps("/proc/self/maps");
  std::set<std::string> seen;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:resilient") == std::string::npos) continue;
    // "begin-end rw-s offset device inode path": one of the mappings of each segment.
    std::istringstream fields(line);
    std::string range, mode, offset, device, inode;
    fields >> range >> mode >> offset >> device >> inode;
    if (!seen.insert(inode).second) continue;
    auto* memory = reinterpret_cast<unsigned char*>(std::stoull(range, nullptr, 16));
    const std::size_t end = std::stoull(range.substr(range.find('-') + 1), nullptr, 16);
    for (const std::size_t at : offsets) {
      if (memory + at < reinterpret_cast<unsigned char*>(end)) FlipUnseen(memory + at);
    }
  }
  return static_cast<int>(seen.size());
}

}  // namespace resilient::testing
