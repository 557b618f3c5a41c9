#include "runtime/recovery/lost_links.h"

#include <algorithm>

#include "runtime/base/log.h"

namespace resilient::recovery {

std::vector<LostLinks::Need> LostLinks::NeededBy(const std::vector<WaitingCall>& calls) const {
  std::vector<Need> needs;
  std::set<int> named;
  for (const WaitingCall& call : calls) {
    const WaitingOperation& operation = call.operation;
    const auto lost = [&](int rank) { return links_.count({call.group, rank}) != 0; };
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

}  // namespace resilient::recovery
