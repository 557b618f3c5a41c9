#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/clock.h>
#include <resilient/rendezvous.h>
#include <resilient/status.h>

#include "runtime/net/frame.h"
#include "runtime/net/socket.h"
#include "store/core/messages.h"

// What the tests of the store server share: the real binary as a child process, a client made of a
// bare socket and the codec, and a process whose only purpose is to die. Nothing here sleeps: every
// wait is for an event, with a bound.
namespace resilient::store {

inline constexpr Duration kPatience = std::chrono::seconds(20);

Instant Now();
// A deadline `timeout` from now.
Deadline In(Duration timeout);

// A child process with its standard output in a pipe and its errors in a file of its own, or in the
// one at that path. Killed and reaped by the destructor.
class ChildProcess {
 public:
  explicit ChildProcess(std::vector<std::string> command, std::vector<std::string> environment = {},
                        const std::string& errors = "");
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  // Up to the next newline, without it; nullopt at the end of the output or the deadline.
  std::optional<std::string> ReadLine(Deadline deadline);
  // Everything until the output ends, which is when its last holder has exited.
  std::string ReadAll(Deadline deadline);
  // Exit code, or minus the signal; nullopt while it runs.
  std::optional<int> WaitExit(Deadline deadline);
  std::string ErrorText() const;
  void Signal(int signal) const;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  FileDescriptor pidfd_;
  FileDescriptor output_;
  FileDescriptor errors_;
  std::string pending_;
  std::optional<int> outcome_;
};

// resilient-store serve, listening.
class TestServer {
 public:
  // `errors`: as of ChildProcess.
  explicit TestServer(std::vector<std::string> arguments = {}, const std::string& errors = "");

  ChildProcess& process() { return process_; }
  const HostPort& address() const { return address_; }
  std::string address_text() const { return FormatHostPort(address_); }
  const std::string& server_id() const { return server_id_; }

 private:
  ChildProcess process_;
  HostPort address_;
  std::string server_id_;
};

// resilient-store with these arguments, run to its end.
struct CommandOutcome {
  std::optional<int> exit_code;
  std::string output;
  std::string errors;
};
CommandOutcome RunCommand(std::vector<std::string> arguments,
                          std::vector<std::string> environment = {});

// A process that waits to be killed.
class Sleeper {
 public:
  Sleeper();
  ~Sleeper();
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  ProcessIdentity identity() const { return identity_; }
  void Kill();  // SIGKILL; a zombie afterwards, as a dead worker of a busy launcher.

 private:
  pid_t pid_ = -1;
  ProcessIdentity identity_;
};

// One connection, driven by hand.
class RawClient {
 public:
  explicit RawClient(const HostPort& address);
  explicit RawClient(FileDescriptor connected) : socket_(std::move(connected)) {}

  // From now on the kernel keeps little that is not read.
  void ShrinkReceiveBuffer();
  // As they are; false when the connection is broken.
  bool SendBytes(std::string_view bytes);
  bool Send(const Request& request);
  // Numbers the request.
  bool SendOp(Op op, std::uint64_t scope = 0);

  // The next message; nullopt at the deadline or when the connection has ended.
  std::optional<ServerMessage> Receive(Deadline deadline);
  // True when the server closes before the deadline. What comes before is dropped.
  bool ClosedBy(Deadline deadline);
  // Reads until an event or reply of this type comes; others are dropped.
  template <typename Message>
  std::optional<Message> Await(Deadline deadline) {
    while (auto message = Receive(deadline)) {
      if constexpr (std::is_same_v<Message, Reply>) {
        if (auto* reply = std::get_if<Reply>(&*message)) return *reply;
      } else if (auto* event = std::get_if<Event>(&*message)) {
        if (auto* wanted = std::get_if<Message>(event)) return *wanted;
      }
    }
    return std::nullopt;
  }

  // Preamble and Hello; the server's Welcome.
  std::optional<Reply> SayHello(const Hello& hello);
  void SendHello(const Hello& hello);
  // Sends and waits for the reply.
  std::optional<Reply> Call(Op op, std::uint64_t scope = 0);

  // There are bytes to be received, or the end.
  bool HasAnswer() const;
  bool ended() const { return ended_; }
  std::uint64_t last_seq() const { return next_seq_ - 1; }
  // For a connection that takes a session up again: its numbers go on.
  void GoOnAfter(std::uint64_t seq) { next_seq_ = seq + 1; }
  void Close() { socket_.Reset(); }

 private:
  bool FillFrom(Deadline deadline);

  FileDescriptor socket_;
  FrameSplitter splitter_{kMaxFrameBody};
  std::uint64_t next_seq_ = 1;
  bool ended_ = false;
};

// For a membership line whose events do not matter to the test.
class IgnoredEvents final : public RendezvousEvents {
 public:
  void OnView(const View&) override {}
  void OnRunning(std::uint64_t) override {}
  void OnFence(const Fence&) override {}
  void OnJoinRefused(std::uint64_t, const Status&) override {}
  void OnSessionLost(const Status&) override {}
  void OnHeld(Instant) override {}
};

// A Hello of a new session of this process.
Hello MakeTestHello(Role role, std::string job = "job");
JoinRequest MakeJoin(int rank, int world_size);

}  // namespace resilient::store
