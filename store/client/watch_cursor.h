#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <resilient/store/client.h>

#include "store/core/messages.h"

namespace resilient::store {

// Where a watch stands and what it asks next. It follows the changes; when the store has forgotten
// some of them (or from the beginning) it lists the keys and their values page by page, and then
// applies what has changed between the first page and the last, so that the snapshot is of one
// revision: that from which it follows the changes again. Owner: WatchLine, the simulator. Thread:
// caller-synchronised. Pure.
class WatchCursor {
 public:
  // 0: from a snapshot on.
  WatchCursor(std::string prefix, std::uint64_t from_revision);

  Op Next() const;
  // What the answer to Next brings to tell; nullopt: nothing yet, ask again. An error of the store
  // but kCompacted, and what is no answer to Next (kProtocol), is for the caller; the watch stays
  // where it was.
  Result<std::optional<WatchBatch>> OnReply(Reply reply);

  const std::string& prefix() const { return prefix_; }

 private:
  enum class Phase : std::uint8_t { kListing, kCatchingUp, kFollowing };

  Result<std::optional<WatchBatch>> OnPage(Reply reply);
  Result<std::optional<WatchBatch>> OnChanges(Reply reply);
  Status CheckChanges(const Reply& reply) const;
  WatchBatch TakeSnapshot();

  const std::string prefix_;
  Phase phase_;
  std::uint64_t next_;  // The first revision that was not looked at.

  // While there is no snapshot yet.
  std::map<std::string, std::string> keys_;
  std::string after_;             // The next page begins behind this key.
  std::uint64_t first_page_ = 0;  // The revision of its page; 0: there was none.
  std::uint64_t last_page_ = 0;
};

}  // namespace resilient::store
