#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <resilient/transports.h>

#include "runtime/base/log_limit.h"
#include "runtime/comm/fabric.h"
#include "runtime/comm/group.h"
#include "runtime/comm/group_port.h"
#include "runtime/comm/knocker.h"
#include "runtime/comm/link_encryption.h"
#include "runtime/comm/switchboard.h"

namespace resilient {

// The body of the comm thread: one poll() over the listener, the incoming connections and the links
// of all groups. Nothing in it blocks. Owner: the fabric. Thread: the comm thread. It ends when the
// goodbyes of all groups have arrived.
class FabricLoop final : public GroupLoop, private HelloRouter {
 public:
  // `requests` outlives the loop. `encryption`: null where options.encrypted is not set.
  FabricLoop(FileDescriptor listener, FabricRequests& requests, const Clock& clock,
             CommunicatorEvents& events, std::uint64_t seed, const CpuFabricOptions& options,
             std::size_t eager_limit, std::unique_ptr<LinkEncryption> encryption);

  void Run() override;

 private:
  // A group that ended here, for peers that ask for it later.
  struct Departed {
    std::string name;
    std::uint64_t generation = 0;
    std::uint64_t attempt = 0;
    std::string secret;
    GroupRanks made;
    std::string name_here;  // NameOf this rank.
    bool has_left = true;   // CommGroup::has_left.
  };

  Routing Route(const Hello& hello, FileDescriptor& socket) override;
  // The hello is of a view that this rank is in, whose groups need not all be known here yet, and
  // its sender does not know the secret of that view.
  bool IsOfNoView(const Hello& hello) const;
  Routing RefuseStranger(const Hello& hello);
  static std::string ReplyOf(const Departed& group, const Hello& hello);
  void TakeRequests();
  // The group that has ended here and that the hello is of; null: there was none.
  const Departed* FindDeparted(const Hello& hello) const;
  // To a knock, where this process was in that world.
  void Answer(const Hello& hello, const FileDescriptor& socket) const;
  void AddGroup(std::shared_ptr<GroupPort> port);
  void RemoveDone();
  void RunCompletions();
  bool Turn();
  void Wait(bool busy);
  CommGroup* Find(const std::string& name, std::uint64_t generation, std::uint64_t attempt) const;

  // Constant.
  FabricRequests& requests_;
  const Clock& clock_;
  // Comm thread.
  LoopContext context_;
  std::uint64_t seed_;
  Switchboard switchboard_;
  Knocker knocker_;
  std::vector<std::unique_ptr<CommGroup>> groups_;
  std::deque<Departed> departed_;
  std::uint64_t newest_generation_ = 0;
  std::uint64_t newest_attempt_ = 0;
  LogLimit wrong_secrets_;
  LogLimit old_generations_;
  bool stopping_ = false;
  Deadline stop_by_ = Deadline::Never();
  std::vector<PollEntry> entries_;
  std::vector<Watch> watches_;
};

}  // namespace resilient
