#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <resilient/communicator.h>

#include "runtime/comm/group_port.h"

namespace resilient {

// Messages of one length between the ranks of a group that NCCL serves, over its group of the CPU
// transport. They come and go whatever the program does meanwhile: the threads of the transports
// read and write them.
//
// Owner: shared by NcclGroup and the operations. Thread: NcclGroup's, but for their completions.
class NcclControl : public std::enable_shared_from_this<NcclControl> {
 public:
  static std::shared_ptr<NcclControl> Make(std::shared_ptr<Communicator> link, std::size_t bytes,
                                           std::shared_ptr<const Doorbell> doorbell);

  Communicator& link() { return *link_; }

  // Begins to listen. Rings for each message.
  void Listen();
  struct Heard {
    int from = -1;
    std::string bytes;
  };
  std::vector<Heard> Take();

  // False: the last one to `peer` is still on its way, and this one is not sent.
  bool Say(int peer, std::string bytes);
  // Nothing that was said is on its way any more.
  bool IsIdle() const;
  // Those to whom nothing can be said, as they have left.
  std::vector<int> Left() const;

 private:
  NcclControl(std::shared_ptr<Communicator> link, std::size_t bytes,
              std::shared_ptr<const Doorbell> doorbell);
  void Receive();

  const std::shared_ptr<Communicator> link_;
  const std::size_t bytes_;
  const std::shared_ptr<const Doorbell> doorbell_;
  mutable std::mutex mutex_;
  std::vector<Heard> heard_;  // Guarded by mutex_.
  bool listens_ = false;      // Guarded by mutex_. A recv is under way.
  std::set<int> busy_;        // Guarded by mutex_.
  std::set<int> left_;        // Guarded by mutex_.
};

}  // namespace resilient
