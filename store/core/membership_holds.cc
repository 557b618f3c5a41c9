#include <algorithm>
#include <set>
#include <utility>

#include "store/core/membership.h"

// Members whose silence is announced. Only silence is excused: a process that is gone is lost.
namespace resilient::store {
namespace {

constexpr std::size_t kHoldsLogged = 8;  // Of one request, by name.

std::string Behind(const std::string& reason) { return reason.empty() ? "" : ": " + reason; }

Status NobodyMatches(const std::string& job, int rank, const std::string& host) {
  return Status(StatusCode::kNotFound, "job " + job + " has no live member" +
                                           (rank < 0 ? "" : " of rank " + std::to_string(rank)) +
                                           (host.empty() ? "" : " on host " + host));
}

// Not below zero: a hold may be over whose timer has not run yet.
std::uint64_t WholeMillis(Duration duration) {
  const Duration left = std::max(duration, Duration::zero());
  return static_cast<std::uint64_t>(std::chrono::ceil<Millis>(left).count());
}

}  // namespace

// A process stands still as a whole: with one of its sessions the others are silent, too.
std::vector<Participant*> Membership::Matching(int rank, const std::string& host) {
  std::set<std::string> incarnations;
  for (const auto& [session, who] : participants_) {
    const bool fits =
        (rank < 0 || who.request.rank == rank) && (host.empty() || who.hello.process.host == host);
    if (who.Active() && fits) incarnations.insert(who.hello.incarnation);
  }
  std::vector<Participant*> matching;
  for (auto& [session, who] : participants_) {
    if (who.Active() && incarnations.contains(who.hello.incarnation)) matching.push_back(&who);
  }
  std::sort(matching.begin(), matching.end(),
            [](const auto* a, const auto* b) { return a->session < b->session; });
  return matching;
}

Result<std::int64_t> Membership::Hold(const HoldOp& op, Moment moment, MembershipEffects& effects) {
  const std::vector<Participant*> matching = Matching(op.rank, op.host);
  if (matching.empty()) return NobodyMatches(job_, op.rank, op.host);
  const auto most = static_cast<std::uint64_t>(kHoldMax / Millis(1));
  const std::uint64_t for_ms = op.for_ms == 0 ? most : std::min(op.for_ms, most);
  for (Participant* who : matching) {
    who->hold = store::Hold{Millis(static_cast<std::int64_t>(for_ms)), op.reason};
    BeginHold(*who, moment, effects);
    Changed(*who);
  }
  HeldEvent event;
  event.held = true;
  event.for_ms = for_ms;
  event.reason = op.reason;
  const std::string text =
      "for at most " + Seconds(matching.front()->hold->limit) + " s" + Behind(event.reason);
  TellHolds(matching, std::move(event), "HELD " + text, moment, effects);
  return static_cast<std::int64_t>(matching.size());
}

Result<std::int64_t> Membership::Release(const ReleaseOp& op, Moment moment,
                                         MembershipEffects& effects) {
  std::vector<Participant*> held = Matching(op.rank, op.host);
  if (held.empty()) return NobodyMatches(job_, op.rank, op.host);
  std::erase_if(held, [](const Participant* who) { return !who->hold; });
  EndHolds(held, "it was released", moment, effects);
  return static_cast<std::int64_t>(held.size());
}

void Membership::BeginHold(Participant& who, Moment moment, MembershipEffects& effects) {
  who.held_until = moment.now + who.hold->limit;
  any_held_until_ = std::max(any_held_until_, who.held_until);
  Arm(who.held_until, TimerKind::kHold, who.session);
  effects.held.push_back(who.session);
}

void Membership::EndHolds(const std::vector<Participant*>& held, const std::string& why,
                          Moment moment, MembershipEffects& effects) {
  if (held.empty()) return;
  for (Participant* who : held) {
    who->hold.reset();
    who->last_seen = moment.now;  // So far nothing was expected of it.
    Changed(*who);
    effects.unheld.push_back(who->session);
  }
  HeldEvent event;
  event.reason = why;
  TellHolds(held, std::move(event), "no longer held" + Behind(why), moment, effects);
}

void Membership::EndDueHolds(Moment moment, MembershipEffects& effects) {
  std::vector<Participant*> held;
  for (const SessionId session : std::exchange(due_holds_, {})) {
    Participant* who = Find(session);
    if (who && who->hold) held.push_back(who);
  }
  EndHolds(held, "its time is over", moment, effects);
}

// Each member hears of it once, however many are meant.
void Membership::TellHolds(const std::vector<Participant*>& which, HeldEvent event,
                           const std::string& text, Moment moment, MembershipEffects& effects) {
  const std::string_view name = event.held ? "hold" : "hold_end";
  if (which.size() == 1) {
    event.rank = which.front()->request.rank;
    event.host = which.front()->hello.process.host;
    event.pid = which.front()->hello.process.pid;
  }
  if (which.size() <= kHoldsLogged) {
    for (const Participant* who : which) {
      effects.log.push_back(Record(name, *who, Name(ClaimantOf(*who)) + " is " + text));
    }
  } else {
    effects.log.push_back(LogRecord{name,
                                    {{"job", job_}, {"members", std::to_string(which.size())}},
                                    std::to_string(which.size()) + " members are " + text});
  }
  const Participant* longest = HeldLongest();
  event.job_for_ms = longest ? WholeMillis(longest->held_until - moment.now) : 0;
  for (const auto& [session, who] : participants_) {
    if (who.Active()) effects.Tell(session, event);
  }
}

const Participant* Membership::HeldLongest() const {
  const Participant* longest = nullptr;
  for (const auto& [session, who] : participants_) {
    if (who.hold && (!longest || who.held_until > longest->held_until)) longest = &who;
  }
  return longest;
}

void Membership::PushHolds(SessionId session, Moment moment, MembershipEffects& effects) const {
  if (moment.now >= any_held_until_) return;  // Joins are many, holds are rare.
  const Participant* who = HeldLongest();
  if (!who) return;
  HeldEvent event;
  event.rank = who->request.rank;
  event.host = who->hello.process.host;
  event.pid = who->hello.process.pid;
  event.held = true;
  event.for_ms = event.job_for_ms = WholeMillis(who->held_until - moment.now);
  event.reason = who->hold->reason;
  effects.Tell(session, event);
}

}  // namespace resilient::store
