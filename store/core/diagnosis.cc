#include "store/core/diagnosis.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "runtime/base/texts.h"
#include "store/core/messages.h"

namespace resilient::store {
namespace {

constexpr Duration kLookInterval = Millis(250);
// A rank that is late for a moment is not disturbed; after this it is asked for its progress.
constexpr Duration kAskAfter = std::chrono::seconds(2);
constexpr Duration kAskAgainAtMost = std::chrono::seconds(10);
constexpr Duration kAskAgainAtLeast = std::chrono::seconds(1);
// Between two questions for the proof of one circle: not more often than a circle is confirmed.
constexpr Duration kAskForProof = kCircleConfirmed;
// What has come meanwhile may have been another message than the awaited one.
constexpr Duration kSayEnteredAgain = std::chrono::seconds(5);
// An answer this old still says where a rank is.
constexpr Duration kAnswerLife = std::chrono::seconds(15);
// What a device is judged by is no older than what its waiters have told.
constexpr Duration kDeviceAnswerLife = kWaitingLife;
// Between two questions to a rank whose device has stood still for long enough.
constexpr Duration kAskOfDevice = Millis(500);

bool SameCircle(const std::vector<WaitEdge>& a, const std::vector<WaitEdge>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const WaitEdge& x, const WaitEdge& y) {
                      return x.from == y.from && x.to == y.to && x.call.group == y.call.group &&
                             x.call.seq == y.call.seq && x.call.what == y.call.what;
                    });
}

// The ranks that it waits for, them or their devices, ascending.
std::vector<int> AwaitedIn(const WaitingOperation& operation) {
  std::vector<int> awaited;
  std::set_union(operation.missing.begin(), operation.missing.end(), operation.not_begun.begin(),
                 operation.not_begun.end(), std::back_inserter(awaited));
  return awaited;
}

// Both ascending. As a rule all ranks in a collective miss the same ones, and nothing is added.
void AddRanks(const std::vector<int>& added, std::vector<int>* ranks) {
  if (std::ranges::includes(*ranks, added)) return;
  std::vector<int> all;
  std::ranges::set_union(*ranks, added, std::back_inserter(all));
  *ranks = std::move(all);
}

const WaitingCall* Oldest(const WaitingReport& report) {
  const auto oldest = std::max_element(
      report.calls.begin(), report.calls.end(),
      [](const WaitingCall& a, const WaitingCall& b) { return a.operation.age < b.operation.age; });
  return oldest == report.calls.end() ? nullptr : &*oldest;
}

}  // namespace

Diagnosis::CallKey Diagnosis::KeyOf(int rank, const WaitingCall& call) const {
  return {call.group, groups_.DigestOf(rank, call.group), call.operation.point_to_point,
          call.operation.seq};
}

void Diagnosis::OnWaiting(int rank, WaitingReport report, Instant now) {
  if (report.tell) listeners_.try_emplace(rank, now);
  progress_.Note(rank, report.progress, now);
  progress_.NoteCalls(rank, report.calls);
  groups_.Note(rank, report.made);
  report.progress.clear();
  report.made.clear();
  if (report.calls.empty()) {
    told_.erase(rank);
  } else {
    told_.insert_or_assign(rank, Told{std::move(report), now});
  }
}

void Diagnosis::OnWhereabouts(int rank, Whereabouts whereabouts, Instant now) {
  const auto awaited = awaited_.find(rank);
  if (awaited == awaited_.end()) return;  // Nobody waits for it any more.
  awaited->second.answered = now;
  awaited->second.whereabouts = std::move(whereabouts);
}

Diagnosis::Steps Diagnosis::Advance(Instant now, const Excused& excused) {
  Steps steps;
  if (told_.empty() && listeners_.empty()) return steps;
  if (looked_ != Instant::min() && now - looked_ < kLookInterval) return steps;
  looked_ = now;
  Forget(now);
  // First: what ranks do in different groups proves nothing about each other.
  steps.verdict = FindOtherRanks();
  if (steps.verdict) return steps;
  steps.verdict = FindDeadlock(now, &steps);
  FindEntered(now, &steps);
  AskForStalls(now, &steps);
  if (!steps.verdict) steps.verdict = FindStall(now, excused);
  AskForDevices(now, &steps);
  if (!steps.verdict) steps.verdict = FindDeviceStall(now, excused);
  AskForListeners(now, &steps);
  return steps;
}

// Drops what is void, and with it who is waited for no more.
void Diagnosis::Forget(Instant now) {
  std::erase_if(told_, [now](const auto& told) { return now - told.second.when > kWaitingLife; });
  std::set<int> wanted;
  for (const auto& [rank, told] : told_) {
    for (const WaitingCall& call : told.report.calls) {
      wanted.insert(call.operation.missing.begin(), call.operation.missing.end());
      wanted.insert(call.operation.not_begun.begin(), call.operation.not_begun.end());
    }
  }
  std::erase_if(awaited_, [&wanted](const auto& one) { return !wanted.contains(one.first); });
  for (const int rank : wanted) awaited_.try_emplace(rank);
  std::erase_if(entered_told_, [this](const auto& one) { return !told_.contains(one.first); });
  for (const auto& [rank, told] : told_) wanted.insert(rank);
  progress_.Forget(wanted);
  groups_.Forget(wanted);
  std::erase_if(asked_progress_,
                [&wanted](const auto& one) { return !wanted.contains(one.first); });
}

bool Diagnosis::StaysAway(const ProgressBook::Wait& wait, int peer,
                          std::optional<Instant> since) const {
  using Standing = ProgressBook::Standing;
  const Standing standing = progress_.Of(wait, peer, since.value_or(Instant::min()));
  return standing == Standing::kNotEntered || (!since && standing == Standing::kUnknown);
}

// Of each collective that nobody can end alone: the ranks that some rank in it has not heard from.
// One that has entered it by its own account has done so for good, and counts as heard from.
std::map<Diagnosis::CallKey, std::vector<int>> Diagnosis::MissingByCall(
    std::optional<Instant> since) const {
  struct Shared {
    ProgressBook::Wait wait;  // Of any rank in it: where a peer stands is the same for all.
    std::vector<int> missing;
  };
  std::map<CallKey, Shared> calls;
  for (const auto& [rank, told] : told_) {
    for (const WaitingCall& call : told.report.calls) {
      const WaitingOperation& operation = call.operation;
      if (!operation.needs_all) continue;
      const auto shared =
          calls.emplace(KeyOf(rank, call), Shared{told.WaitIn(rank, call), {}}).first;
      AddRanks(operation.missing, &shared->second.missing);
    }
  }
  std::map<CallKey, std::vector<int>> missing;
  for (const auto& [key, shared] : calls) {
    const ProgressBook::Wait& wait = shared.wait;
    std::ranges::copy_if(shared.missing, std::back_inserter(missing[key]),
                         [&](int peer) { return StaysAway(wait, peer, since); });
  }
  return missing;
}

std::vector<BlockedRank> Diagnosis::Blocked(std::optional<Instant> since) const {
  const std::map<CallKey, std::vector<int>> by_call = MissingByCall(since);
  std::vector<BlockedRank> blocked;
  for (const auto& [rank, told] : told_) {
    if (!told.report.blocked) continue;
    BlockedRank one{rank, {}};
    for (const WaitingCall& call : told.report.calls) {
      if (!call.blocked) continue;
      const WaitingOperation& operation = call.operation;
      std::vector<int> missing =
          operation.needs_all ? by_call.at(KeyOf(rank, call)) : operation.missing;
      if (since && !operation.needs_all) {
        std::erase_if(missing, [&, wait = told.WaitIn(rank, call)](int peer) {
          return !StaysAway(wait, peer, since);
        });
      }
      // One that has not been proved to stay away may come, and is enough.
      if (operation.any && missing.size() < operation.missing.size()) missing.clear();
      one.calls.push_back({call.group, operation.seq,
                           operation.what + AtCallSite(operation.call_site), std::move(missing),
                           operation.any});
    }
    if (!one.calls.empty()) blocked.push_back(std::move(one));
  }
  return blocked;
}

std::optional<Diagnosis::Verdict> Diagnosis::FindOtherRanks() const {
  if (!groups_.MayDiffer()) return std::nullopt;
  for (const auto& [waiter, told] : told_) {
    for (const WaitingCall& call : told.report.calls) {
      for (const int peer : AwaitedIn(call.operation)) {
        Verdict verdict;
        verdict.other_ranks = groups_.Compare(waiter, peer, call.group, true);
        if (verdict.other_ranks) return verdict;
      }
    }
  }
  return std::nullopt;
}

std::optional<Diagnosis::Verdict> Diagnosis::FindDeadlock(Instant now, Steps* steps) {
  const std::vector<BlockedRank> believed = Blocked(std::nullopt);
  if (FindCircle(believed).empty()) {
    candidate_.reset();
    return std::nullopt;
  }
  AskForProof(believed, now, steps);
  std::vector<WaitEdge> circle = FindCircle(Blocked(Instant::min()));
  if (circle.empty()) {
    candidate_.reset();
    return std::nullopt;
  }
  // A thread that has run in between may have done, or be about to do, what is waited for.
  const auto same_threads = [this](const WaitEdge& edge) {
    return told_.at(edge.from).report.threads == candidate_->threads.at(edge.from);
  };
  if (!candidate_ || !SameCircle(candidate_->circle, circle) ||
      !std::all_of(circle.begin(), circle.end(), same_threads)) {
    candidate_ = Candidate{std::move(circle), {}, {}, now};
    for (const WaitEdge& edge : candidate_->circle) {
      candidate_->told[edge.from] = told_.at(edge.from).when;
      candidate_->threads[edge.from] = told_.at(edge.from).report.threads;
    }
    return std::nullopt;
  }
  const bool confirmed = std::all_of(circle.begin(), circle.end(), [this](const WaitEdge& edge) {
    return told_.at(edge.from).when >= candidate_->told.at(edge.from) + kCircleConfirmed;
  });
  if (!confirmed) return std::nullopt;
  // By accounts given since all of them were in these calls for the first time.
  if (!SameCircle(circle, FindCircle(Blocked(candidate_->formed)))) return std::nullopt;
  Verdict verdict;
  // None of its ranks can close a group and make another any more.
  for (const WaitEdge& edge : circle) {
    verdict.other_ranks = groups_.Compare(edge.from, edge.to, edge.call.group, false);
    if (verdict.other_ranks) return verdict;
  }
  verdict.circle = std::move(circle);
  return verdict;
}

void Diagnosis::AskForProof(const std::vector<BlockedRank>& blocked, Instant now, Steps* steps) {
  for (const BlockedRank& one : blocked) AskProgress(one.rank, now, kAskForProof, steps);
}

// What it is awaited in, and what it waits in for messages: there both ends count them.
std::vector<std::string> Diagnosis::GroupsAskedOf(int rank) const {
  std::set<std::string> groups;
  for (const auto& [waiter, told] : told_) {
    for (const WaitingCall& call : told.report.calls) {
      const std::vector<int> awaited = AwaitedIn(call.operation);
      const bool own = waiter == rank && call.operation.point_to_point;
      if (own || std::ranges::binary_search(awaited, rank)) groups.insert(call.group);
    }
  }
  std::vector<std::string> asked(groups.begin(), groups.end());
  if (asked.size() > kProgressGroupsMax) asked.resize(kProgressGroupsMax);
  return asked;
}

void Diagnosis::AskProgress(int rank, Instant now, Duration interval, Steps* steps) {
  const auto [asked, first] = asked_progress_.try_emplace(rank, now);
  if (!first && now - asked->second < interval) return;
  asked->second = now;
  if (std::vector<std::string> groups = GroupsAskedOf(rank); !groups.empty())
    steps->ask_progress[rank] = std::move(groups);
}

void Diagnosis::FindEntered(Instant now, Steps* steps) {
  using Standing = ProgressBook::Standing;
  for (const auto& [rank, told] : told_) {
    std::map<CallKey, Instant>& named = entered_told_[rank];
    std::map<CallKey, Instant> present;
    for (const WaitingCall& call : told.report.calls) {
      const WaitingOperation& operation = call.operation;
      const std::vector<int> awaited = AwaitedIn(operation);
      if (awaited.empty() || call.more) continue;
      const ProgressBook::Wait wait = told.WaitIn(rank, call);
      const bool told_by_all = !operation.any && !operation.sends;
      const bool all = std::ranges::all_of(awaited, [&](int peer) {
        return HasLeft(peer) ||
               (told_by_all && progress_.Of(wait, peer, Instant::min()) == Standing::kEntered);
      });
      if (!all) continue;
      const CallKey key = KeyOf(rank, call);
      const auto before = named.find(key);
      const bool due = before == named.end() || now - before->second >= kSayEnteredAgain;
      present[key] = due ? now : before->second;
      if (due)
        steps->entered[rank].push_back({call.group, operation.point_to_point, operation.seq});
    }
    named = std::move(present);
  }
}

void Diagnosis::AskForStalls(Instant now, Steps* steps) {
  for (const auto& [waiter, told] : told_) {
    const Duration stall = told.report.stall;
    const bool judges = stall > Duration::zero();
    const Duration interval =
        judges ? std::clamp(stall / 4, kAskAgainAtLeast, kAskAgainAtMost) : kAskAgainAtMost;
    for (const WaitingCall& call : told.report.calls) {
      if (call.operation.age < kAskAfter) continue;
      if (call.operation.point_to_point) AskProgress(waiter, now, interval, steps);
      for (const int rank : call.operation.missing) {
        AskProgress(rank, now, interval, steps);
        if (!judges || WaitsItself(rank)) continue;
        const Awaited& awaited = awaited_.at(rank);
        const bool due = awaited.answered &&
                         awaited.whereabouts.no_progress + (now - *awaited.answered) >= stall;
        AskOnce(rank, now, due ? kAskAgainAtLeast : interval, steps);
      }
    }
  }
}

std::optional<Diagnosis::Verdict> Diagnosis::FindStall(Instant now, const Excused& excused) const {
  for (const auto& [rank, awaited] : awaited_) {
    if (!awaited.answered || now - *awaited.answered > kAnswerLife) continue;
    const Whereabouts& where = awaited.whereabouts;
    if (where.expected_slow_for > Duration::zero() || WaitsItself(rank) || excused(rank)) continue;
    Verdict verdict;
    for (const auto& [waiter, told] : told_) {
      if (told.report.stall <= Duration::zero() || where.no_progress < told.report.stall) continue;
      for (const WaitingCall& call : told.report.calls) {
        const std::vector<int>& missing = call.operation.missing;
        if (!std::binary_search(missing.begin(), missing.end(), rank)) continue;
        const auto standing = progress_.Of(told.WaitIn(waiter, call), rank, now - kAnswerLife);
        const bool numbered = call.operation.seq != 0;
        if (numbered && standing != ProgressBook::Standing::kNotEntered) continue;
        if (verdict.waiters.empty()) verdict.call = call;
        verdict.waiters.push_back(waiter);
        break;
      }
    }
    if (verdict.waiters.empty()) continue;
    verdict.stalled = rank;
    verdict.whereabouts = where;
    return verdict;
  }
  return std::nullopt;
}

// Whom a rank waits for knows what its device does: where the waiter has heard that it has
// submitted the operation, or it has said so itself.
void Diagnosis::AskForDevices(Instant now, Steps* steps) {
  for (const auto& [waiter, told] : told_) {
    const Duration stall = told.report.device_stall;
    if (stall <= Duration::zero()) continue;
    const Duration interval = std::clamp(stall / 4, kAskAgainAtLeast, kAskAgainAtMost);
    for (const WaitingCall& call : told.report.calls) {
      if (call.operation.age < kAskAfter) continue;
      for (const int rank : AwaitedIn(call.operation)) {
        const auto device = progress_.DeviceOf(rank, call.group, Instant::min());
        const bool stands = device.progress != nullptr && device.progress->still > Duration::zero();
        if (!stands && !std::ranges::binary_search(call.operation.not_begun, rank)) continue;
        AskOnce(rank, now, interval, steps);
        // It is judged as soon as it can be.
        const bool due = stands && now >= device.given + (stall - device.progress->still);
        AskProgress(rank, now, due ? kAskOfDevice : interval, steps);
      }
    }
  }
}

const DeviceProgress* Diagnosis::HungDevice(int waiter, const Told& told, const WaitingCall& call,
                                            int rank, Instant now) const {
  const Duration stall = told.report.device_stall;
  const std::vector<int> awaited = AwaitedIn(call.operation);
  if (stall <= Duration::zero() || !std::ranges::binary_search(awaited, rank)) return nullptr;
  const Instant since = now - kDeviceAnswerLife;
  const DeviceProgress* device = progress_.DeviceOf(rank, call.group, since).progress;
  // One that runs an operation may wait for another rank by it, and what is behind it with it.
  if (device == nullptr || device->runs || device->still < stall) return nullptr;
  const auto standing = progress_.Of(told.WaitIn(waiter, call), rank, since);
  return standing == ProgressBook::Standing::kNotBegun ? device : nullptr;
}

std::optional<Diagnosis::Verdict> Diagnosis::FindDeviceStall(Instant now,
                                                             const Excused& excused) const {
  for (const auto& [rank, awaited] : awaited_) {
    // What its program has announced is known.
    if (!awaited.answered || now - *awaited.answered > kAnswerLife || excused(rank)) continue;
    if (awaited.whereabouts.expected_slow_for > Duration::zero()) continue;
    Verdict verdict;
    for (const auto& [waiter, told] : told_) {
      for (const WaitingCall& call : told.report.calls) {
        const DeviceProgress* device = HungDevice(waiter, told, call, rank, now);
        if (device == nullptr) continue;
        if (verdict.waiters.empty()) {
          verdict.call = call;
          verdict.device = *device;
        }
        verdict.waiters.push_back(waiter);
        break;
      }
    }
    if (verdict.waiters.empty()) continue;
    verdict.stalled = rank;
    verdict.whereabouts = awaited.whereabouts;
    return verdict;
  }
  return std::nullopt;
}

// Where it is, and of a device that is waited for what that one does.
bool Diagnosis::HasToldAll(int listener, int rank, Instant since, Instant now, Steps* steps) {
  bool all = true;
  if (AwaitsDevice(listener, rank)) {
    const std::string& group = OldestCallOf(listener)->group;
    all = progress_.DeviceOf(rank, group, since).progress != nullptr;
    if (!all) AskProgress(rank, now, kAskAgainAtLeast, steps);
  }
  if (WaitsItself(rank)) return all;
  const Awaited& awaited = awaited_.at(rank);
  if (awaited.answered && *awaited.answered >= since) return all;
  if (awaited.asked < since) AskOnce(rank, now, kAskAgainAtLeast, steps);
  return false;
}

// A listener hears when everybody that it waits for has said where it is, or has had the time to.
void Diagnosis::AskForListeners(Instant now, Steps* steps) {
  for (auto listener = listeners_.begin(); listener != listeners_.end();) {
    const auto [rank, since] = *listener;
    bool complete = true;
    std::size_t named = 0;
    for (const int late : AwaitedBy(rank)) {
      if (++named > kLateRanksMax) break;
      if (IsBeyondAsking(rank, late)) continue;
      complete = HasToldAll(rank, late, since, now, steps) && complete;
    }
    if (complete || now - since >= kWhereaboutsPatience) {
      steps->tell.push_back(rank);
      listener = listeners_.erase(listener);
    } else {
      ++listener;
    }
  }
}

void Diagnosis::AskOnce(int rank, Instant now, Duration interval, Steps* steps) {
  Awaited& awaited = awaited_.at(rank);
  if (awaited.asked != Instant::min() && now - awaited.asked < interval) return;
  awaited.asked = now;
  steps->ask.push_back(rank);
}

bool Diagnosis::IsBeyondAsking(int waiter, int rank) const {
  if (HasLeft(rank)) return true;
  const WaitingCall* call = OldestCallOf(waiter);
  if (call == nullptr) return false;
  const ProgressBook::Wait wait = told_.at(waiter).WaitIn(waiter, *call);
  return progress_.Of(wait, rank, Instant::min()) == ProgressBook::Standing::kEntered;
}

bool Diagnosis::AwaitsDevice(int waiter, int rank) const {
  const WaitingCall* call = OldestCallOf(waiter);
  if (call == nullptr) return false;
  using Standing = ProgressBook::Standing;
  const ProgressBook::Wait wait = told_.at(waiter).WaitIn(waiter, *call);
  const Standing standing = progress_.Of(wait, rank, Instant::min());
  const bool reported = std::ranges::binary_search(call->operation.not_begun, rank);
  return standing == Standing::kNotBegun || (reported && standing != Standing::kEntered);
}

ProgressBook::Device Diagnosis::DeviceAwaited(int waiter, int rank) const {
  const WaitingCall* call = OldestCallOf(waiter);
  if (call == nullptr) return {};
  return progress_.DeviceOf(rank, call->group, Instant::min());
}

bool Diagnosis::WaitsItself(int rank) const {
  const auto told = told_.find(rank);
  if (told == told_.end()) return false;
  const WaitingReport& report = told->second.report;
  // Another thread of it may act; yet it makes no progress because of those that it waits for.
  return report.blocked || std::any_of(report.calls.begin(), report.calls.end(),
                                       [](const WaitingCall& call) { return call.blocked; });
}

std::vector<int> Diagnosis::AwaitedBy(int rank) const {
  const WaitingCall* call = OldestCallOf(rank);
  return call == nullptr ? std::vector<int>() : AwaitedIn(call->operation);
}

const WaitingCall* Diagnosis::OldestCallOf(int rank) const {
  const auto told = told_.find(rank);
  return told == told_.end() ? nullptr : Oldest(told->second.report);
}

const WaitingCall* Diagnosis::OldestBlockedCallOf(int rank) const {
  const auto told = told_.find(rank);
  if (told == told_.end()) return nullptr;
  const WaitingCall* oldest = nullptr;
  for (const WaitingCall& call : told->second.report.calls) {
    if (call.blocked && (oldest == nullptr || oldest->operation.age < call.operation.age))
      oldest = &call;
  }
  return oldest;
}

const Whereabouts* Diagnosis::Known(int rank, Instant now) const {
  const auto awaited = awaited_.find(rank);
  if (awaited == awaited_.end() || !awaited->second.answered) return nullptr;
  return now - *awaited->second.answered > kAnswerLife ? nullptr : &awaited->second.whereabouts;
}

}  // namespace resilient::store
