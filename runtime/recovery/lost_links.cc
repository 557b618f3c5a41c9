#include "runtime/recovery/lost_links.h"

#include <algorithm>

#include "runtime/base/log.h"

namespace resilient::recovery {

std::vector<Need> NeedsOf(const std::vector<WaitingCall>& calls,
                          const std::function<bool(const std::string& group, int rank)>& gone) {
  std::vector<Need> needs;
  std::set<int> named;
  for (const WaitingCall& call : calls) {
    const WaitingOperation& operation = call.operation;
    const auto lost = [&](int rank) { return gone(call.group, rank); };
    if (operation.any && !std::ranges::all_of(operation.missing, lost)) continue;
    for (const std::vector<int>* awaited : {&operation.missing, &operation.silent}) {
      for (const int rank : *awaited) {
        if (!lost(rank) || !named.insert(rank).second) continue;
        needs.push_back(
            {rank, StrCat(operation.what, " #", operation.seq, " of group '", call.group, "'")});
      }
    }
  }
  return needs;
}

std::vector<Need> LostLinks::NeededBy(const std::vector<WaitingCall>& calls) const {
  return NeedsOf(calls, [this](const std::string& group, int rank) {
    return links_.count({group, rank}) != 0;
  });
}

}  // namespace resilient::recovery
