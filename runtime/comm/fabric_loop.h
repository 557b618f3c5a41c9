#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/comm/group.h"
#include "runtime/comm/group_port.h"
#include "runtime/comm/switchboard.h"

namespace resilient {

// The body of the comm thread: one poll() over the listener, the incoming connections and the links
// of all groups. Nothing in it blocks. Owner: CpuFabric. Thread: Create and RequestStop are
// thread-safe, the rest runs on the comm thread.
class FabricLoop final : private HelloRouter {
 public:
  FabricLoop(FileDescriptor listener, std::shared_ptr<Doorbell> doorbell, const Clock& clock,
             CommunicatorEvents& events, std::uint64_t seed, std::size_t shm_limit);

  // False once RequestStop was called.
  bool Create(std::shared_ptr<GroupPort> port);
  // All groups leave; Run returns when their goodbyes have arrived, at the latest at `deadline`.
  void RequestStop(Deadline deadline);

  void Run();

 private:
  // A group that ended here, for peers that ask for it later.
  struct Departed {
    std::string name;
    std::uint64_t generation = 0;
    std::uint64_t attempt = 0;
    std::string secret;
  };

  Routing Route(const Hello& hello, FileDescriptor& socket) override;
  void TakeRequests();
  void AddGroup(std::shared_ptr<GroupPort> port);
  void RemoveDone();
  void RunCompletions();
  bool Turn();
  void Wait(bool busy);
  CommGroup* Find(const std::string& name, std::uint64_t generation, std::uint64_t attempt);

  // Constant.
  const std::shared_ptr<Doorbell> doorbell_;
  const Clock& clock_;
  // Comm thread.
  LoopContext context_;
  std::uint64_t seed_;
  Switchboard switchboard_;
  std::vector<std::unique_ptr<CommGroup>> groups_;
  std::deque<Departed> departed_;
  std::uint64_t newest_generation_ = 0;
  std::uint64_t newest_attempt_ = 0;
  bool stopping_ = false;
  Deadline stop_by_ = Deadline::Never();
  std::vector<PollEntry> entries_;
  std::vector<Watch> watches_;
  // Guarded by mutex_.
  std::mutex mutex_;
  std::vector<std::shared_ptr<GroupPort>> created_;
  bool stop_requested_ = false;
  Deadline requested_deadline_ = Deadline::Never();
};

}  // namespace resilient
