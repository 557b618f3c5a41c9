// The store's own client as a program that a script drives, so that a test can put clients into
// network namespaces, stop them and shift their clocks without Python in the process:
//   client_shell ADDRESS[,ADDRESS...] JOB SECONDS
// Each line of the input is a command, answered by a line "done ..." or "failed CODE TEXT"; none
// takes longer than SECONDS:
//   set KEY VALUE | get KEY | await KEY | add KEY AMOUNT | fill PREFIX COUNT | join RANK SIZE |
//   leave
// What the membership tells comes as lines "event ..." in between. It ends with its input.
// CLIENT_TOKEN_FILE: with the token that the store asks for.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <resilient/clock.h>
#include <resilient/rendezvous.h>
#include <resilient/settings.h>
#include <resilient/status.h>
#include <resilient/store/client.h>

#include "runtime/base/log.h"

namespace resilient::store {
namespace {

// Thread: thread-safe.
void Say(const std::string& line) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

// Tells what it hears, and is ready as soon as there is a view. Owner: main. Thread: see
// RendezvousEvents.
class Listener final : public RendezvousEvents {
 public:
  explicit Listener(Rendezvous& rendezvous) : rendezvous_(rendezvous) {}
  void OnView(const View& view) override {
    Say(StrCat("event view ", view.generation));
    rendezvous_.Ready(view.generation);
  }
  void OnRunning(std::uint64_t generation) override { Say(StrCat("event running ", generation)); }
  void OnFence(const Fence& fence) override {
    Say(StrCat("event fence ", fence.generation, " ", fence.cause.ToString()));
  }
  void OnJoinRefused(std::uint64_t, const Status& why) override {
    Say("event refused " + why.ToString());
  }
  void OnSessionLost(const Status& why) override { Say("event lost " + why.ToString()); }
  void OnHeld(Instant) override {}  // The log has it.

 private:
  Rendezvous& rendezvous_;
};

// Owner: main. Thread: caller-synchronised.
class Shell {
 public:
  Shell(ConnectOptions options, Duration patience)
      : options_(std::move(options)), patience_(patience) {
    options_.session = NewSessionId();
  }
  ~Shell() {
    if (rendezvous_) rendezvous_->Close(Soon());
    if (client_) client_->Close();
  }
  Shell(const Shell&) = delete;
  Shell& operator=(const Shell&) = delete;

  Status Connect() {
    Result<std::shared_ptr<Client>> client = store::Connect(options_, {}, clock_, Soon());
    if (client.ok()) client_ = std::move(*client);
    return client.status();
  }

  Result<std::string> Do(const std::string& line) {
    std::istringstream words(line);
    std::string command;
    std::string first;
    std::string second;
    words >> command >> first >> second;
    Client::Call call;
    call.deadline = Soon();
    if (command == "set") return Empty(client_->Set(first, second, call));
    if (command == "get") return client_->Get(first, false, call);
    if (command == "await") return client_->Get(first, true, call);
    if (command == "fill") return Empty(Fill(first, std::atoi(second.c_str()), call));
    if (command == "add") {
      const Result<std::int64_t> sum = client_->Add(first, std::atoll(second.c_str()), call);
      return sum.ok() ? Result<std::string>(StrCat(*sum)) : sum.status();
    }
    if (command == "join") return Empty(Join(std::atoi(first.c_str()), std::atoi(second.c_str())));
    if (command == "leave" && rendezvous_) {
      rendezvous_->Close(Soon());
      return std::string();
    }
    return Status(StatusCode::kInvalidArgument, "what is '" + line + "'?");
  }

 private:
  static Result<std::string> Empty(const Status& status) {
    return status.ok() ? Result<std::string>(std::string()) : status;
  }
  Deadline Soon() const { return Deadline::After(clock_.Now(), patience_); }

  // So many keys that it takes a while to read them.
  Status Fill(const std::string& prefix, int count, const Client::Call& call) {
    constexpr int kKeysOfOneCall = 10'000;
    for (int done = 0; done < count;) {
      std::vector<std::string> keys;
      for (int i = 0; i < kKeysOfOneCall && done < count; ++i) {
        keys.push_back(StrCat(prefix, done++));
      }
      std::vector<std::string> values(keys.size(), "value");
      RESILIENT_RETURN_IF_ERROR(client_->MultiSet(keys, std::move(values), call));
    }
    return {};
  }

  Status Join(int rank, int size) {
    rendezvous_ = MakeRendezvous(options_, {}, clock_);
    listener_ = std::make_unique<Listener>(*rendezvous_);
    if (Status started = rendezvous_->Start(*listener_, Soon()); !started.ok()) return started;
    JoinRequest request;
    request.rank = rank;
    request.world_size = size;
    request.join_timeout = patience_;
    rendezvous_->Join(request);
    return {};
  }

  const SystemClock clock_;
  ConnectOptions options_;
  const Duration patience_;
  std::shared_ptr<Client> client_;
  std::unique_ptr<Listener> listener_;  // Outlives the rendezvous.
  std::unique_ptr<Rendezvous> rendezvous_;
};

std::vector<std::string> Split(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> parts;
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

int Run(const std::string& addresses, const std::string& job, int seconds) {
  ConnectOptions options;
  options.addresses = Split(addresses);
  options.job = job;
  if (const char* const file = std::getenv("CLIENT_TOKEN_FILE")) options.token_file = file;
  Shell shell(options, std::chrono::seconds(seconds));
  const Status connected = shell.Connect();
  if (!connected.ok()) {
    Say("failed " + connected.ToString());
    return 1;
  }
  Say("done");
  for (std::string line; std::getline(std::cin, line);) {
    const Result<std::string> answer = shell.Do(line);
    Say(answer.ok() ? "done " + *answer : "failed " + answer.status().ToString());
  }
  return 0;
}

}  // namespace
}  // namespace resilient::store

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: client_shell ADDRESS[,ADDRESS...] JOB SECONDS\n");
    return 2;
  }
  resilient::SetLogTag("client");
  resilient::SetLogLevel(resilient::LogLevel::kInfo);
  return resilient::store::Run(argv[1], argv[2], std::atoi(argv[3]));
}
