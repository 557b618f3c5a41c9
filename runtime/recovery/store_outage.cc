#include "runtime/recovery/store_outage.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include <resilient/ladder.h>

#include "runtime/base/log.h"

namespace resilient::recovery {
namespace {

double TenthsOf(Duration duration) { return std::floor(ToSeconds(duration) * 10) / 10; }

std::string MemberText(int rank, const std::vector<Member>& members) {
  const auto member = std::ranges::find(members, rank, &Member::rank);
  if (member == members.end()) return StrCat("rank ", rank);
  return StrCat("rank ", rank, " (host ", member->host, ", pid ", member->pid, ")");
}

}  // namespace

void StoreOutage::OnBeat(Instant now, Instant contact, Duration lease) {
  if (contact != contact_) {
    lasts_ = Duration::zero();
    asked_.clear();
    silent_.clear();
  } else {
    // A beat that is late says that this process waits for a processor, and so may all others.
    lasts_ += std::min(now - last_beat_, lease / kHeartbeatsPerLease);
  }
  contact_ = contact;
  last_beat_ = now;
}

std::vector<int> StoreOutage::Round(std::uint64_t generation,
                                    const std::vector<WaitingCall>& calls) {
  if (generation != generation_) {
    generation_ = generation;
    asked_.clear();
    silent_.clear();
  }
  if (lasts_ < patience_ / 2 || !asked_.empty()) return {};
  std::set<int> awaited;
  for (const WaitingCall& call : calls) {
    awaited.insert(call.operation.missing.begin(), call.operation.missing.end());
    awaited.insert(call.operation.silent.begin(), call.operation.silent.end());
  }
  asked_.assign(awaited.begin(), awaited.end());
  return asked_;
}

void StoreOutage::OnKnocked(std::uint64_t generation, int rank, const Status& found) {
  if (generation != generation_ || std::erase(asked_, rank) == 0) return;
  if (found.ok()) {
    silent_.erase(rank);
  } else {
    silent_.insert_or_assign(rank, found.message());
  }
}

std::string StoreOutage::Silence(const std::string& store) const {
  return StrCat("the store at ", store, " has not answered for ", TenthsOf(lasts_), " s");
}

std::optional<Status> StoreOutage::Verdict(const std::string& store,
                                           const std::vector<WaitingCall>& calls,
                                           const LostLinks& links,
                                           const std::vector<Member>& members) const {
  if (!IsOver()) return std::nullopt;
  std::string how = "has gone, its link has ended";
  std::vector<Need> needs = links.NeededBy(calls);
  if (needs.empty()) {
    needs =
        NeedsOf(calls, [this](const std::string&, int rank) { return silent_.count(rank) != 0; });
    if (needs.empty()) return std::nullopt;
    how = StrCat("gives no answer over the network (", silent_.at(needs.front().rank), ")");
  }
  FailureDetail detail;
  detail.rank = needs.front().rank;
  if (const auto member = std::ranges::find(members, detail.rank, &Member::rank);
      member != members.end()) {
    detail.host = member->host;
    detail.pid = member->pid;
  }
  std::string others;
  for (std::size_t i = 1; i < needs.size() && i < 4; ++i)
    others += StrCat(i == 1 ? "; the same holds for " : ", ", MemberText(needs[i].rank, members));
  if (needs.size() > 4) others += StrCat(" and ", needs.size() - 4, " more");
  const std::string text =
      StrCat(Silence(store), ", and ", MemberText(detail.rank, members), " ", how, "; ",
             needs.front().what, " waits for it", others,
             ". Without the store no rank can be replaced: start it again at that address and "
             "restart this job; a store on a host of its own, with --data, outlives its ranks");
  return Status(StatusCode::kStoreLost, text, std::move(detail));
}

std::optional<Status> StoreOutage::RebuildVerdict(const std::string& store,
                                                  const Status& first_cause) const {
  if (!IsOver()) return std::nullopt;
  return Status(StatusCode::kStoreLost,
                StrCat(Silence(store),
                       ", and the world cannot be rebuilt without it: start it again at that "
                       "address and restart this job. The rebuild followed ",
                       first_cause.ToString()),
                first_cause.detail());
}

}  // namespace resilient::recovery
