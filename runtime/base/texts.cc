#include "runtime/base/texts.h"

#include "runtime/base/log.h"

namespace resilient {

std::string AndMore(std::size_t left_out) {
  return left_out > 0 ? StrCat(" and ", left_out, " more") : std::string();
}

std::string RanksText(const std::vector<int>& ranks) {
  constexpr std::size_t kNamedMax = 8;
  return StrCat(ranks.size() == 1 ? "rank " : "ranks ",
                ListOf(ranks, kNamedMax, [](int rank) { return std::to_string(rank); }));
}

std::string AtCallSite(const std::string& call_site) {
  return call_site.empty() ? std::string() : StrCat(" at ", call_site);
}

std::string CallText(const WaitingCall& call) {
  return StrCat(call.operation.what, " #", call.operation.seq, " of group '", call.group, "'",
                AtCallSite(call.operation.call_site));
}

}  // namespace resilient
