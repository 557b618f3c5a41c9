#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <gtest/gtest.h>
#include <resilient/clock.h>

#include "runtime/net/frame.h"
#include "runtime/net/socket.h"
#include "store/core/codec.h"
#include "store/core/messages.h"

namespace resilient::store {

// The far longest that a test waits for something that must happen.
inline constexpr Duration kPatience = std::chrono::seconds(20);

// One accepted connection, driven by the test step by step. Thread: the test's.
class ScriptedConnection {
 public:
  ScriptedConnection(FileDescriptor socket, const Clock& clock)
      : clock_(clock), socket_(std::move(socket)) {}

  // The next request; nullopt when the client closed. A test failure when nothing comes.
  std::optional<Request> Read(Duration patience = kPatience) {
    const Deadline deadline = Deadline::After(clock_.Now(), patience);
    while (!splitter_.HasFrame()) {
      std::vector<PollEntry> entries{{socket_.get(), POLLIN, 0}};
      if (PollUntil(entries, clock_, deadline) == 0) {
        ADD_FAILURE() << "no request came";
        return std::nullopt;
      }
      char chunk[65536];
      const ssize_t got = ::recv(socket_.get(), chunk, sizeof chunk, 0);
      if (got < 0 && errno == EAGAIN) continue;
      if (got <= 0) return std::nullopt;
      EXPECT_TRUE(splitter_.Feed(std::string_view(chunk, static_cast<std::size_t>(got))).ok());
    }
    Result<Request> request = DecodeRequest(splitter_.TakeFrame());
    EXPECT_TRUE(request.ok()) << request.status().ToString();
    return request.ok() ? std::optional<Request>(std::move(*request)) : std::nullopt;
  }

  // The next request whose operation is an `Wanted`; others (heartbeats) are passed over.
  template <typename Wanted>
  std::optional<Request> ReadOp() {
    while (true) {
      std::optional<Request> request = Read();
      if (!request || std::holds_alternative<Wanted>(request->op)) return request;
    }
  }

  void SendBytes(std::string_view bytes) {
    while (!bytes.empty()) {
      std::vector<PollEntry> entries{{socket_.get(), POLLOUT, 0}};
      ASSERT_EQ(PollUntil(entries, clock_, Deadline::After(clock_.Now(), kPatience)), 1);
      const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno == EAGAIN) continue;
      ASSERT_GT(sent, 0);
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
  }
  void Send(const ServerMessage& message) { SendBytes(EncodeFrame(EncodeServerMessage(message))); }
  void SendReply(Reply reply) { Send(ServerMessage(std::move(reply))); }
  void SendEvent(Event event) { Send(ServerMessage(std::move(event))); }

  // Reads the Hello and answers it.
  Hello Greet(const Welcome& welcome) {
    std::optional<Request> request = Read();
    const Hello* hello = request ? std::get_if<Hello>(&request->op) : nullptr;
    if (hello == nullptr) {
      ADD_FAILURE() << "no Hello came";
      return {};
    }
    Reply reply;
    reply.welcome = std::make_shared<const Welcome>(welcome);
    SendBytes(EncodePreamble());
    SendReply(std::move(reply));
    return *hello;
  }

  // Reads the Hello and answers it with an error.
  void Refuse(const Status& why) {
    const std::optional<Request> hello = Read();
    SendBytes(EncodePreamble());
    Reply reply;
    reply.seq = hello ? hello->seq : 0;
    reply.status = why;
    SendReply(std::move(reply));
  }

  // The client has closed its end. What it sent before may wait to be read.
  bool HasEnded() const {
    pollfd entry{.fd = socket_.get(), .events = POLLRDHUP, .revents = 0};
    return poll(&entry, 1, 0) == 1;
  }
  // The client closes its end, after whatever it still sends.
  bool SeesEnd() {
    while (Read()) {
    }
    return !::testing::Test::HasFailure();
  }

 private:
  const Clock& clock_;
  FileDescriptor socket_;
  FrameSplitter splitter_{kMaxFrameBody};
};

// A store made of a listener and the test's script. Thread: the test's.
class ScriptedServer {
 public:
  ScriptedServer() {
    Result<FileDescriptor> listener = ListenTcp(HostPort{"127.0.0.1", 0}, 16);
    EXPECT_TRUE(listener.ok()) << listener.status().ToString();
    listener_ = std::move(*listener);
    address_ = FormatHostPort(*LocalAddress(listener_));
  }

  const std::string& address() const { return address_; }

  ScriptedConnection Accept() {
    const Deadline deadline = Deadline::After(clock_.Now(), kPatience);
    while (true) {
      std::vector<PollEntry> entries{{listener_.get(), POLLIN, 0}};
      if (PollUntil(entries, clock_, deadline) == 0) {
        ADD_FAILURE() << "no connection came";
        return ScriptedConnection(FileDescriptor(), clock_);
      }
      Result<FileDescriptor> socket = AcceptTcp(listener_);
      if (socket.ok() && socket->valid()) return ScriptedConnection(std::move(*socket), clock_);
    }
  }

  void StopListening() { listener_.Reset(); }

  const Clock& clock() const { return clock_; }

 private:
  SystemClock clock_;
  FileDescriptor listener_;
  std::string address_;
};

inline Welcome TestWelcome() {
  Welcome welcome;
  welcome.server = "server-1";
  welcome.version = 1;
  welcome.lease_ttl_ms = 300000;  // Beats do not disturb tests that are not about them.
  welcome.heartbeat_interval_ms = 60000;
  welcome.key_bytes_max = kKeyBytesMax;
  welcome.value_bytes_max = kValueBytesMax;
  return welcome;
}

inline Welcome KnownWelcome() {
  Welcome welcome = TestWelcome();
  welcome.session_known = true;
  return welcome;
}

inline Reply ReplyTo(const std::optional<Request>& request, Status status = {}) {
  Reply reply;
  reply.seq = request ? request->seq : 0;
  reply.status = std::move(status);
  return reply;
}

inline Reply NumberReply(const std::optional<Request>& request, std::int64_t number) {
  Reply reply = ReplyTo(request);
  reply.number = number;
  return reply;
}

inline Reply ValueReply(const std::optional<Request>& request, std::string value) {
  Reply reply = ReplyTo(request);
  reply.value = std::move(value);
  return reply;
}

inline Reply ValuesReply(const std::optional<Request>& request, std::vector<std::string> values) {
  Reply reply = ReplyTo(request);
  reply.values = std::move(values);
  return reply;
}

}  // namespace resilient::store
