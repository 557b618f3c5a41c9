#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "runtime/base/process.h"
#include "store/server/uv_handle.h"

namespace resilient::store {

// Watches processes of the server's own host by pidfd, so that a death is known when it happens.
// Which processes: those with the server's boot id and pid namespace and a known start time; for
// all others the lease decides. Owner: Server. Thread: the loop's.
class ProcessWatch {
 public:
  // `on_exit` is called once per watch, in a later turn of the loop than Add; the watch is over
  // then.
  ProcessWatch(UvLoop& loop, std::function<void(std::uint64_t watch)> on_exit);

  void Add(std::uint64_t watch, const ProcessIdentity& process);
  void Remove(std::uint64_t watch);
  void Clear();
  std::size_t size() const { return watched_.size(); }

 private:
  enum class Look { kWatched, kGone, kCannot };
  Look Open(std::uint64_t watch, const ProcessIdentity& process);
  void OnReadable(std::uint64_t watch);
  void OnGone();

  UvLoop& loop_;
  const std::function<void(std::uint64_t)> on_exit_;
  const ProcessIdentity self_;
  std::map<std::uint64_t, std::unique_ptr<UvReadable>> watched_;
  std::vector<std::uint64_t> gone_;  // Did not exist any more at Add; told by gone_timer_.
  UvTimer gone_timer_;
  bool complained_ = false;
};

}  // namespace resilient::store
