#include "tests/ranks/store_server_support.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include <gtest/gtest.h>

#include "runtime/base/check.h"
#include "runtime/base/random.h"
#include "store/core/codec.h"

extern char** environ;

namespace resilient::store {
namespace {

// True when `fd` is readable (or at its end) before the deadline.
bool WaitReadable(int fd, Deadline deadline) {
  std::vector<PollEntry> entries = {{fd, POLLIN, 0}};
  return PollUntil(entries, SystemClock(), deadline) > 0;
}

FileDescriptor OpenPidFd(pid_t pid) {
  return FileDescriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// Ours comes first, as the C library takes the first of a name. Settings of the outer world would
// make the tests depend on where they run.
std::vector<std::string> WithEnvironment(std::vector<std::string> environment) {
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (!std::string_view(*variable).starts_with("RESILIENT_")) environment.push_back(*variable);
  }
  return environment;
}

}  // namespace

Instant Now() { return SystemClock().Now(); }

Deadline In(Duration timeout) { return Deadline::After(Now(), timeout); }

ChildProcess::ChildProcess(std::vector<std::string> command, std::vector<std::string> environment,
                           const std::string& errors)
    : errors_(errors.empty() ? memfd_create("stderr", MFD_CLOEXEC)
                             : open(errors.c_str(), O_WRONLY | O_CLOEXEC)) {
  RESILIENT_CHECK(errors_.valid());
  int ends[2];
  RESILIENT_CHECK(pipe2(ends, O_CLOEXEC) == 0);
  output_ = FileDescriptor(ends[0]);
  FileDescriptor write_end(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, write_end.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, errors_.get(), STDERR_FILENO);
  std::vector<std::string> variables = WithEnvironment(std::move(environment));
  const int error = posix_spawn(&pid_, command.front().c_str(), &actions, nullptr,
                                Pointers(command).data(), Pointers(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  RESILIENT_CHECK(error == 0);
  pidfd_ = OpenPidFd(pid_);
}

ChildProcess::~ChildProcess() {
  if (outcome_) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

std::optional<std::string> ChildProcess::ReadLine(Deadline deadline) {
  while (true) {
    if (const std::size_t end = pending_.find('\n'); end != std::string::npos) {
      std::string line = pending_.substr(0, end);
      pending_.erase(0, end + 1);
      return line;
    }
    if (!WaitReadable(output_.get(), deadline)) return std::nullopt;
    char buffer[4096];
    const ssize_t count = read(output_.get(), buffer, sizeof(buffer));
    if (count <= 0) return std::nullopt;
    pending_.append(buffer, static_cast<std::size_t>(count));
  }
}

std::string ChildProcess::ReadAll(Deadline deadline) {
  std::string all;
  while (const auto line = ReadLine(deadline)) all += *line + "\n";
  return all + std::exchange(pending_, {});
}

std::optional<int> ChildProcess::WaitExit(Deadline deadline) {
  if (outcome_) return outcome_;
  if (!WaitReadable(pidfd_.get(), deadline)) return std::nullopt;
  int status = 0;
  waitpid(pid_, &status, 0);
  outcome_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return outcome_;
}

std::string ChildProcess::ErrorText() const {
  const off_t size = lseek(errors_.get(), 0, SEEK_END);
  if (size < 0) return "(its errors go to a pipe)";
  std::string text(static_cast<std::size_t>(size), '\0');
  const ssize_t count = pread(errors_.get(), text.data(), text.size(), 0);
  text.resize(count < 0 ? 0 : static_cast<std::size_t>(count));
  return text;
}

void ChildProcess::Signal(int signal) const { kill(pid_, signal); }

namespace {

std::vector<std::string> StoreCommand(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), RESILIENT_STORE_BINARY);
  return arguments;
}

std::vector<std::string> ServeCommand(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"serve", "--print-address"});
  return StoreCommand(std::move(arguments));
}

}  // namespace

TestServer::TestServer(std::vector<std::string> arguments, const std::string& errors)
    : process_(ServeCommand(std::move(arguments)), {}, errors) {
  const auto line = process_.ReadLine(In(kPatience));
  if (!line) {
    ADD_FAILURE() << "the server did not start: " << process_.ErrorText();
    return;
  }
  const std::size_t space = line->find(' ');
  const Result<HostPort> address = ParseHostPort(line->substr(0, space));
  if (space == std::string::npos || !address.ok()) {
    ADD_FAILURE() << "not an address: " << *line;
    return;
  }
  address_ = *address;
  server_id_ = line->substr(space + 1);
}

CommandOutcome RunCommand(std::vector<std::string> arguments,
                          std::vector<std::string> environment) {
  ChildProcess process(StoreCommand(std::move(arguments)), std::move(environment));
  CommandOutcome outcome;
  outcome.output = process.ReadAll(In(kPatience));
  outcome.exit_code = process.WaitExit(In(kPatience));
  outcome.errors = process.ErrorText();
  return outcome;
}

Sleeper::Sleeper() {
  // Not fork: the child must hold none of this process's sockets.
  char program[] = "/bin/sh";
  char option[] = "-c";
  char script[] = "kill -STOP $$";
  char* arguments[] = {program, option, script, nullptr};
  RESILIENT_CHECK(posix_spawn(&pid_, program, nullptr, nullptr, arguments, environ) == 0);
  identity_ = ThisProcess();
  identity_.pid = pid_;
  identity_.start_time = StartTimeOf(pid_);
}

Sleeper::~Sleeper() {
  Kill();
  waitpid(pid_, nullptr, 0);
}

void Sleeper::Kill() { kill(pid_, SIGKILL); }

RawClient::RawClient(const HostPort& address) {
  Result<FileDescriptor> socket = ConnectTcp(address, SystemClock(), In(kPatience), -1);
  if (!socket.ok()) {
    ADD_FAILURE() << socket.status().ToString();
    ended_ = true;
    return;
  }
  socket_ = std::move(*socket);
}

void RawClient::ShrinkReceiveBuffer() {
  constexpr int kBytes = 32 << 10;
  EXPECT_EQ(setsockopt(socket_.get(), SOL_SOCKET, SO_RCVBUF, &kBytes, sizeof kBytes), 0);
}

bool RawClient::SendBytes(std::string_view bytes) {
  const Deadline deadline = In(kPatience);
  while (!bytes.empty()) {
    const ssize_t sent = send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(sent));
      continue;
    }
    if (errno != EAGAIN && errno != EINTR) return false;
    std::vector<PollEntry> entries = {{socket_.get(), POLLOUT, 0}};
    if (PollUntil(entries, SystemClock(), deadline) == 0) return false;
  }
  return true;
}

bool RawClient::Send(const Request& request) {
  return SendBytes(EncodeFrame(EncodeRequest(request)));
}

bool RawClient::SendOp(Op op, std::uint64_t scope) {
  Request request;
  request.seq = next_seq_++;
  request.scope = scope;
  request.op = std::move(op);
  return Send(request);
}

bool RawClient::FillFrom(Deadline deadline) {
  if (ended_ || !WaitReadable(socket_.get(), deadline)) return false;
  std::string buffer(256u << 10, '\0');
  const ssize_t count = recv(socket_.get(), buffer.data(), buffer.size(), 0);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (count <= 0) {
    ended_ = true;
    return false;
  }
  const Status fed =
      splitter_.Feed(std::string_view(buffer.data(), static_cast<std::size_t>(count)));
  EXPECT_TRUE(fed.ok()) << fed.ToString();
  return fed.ok();
}

std::optional<ServerMessage> RawClient::Receive(Deadline deadline) {
  while (!splitter_.HasFrame()) {
    if (!FillFrom(deadline)) return std::nullopt;
  }
  Result<ServerMessage> message = DecodeServerMessage(splitter_.TakeFrame());
  if (message.ok()) return std::move(*message);
  ADD_FAILURE() << message.status().ToString();
  return std::nullopt;
}

bool RawClient::ClosedBy(Deadline deadline) {
  while (!ended_) {
    if (!FillFrom(deadline) && !ended_) return false;
    while (splitter_.HasFrame()) splitter_.TakeFrame();
  }
  return true;
}

bool RawClient::HasAnswer() const {
  pollfd entry = {.fd = socket_.get(), .events = POLLIN, .revents = 0};
  return poll(&entry, 1, 0) == 1;
}

void RawClient::SendHello(const Hello& hello) {
  Request request;
  request.op = hello;
  SendBytes(EncodePreamble() + EncodeFrame(EncodeRequest(request)));
}

std::optional<Reply> RawClient::SayHello(const Hello& hello) {
  SendHello(hello);
  return Await<Reply>(In(kPatience));
}

std::optional<Reply> RawClient::Call(Op op, std::uint64_t scope) {
  if (!SendOp(std::move(op), scope)) return std::nullopt;
  const std::uint64_t seq = last_seq();
  while (auto reply = Await<Reply>(In(kPatience))) {
    if (reply->seq == seq) return reply;
  }
  return std::nullopt;
}

Hello MakeTestHello(Role role, std::string job) {
  Hello hello;
  hello.job = std::move(job);
  hello.session = RandomHexId();
  hello.incarnation = RandomHexId();
  hello.role = role;
  hello.process = ThisProcess();
  return hello;
}

JoinRequest MakeJoin(int rank, int world_size) {
  JoinRequest join;
  join.rank = rank;
  join.world_size = world_size;
  join.endpoint = "endpoint";
  join.join_timeout = kPatience;
  return join;
}

}  // namespace resilient::store
