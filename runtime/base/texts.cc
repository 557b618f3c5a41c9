#include "runtime/base/texts.h"

#include "runtime/base/log.h"

namespace resilient {

std::int64_t WholeSeconds(Duration duration) {
  return std::chrono::duration_cast<std::chrono::seconds>(duration).count();
}

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

std::string OtherRanksText(const std::string& group, std::uint64_t generation,
                           const std::string& one, const GroupRanks& of_one,
                           const std::string& other, const GroupRanks& of_other) {
  return StrCat(
      one, " has made group '", group, "' of ranks [", of_one.text, "]", AtCallSite(of_one.made_at),
      " where ", other, " has made it of ranks [", of_other.text, "]", AtCallSite(of_other.made_at),
      ", in generation ", generation,
      "; torch names groups by the number of the call, so all ranks must make the same "
      "groups in the same order, each of the same ranks in the same order, also those that "
      "they are not in (or pass use_local_synchronization=True): compare these two places "
      "of the program");
}

}  // namespace resilient
