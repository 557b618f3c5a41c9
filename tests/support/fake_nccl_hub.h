#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/fake_nccl_link.h"
#include "tests/support/fake_nccl_world.h"

namespace resilient::testing {

// Where the ranks of all unique ids of this process meet: one connection for each rank of each.
// Owner: the socket meetings, whose thread polls. Thread: caller-synchronised; nothing blocks.
class NcclHub {
 public:
  // Listens at a name of the abstract namespace that nobody else has.
  explicit NcclHub(NcclWorld::OnMisuse on_misuse);

  const std::string& name() const { return name_; }
  std::uint64_t NewWorld() { return ++worlds_made_; }
  void AddEntries(std::vector<PollEntry>& entries) const;
  // Does what can be done.
  void Serve();
  bool IsFlushed(std::uint64_t world) const;

 private:
  struct OpenCall {
    PostedCallPtr posted;
    std::vector<std::byte> from;
    std::vector<std::byte> to;
  };
  struct Member {
    explicit Member(FileDescriptor socket) : link(std::move(socket)) {}

    NcclLink link;
    int rank = -1;  // Until it joins.
    bool of_hub = false;
    bool left = false;
    std::uint64_t world = 0;
    std::map<std::uint64_t, OpenCall> calls;  // By ticket.
  };
  struct Group {
    explicit Group(NcclWorld::OnMisuse on_misuse) : world(std::move(on_misuse)) {}

    NcclWorld world;
    bool lost = false;
    int ranks_of_hub = 0;
  };

  void Handle(Member& member, const NcclMessage& message, const std::byte* payload);
  void Join(Member& member, const NcclMessage& message);
  void Post(Member& member, const NcclMessage& message, const std::byte* payload);
  void Leave(Member& member);
  void FinishCalls(std::uint64_t world);
  void Broadcast(std::uint64_t world, NcclMessage::Type type);
  static void GiveUpAll(Member& member);

  const NcclWorld::OnMisuse on_misuse_;
  std::string name_;
  FileDescriptor listener_;
  std::uint64_t worlds_made_ = 0;
  std::map<std::uint64_t, Group> groups_;
  std::list<Member> members_;
};

}  // namespace resilient::testing
