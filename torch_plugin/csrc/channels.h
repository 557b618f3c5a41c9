#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <resilient/nccl_options.h>
#include <resilient/session.h>

#include "torch_plugin/csrc/callback_queue.h"

namespace resilient::plugin {

// Where a collective runs, and where the callbacks of its future do. Thread: value type.
struct Channel {
  std::shared_ptr<Group> group;
  std::shared_ptr<CallbackQueue> callbacks;
};

// The communicators of one process group. What the program starts runs on the first one. What a
// callback starts runs on one of its own, for the pair of this group and the callback's queue:
// callbacks run beside the program, so on a common one chance would decide which collectives of two
// ranks belong together. It is made by the first collective that needs it, and again after a
// rebuild; nobody waits for anybody. Its callbacks have a queue in turn, so a callback may wait for
// what it has started.
//
// Owner: ResilientBackend, and those that it gives way to. Thread: thread-safe. Lifetime: Close
// says goodbye to the peers.
class Channels {
 public:
  // How many callbacks may be nested: each that waits needs a thread, and each communicator links.
  static constexpr int kDepthMax = 8;

  // `ranks`: global ranks in group order; empty: the world. `made_at`: where in the program.
  Channels(const std::shared_ptr<SessionContext>& context, const std::shared_ptr<Group>& group,
           std::vector<int> ranks, NcclOptions nccl, std::string made_at);

  const Channel& main() const { return main_; }

  // Of a collective that the calling thread starts. kFailedPrecondition: its callback is nested
  // kDepthMax deep, or was added before the world was rebuilt. Otherwise as Session::CreateGroup.
  Result<Channel> OfCollective();

  void Close();

 private:
  Result<Channel> Make(const CallbackQueue& caller, std::uint64_t epoch);
  void CloseMadeLocked();

  const std::weak_ptr<SessionContext> context_;
  const Channel main_;
  const std::vector<int> ranks_;  // Empty: the world's.
  const NcclOptions nccl_;
  const std::string made_at_;
  std::mutex mutex_;
  std::uint64_t epoch_ = 0;              // Guarded by mutex_. In which made_ were made.
  std::map<std::string, Channel> made_;  // Guarded by mutex_. By the name of the caller's queue.
};

}  // namespace resilient::plugin
