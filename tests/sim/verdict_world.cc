#include "tests/sim/verdict_world.h"

#include <algorithm>
#include <cstdlib>

namespace resilient::store::sim {

bool VerdictWorld::Rank::IsQueued() const {
  if (!in_call || Current().kind != Kind::kDevice) return false;
  return CountOf(device.begun, Current().group) < Current().seq;
}

bool VerdictWorld::AreOfOtherRanks(int one, int other, int group) const {
  const auto makes = [&](int rank) { return std::ranges::count(MembersOf(group), rank) > 0; };
  return makes(one) && makes(other) && MadeBy(one, group) != MadeBy(other, group);
}

int VerdictWorld::PlaceIn(int group, int rank) const {
  const std::vector<int>& members = MadeBy(rank, group);
  return static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
}

std::vector<int> VerdictWorld::MissingOf(int rank) const {
  const Rank& self = Of(rank);
  const Step& step = self.Current();
  const auto unless = [&step](bool heard) {
    return heard ? std::vector<int>{} : std::vector<int>{step.peer};
  };
  switch (step.kind) {
    case Kind::kSend:
      return {};
    case Kind::kLargeSend:
      return unless(CountOf(self.wanted, step.peer) >= CountOf(self.sent, step.peer));
    case Kind::kRecv:
      return unless(CountOf(self.arrived, step.peer) >= CountOf(self.begun, step.peer));
    case Kind::kAll:
    case Kind::kDevice:
    case Kind::kChain:
    case Kind::kBroadcast:
      break;
  }
  std::vector<int> missing;
  const std::vector<int>& members = MadeBy(rank, step.group);
  const int place = PlaceIn(step.group, rank);
  for (int at = 0; at < static_cast<int>(members.size()); ++at) {
    const int peer = members[static_cast<std::size_t>(at)];
    if (step.kind == Kind::kBroadcast && at > 0) break;
    if (peer == rank || (step.kind == Kind::kChain && std::abs(at - place) != 1)) continue;
    const auto& heard = step.kind == Kind::kChain ? self.passed : self.heard;
    if (CountOf(heard, {step.group, peer}) < step.seq) missing.push_back(peer);
  }
  return missing;
}

}  // namespace resilient::store::sim
