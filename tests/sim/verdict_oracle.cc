#include "tests/sim/verdict_oracle.h"

#include <algorithm>

#include "runtime/base/log.h"

namespace resilient::store::sim {
namespace {

using std::chrono::seconds;

// Semantics, row 8, from when its last rank has waited for a second; and what the lines take.
constexpr Duration kFoundWithin = seconds(6);
// Until the next question about progress, which comes every ten seconds, and its answer.
constexpr Duration kToldWithin = seconds(16);
constexpr Duration kSaidBefore = seconds(2);
// Semantics, rows 8b and 9, from when somebody waits; and until the first question.
constexpr Duration kHangFoundWithin = seconds(8);
// Between two questions to a rank where it is.
constexpr Duration kAskedEvery = seconds(10);

}  // namespace

bool VerdictOracle::HasEntered(int peer, int waiter, const Step& step) const {
  const Rank& other = world_.Of(peer);
  const Rank& self = world_.Of(waiter);
  if (world_.AreOfOtherRanks(peer, waiter, step.group)) return false;  // What it enters is another.
  if (step.kind == Kind::kRecv) return CountOf(other.sent, waiter) >= CountOf(self.begun, peer);
  if (step.kind == Kind::kLargeSend)
    return CountOf(other.begun, waiter) >= CountOf(self.sent, peer);
  const auto& entered = step.kind == Kind::kDevice ? other.device.begun : other.entered;
  return CountOf(entered, step.group) >= step.seq;
}

// Who is missing in a chain is known to its neighbours alone, and only once these are in it.
VerdictOracle::MissingByCollective VerdictOracle::SeenMissing() const {
  MissingByCollective missing;
  for (int rank = 0; rank < world_.size(); ++rank) {
    const Rank& self = world_.Of(rank);
    if (!self.in_call) continue;
    const Step& step = self.Current();
    if (step.kind != Kind::kAll && step.kind != Kind::kChain) continue;
    const std::vector<int> missed = world_.MissingOf(rank);
    missing[{step.group, world_.MadeBy(rank, step.group), step.seq}].insert(missed.begin(),
                                                                            missed.end());
  }
  return missing;
}

std::vector<int> VerdictOracle::Needed(int rank) const {
  const Step& step = world_.Of(rank).Current();
  if (step.IsMessage()) return {step.peer};
  std::vector<int> needed = world_.MadeBy(rank, step.group);
  if (step.kind == Kind::kBroadcast) needed.resize(1);
  return needed;
}

std::vector<int> VerdictOracle::WaitsFor(int rank, const MissingByCollective* seen) const {
  const Step& step = world_.Of(rank).Current();
  std::vector<int> peers;
  if (seen == nullptr) {
    peers = Needed(rank);
  } else if (const auto all = seen->find({step.group, world_.MadeBy(rank, step.group), step.seq});
             all != seen->end()) {
    peers.assign(all->second.begin(), all->second.end());
  } else {
    peers = world_.MissingOf(rank);
  }
  std::erase_if(peers, [&](int peer) { return peer == rank || HasEntered(peer, rank, step); });
  return peers;
}

// What goes on is found rank by rank, until there is no more of it. A rank that has come to its end
// is not blocked: what waits for it waits for its goodbye. Nor is one that is in no call, or whose
// device has not begun its operation: that it never does is another sentence.
bool VerdictOracle::IsDeadlocked(Sight sight) const {
  const MissingByCollective seen = sight == Sight::kMissing ? SeenMissing() : MissingByCollective();
  std::map<int, std::vector<int>> blocked;  // With whom each waits for.
  for (int rank = 0; rank < world_.size(); ++rank) {
    const Rank& self = world_.Of(rank);
    if (self.in_call && !self.IsQueued())
      blocked[rank] = WaitsFor(rank, sight == Sight::kMissing ? &seen : nullptr);
  }
  const auto goes_on = [&blocked](const auto& one) {
    return std::ranges::none_of(one.second, [&](int peer) { return blocked.contains(peer); });
  };
  while (std::erase_if(blocked, goes_on) > 0) continue;
  return !blocked.empty();
}

std::string VerdictOracle::OnVerdict(const Diagnosis::Verdict& verdict, Instant now) const {
  if (verdict.other_ranks) return OnOtherRanks(*verdict.other_ranks);
  return verdict.circle.empty() ? OnStall(verdict, now) : OnCircle(verdict);
}

std::string VerdictOracle::OnOtherRanks(const GroupBook::Difference& found) const {
  const int group = VerdictWorld::NumberOf(found.group);
  const bool differ = world_.AreOfOtherRanks(found.one, found.other, group);
  return differ ? "" : "the ranks of the group are the same";
}

std::string VerdictOracle::OnCircle(const Diagnosis::Verdict& verdict) const {
  if (!IsDeadlocked(Sight::kAll)) return "no circle is there";
  for (const WaitEdge& edge : verdict.circle) {
    if (!world_.Of(edge.from).in_call) return StrCat("rank ", edge.from, " waits for nothing");
    const int group = VerdictWorld::NumberOf(edge.call.group);
    if (world_.AreOfOtherRanks(edge.from, edge.to, group))
      return "a group of other ranks closes the circle, and was not named";
  }
  return "";
}

std::string VerdictOracle::OnStall(const Diagnosis::Verdict& verdict, Instant now) const {
  const Rank& rank = world_.Of(verdict.stalled);
  if (!verdict.device) {
    // It may have gone on since it was asked, each second by then.
    const bool stands = now - rank.acted >= kVerdictStall - kSaidBefore;
    return stands ? "" : "the rank has not stood still for so long";
  }
  const VerdictWorld::Device& device = rank.device;
  const bool stands = device.hangs && rank.IsQueued() &&
                      now - std::max(device.given, device.moved) >= kVerdictDeviceStall;
  return stands ? "" : "the device works";
}

std::string VerdictOracle::OnEntered(int rank, const EnteredCall& call) {
  const Rank& self = world_.Of(rank);
  if (!self.in_call) return "";  // It has heard of them meanwhile.
  const Step& step = self.Current();
  const bool meant = call.point_to_point ? step.kind == Kind::kRecv && call.seq == self.at + 1
                                         : !step.IsMessage() && call.seq == step.seq &&
                                               call.group == VerdictWorld::NameOf(step.group);
  if (!meant) return "";
  heard_entered_[rank] = self.at + 1;
  for (const int peer : world_.MissingOf(rank)) {
    if (!HasEntered(peer, rank, step)) return StrCat("rank ", peer, " has not entered it");
  }
  return "";
}

std::string VerdictOracle::CheckNothingMissed(Instant now) {
  std::string violated = CheckOtherRanksFound(now);
  if (violated.empty()) violated = CheckCircleFound(now);
  if (violated.empty()) violated = CheckHangsFound(now);
  return violated.empty() ? CheckEnteredHeard(now) : violated;
}

bool VerdictOracle::WaitsForOtherRanks(int rank) const {
  const Rank& self = world_.Of(rank);
  if (!self.in_call || self.IsQueued() || self.Current().IsMessage()) return false;
  const int group = self.Current().group;
  return std::ranges::any_of(world_.MissingOf(rank), [&](int peer) {
    return world_.AreOfOtherRanks(rank, peer, group) && CountOf(world_.Of(peer).entered, group) > 0;
  });
}

std::string VerdictOracle::CheckOtherRanksFound(Instant now) {
  for (int rank = 0; rank < world_.size(); ++rank) {
    if (!WaitsForOtherRanks(rank)) {
      other_ranks_since_.erase(rank);
    } else if (now - other_ranks_since_.try_emplace(rank, now).first->second > kToldWithin) {
      return StrCat("rank ", rank, " is in a group of other ranks, and was not found");
    }
  }
  return "";
}

std::string VerdictOracle::CheckCircleFound(Instant now) {
  const bool any_queued =
      std::ranges::any_of(world_.ranks, [](const Rank& rank) { return rank.IsQueued(); });
  if (any_queued || !AllArrived() || !IsDeadlocked(Sight::kMissing)) {
    deadlocked_since_.reset();
    return "";
  }
  if (!deadlocked_since_) deadlocked_since_ = now;
  return now - *deadlocked_since_ > kFoundWithin ? "a circle was not found" : "";
}

// As long as a message is on its way nobody can say that it would change nothing.
bool VerdictOracle::AllArrived() const {
  for (int from = 0; from < world_.size(); ++from) {
    for (const auto& [to, sent] : world_.Of(from).sent) {
      if (CountOf(world_.Of(to).arrived, from) < sent) return false;
    }
  }
  return true;
}

// From when somebody waits for it, and has for long enough to ask.
std::string VerdictOracle::CheckHangsFound(Instant now) const {
  for (const Rank& rank : world_.ranks) {
    const bool hangs = rank.device.hangs && rank.IsQueued();
    const bool spins = rank.spins && !rank.in_call && !rank.IsAtEnd();
    if (!spins && !hangs) continue;
    const Step& step = rank.Current();
    if (step.IsMessage() || step.kind == Kind::kBroadcast || step.kind == Kind::kChain) continue;
    const std::optional<Instant> awaited = AwaitedSince(rank);
    if (!awaited) continue;
    const Instant stalled =
        spins ? rank.acted + kVerdictStall
              : std::max(rank.device.given, rank.device.moved) + kVerdictDeviceStall;
    const Duration since_due = now - std::max(stalled, *awaited);
    if (spins && since_due > kHangFoundWithin + kAskedEvery)
      return "a rank that spins was not found";
    if (!spins && since_due > kHangFoundWithin) return "a device that hangs was not found";
  }
  return "";
}

std::optional<Instant> VerdictOracle::AwaitedSince(const Rank& rank) const {
  const Step& step = rank.Current();
  std::optional<Instant> since;
  const int self = static_cast<int>(&rank - world_.ranks.data());
  for (const int peer : world_.MembersOf(step.group)) {
    const Rank& other = world_.Of(peer);
    if (std::ranges::count(world_.MadeBy(peer, step.group), self) == 0) continue;
    const bool waits = &other != &rank && other.in_call && !other.IsQueued() &&
                       other.Current().IsSameCollective(step);
    if (waits) since = std::min(since.value_or(other.since), other.since);
  }
  return since;
}

std::string VerdictOracle::CheckEnteredHeard(Instant now) {
  for (int rank = 0; rank < world_.size(); ++rank) {
    if (!WaitsForLinksAlone(rank) || heard_entered_[rank] == world_.Of(rank).at + 1) {
      only_links_since_.erase(rank);
    } else if (now - only_links_since_.try_emplace(rank, now).first->second > kToldWithin) {
      return StrCat("rank ", rank, " waits for links alone, and does not hear it");
    }
  }
  return "";
}

bool VerdictOracle::WaitsForLinksAlone(int rank) const {
  const Rank& self = world_.Of(rank);
  // A rank whose device has not begun the step waits for that, and reports nothing yet.
  if (!self.in_call || self.Current().kind == Kind::kLargeSend || self.IsQueued()) return false;
  const std::vector<int> missing = world_.MissingOf(rank);
  return !missing.empty() && std::ranges::all_of(missing, [&](int peer) {
    return HasEntered(peer, rank, self.Current());
  });
}

}  // namespace resilient::store::sim
