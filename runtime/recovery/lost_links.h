#pragma once

#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <resilient/rendezvous.h>

namespace resilient::recovery {

// An operation waits for a rank from which nothing more comes. Thread: value type.
struct Need {
  int rank = -1;     // Global.
  std::string what;  // The operation: "all_reduce(float32[4], sum) #3 of group 'world'".
};

// What `calls` wait for from ranks that are `gone`, each rank once. A recv from any rank needs one
// of them only when it can come from no other. Pure.
std::vector<Need> NeedsOf(const std::vector<WaitingCall>& calls,
                          const std::function<bool(const std::string& group, int rank)>& gone);

// Links of one generation that have ended without a goodbye. Such an end says nothing of the peer:
// its goodbye may have been lost on its way. What it says is that nothing more comes from there; so
// an operation that waits for it needs a rank that has left, if it has.
// Pure. Owner: SessionImpl. Thread: confined to the control thread.
class LostLinks {
 public:
  void Clear() { links_.clear(); }
  // The link of `group` to the global rank `rank`.
  void Note(const std::string& group, int rank) { links_.emplace(group, rank); }
  // What `calls` wait for over such links, as NeedsOf.
  std::vector<Need> NeededBy(const std::vector<WaitingCall>& calls) const;

 private:
  std::set<std::pair<std::string, int>> links_;
};

}  // namespace resilient::recovery
