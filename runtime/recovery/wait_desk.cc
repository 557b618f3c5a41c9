#include "runtime/recovery/wait_desk.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/texts.h"

namespace resilient::recovery {
namespace {

// The service takes 3.5 s for a rank whose interpreter is busy.
constexpr Duration kNoticePatience = std::chrono::seconds(6);

bool IsBlockedIn(const WaitingCall& call, const Callers::Snapshot& callers) {
  const WaitingOperation& operation = call.operation;
  return std::any_of(callers.blocked.begin(), callers.blocked.end(), [&](const BlockedIn& in) {
    if (in.group != call.group || in.point_to_point != operation.point_to_point) return false;
    // Collectives run one after the other: who is blocked in a later one waits for this one.
    return operation.point_to_point ? in.seq == operation.seq
                                    : in.seq == 0 || in.seq >= operation.seq;
  });
}

// Whether what is told is all that is in flight: what is not has begun lately, and may end.
bool HasAllInFlight(const std::vector<WaitingCall>& calls, const Callers::Snapshot& callers) {
  if (calls.size() == kWaitingOperationsMax) return false;  // Perhaps the oldest ones only.
  std::int64_t told = 0;
  for (const WaitingCall& call : calls) {
    told += 1 + static_cast<std::int64_t>(call.operation.behind);
  }
  return callers.in_flight <= told;
}

std::string Names(const LateNotice& notice) {
  std::string names;
  for (const LateRank& late : notice.ranks) names += (names.empty() ? "" : "; ") + late.text;
  if (notice.more > 0) names += StrCat("; and ", notice.more, " more ranks");
  return names;
}

}  // namespace

void WaitDesk::Note(const std::string& group, std::uint64_t generation,
                    std::vector<WaitingOperation> waiting, Instant now) {
  const std::lock_guard lock(mutex_);
  told_.insert_or_assign(group, Told{generation, std::move(waiting), now});
  any_ = true;
}

void WaitDesk::NoteEnd(const std::string& group, bool point_to_point) {
  if (!any_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  const auto told = told_.find(group);
  if (told == told_.end()) return;
  std::erase_if(told->second.waiting, [point_to_point](const WaitingOperation& operation) {
    return operation.point_to_point == point_to_point;
  });
}

void WaitDesk::NoteProgress(std::uint64_t generation, GroupProgress progress) {
  const std::lock_guard lock(mutex_);
  if (generation < progress_generation_) return;
  BeginAnswersOf(generation);
  progress_.insert_or_assign(progress.group, std::move(progress));
}

void WaitDesk::NoteAskedOfClosed(std::uint64_t generation, const std::string& group) {
  const std::lock_guard lock(mutex_);
  if (generation < progress_generation_) return;
  BeginAnswersOf(generation);
  closed_asked_.insert(group);
}

void WaitDesk::BeginAnswersOf(std::uint64_t generation) {
  if (generation == progress_generation_) return;
  progress_generation_ = generation;
  progress_.clear();
  closed_asked_.clear();
}

std::vector<WaitingCall> WaitDesk::Calls(std::uint64_t generation, Instant now) const {
  std::vector<WaitingCall> calls;
  for (const auto& [group, told] : told_) {
    if (told.generation != generation) continue;
    for (const WaitingOperation& operation : told.waiting) {
      calls.push_back({group, operation, false});
      calls.back().operation.age += now - told.when;
    }
  }
  std::sort(calls.begin(), calls.end(), [](const WaitingCall& a, const WaitingCall& b) {
    return a.operation.age > b.operation.age;
  });
  if (calls.size() > kWaitingOperationsMax) calls.resize(kWaitingOperationsMax);
  return calls;
}

bool WaitDesk::HasAny(std::uint64_t generation, Instant now) const {
  const std::lock_guard lock(mutex_);
  const bool asked = !progress_.empty() || !closed_asked_.empty();
  if (progress_generation_ == generation && asked) return true;
  return std::any_of(told_.begin(), told_.end(), [&](const auto& told) {
    return told.second.generation == generation && now - told.second.when <= kWaitingLife;
  });
}

std::optional<WaitingReport> WaitDesk::Report(std::uint64_t generation,
                                              const Callers::Snapshot& callers, Instant now) {
  WaitingReport report;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(told_, [&](const auto& told) {
      return told.second.generation < generation || now - told.second.when > kWaitingLife;
    });
    any_ = !told_.empty();
    report.calls = Calls(generation, now);
    auto progress = std::exchange(progress_, {});
    auto closed = std::exchange(closed_asked_, {});
    if (progress_generation_ == generation) {
      for (auto& [group, one] : progress) report.progress.push_back(std::move(one));
      for (const std::string& group : closed) report.made.push_back({.group = group, .ranks = {}});
    }
  }
  if (report.calls.empty() && report.progress.empty() && report.made.empty()) return std::nullopt;
  report.generation = generation;
  if (report.calls.empty()) return report;
  report.stall = options_.stall;
  report.device_stall = options_.device_stall;
  std::size_t matched = 0;
  for (WaitingCall& call : report.calls) {
    call.blocked = IsBlockedIn(call, callers);
    matched += call.blocked ? 1 : 0;
  }
  // A thread in an operation of which nothing was told yet may be about to go on.
  report.blocked =
      callers.all && matched >= callers.blocked.size() && HasAllInFlight(report.calls, callers);
  report.threads = callers.token;
  may_act_ = callers.may_act;
  // Whatever of this ends may wake a parked thread, or run a callback.
  if (report.blocked) {
    for (WaitingCall& call : report.calls) call.blocked = true;
  }
  const WaitingCall& oldest = report.calls.front();
  report.tell = IsLineDue(oldest.operation.age, now);
  if (report.tell) {
    last_line_ = now;
    asked_ = now;
    asked_about_ = oldest;
    asked_about_since_ = now - oldest.operation.age;
  }
  return report;
}

std::vector<WaitingCall> WaitDesk::CallsOf(std::uint64_t generation, Instant now) const {
  const std::lock_guard lock(mutex_);
  std::vector<WaitingCall> calls = Calls(generation, now);
  std::erase_if(calls, [&](const WaitingCall& call) {
    return now - told_.at(call.group).when > kWaitingLife;
  });
  return calls;
}

std::optional<WaitingReport> WaitDesk::JoinReport(Instant since, Instant now) {
  if (!IsLineDue(now - since, now)) return std::nullopt;
  last_line_ = now;
  asked_ = now;
  asked_about_.reset();
  asked_about_since_ = since;
  WaitingReport report;
  report.tell = true;
  return report;
}

bool WaitDesk::IsLineDue(Duration age, Instant now) const {
  return age >= options_.wait_log &&
         (last_line_ == Instant::min() || now - last_line_ >= options_.wait_log);
}

std::string WaitDesk::Line(const LateNotice& notice, Instant now) {
  const bool of_join = notice.generation == 0;
  const std::string hint = notice.elsewhere.empty() ? "" : StrCat("; ", notice.elsewhere);
  if (of_join && notice.world_size == 0 && !hint.empty()) {  // Unasked.
    return StrCat("rank ", options_.rank, " waits to join", hint);
  }
  if (!asked_ || of_join == asked_about_.has_value()) return {};
  asked_.reset();
  if (of_join && notice.world_size == 0) return {};
  const auto age = WholeSeconds(now - asked_about_since_);
  if (of_join) {
    return StrCat("rank ", options_.rank, " has waited ", age, " s to join: ", notice.ready, " of ",
                  notice.world_size, " ranks are ready; waiting for ", Names(notice), hint);
  }
  const std::string line =
      StrCat("rank ", options_.rank, " has waited ", age, " s in ", CallText(*asked_about_));
  const std::string actor = may_act_.empty() ? "" : StrCat("; here may still act: ", may_act_);
  if (notice.ranks.empty()) return StrCat(line, ": every rank has entered it", actor);
  return StrCat(line, asked_about_->operation.any ? " for one of " : " for ", Names(notice), actor);
}

std::vector<int> WaitDesk::Silent() const {
  return asked_about_ ? asked_about_->operation.silent : std::vector<int>();
}

std::string WaitDesk::OverdueLine(Instant now) {
  if (!asked_ || now - *asked_ < kNoticePatience) return {};
  asked_.reset();
  const auto age = WholeSeconds(now - asked_about_since_);
  if (!asked_about_) {
    return StrCat(options_.rank == kSpareRank ? "this spare" : StrCat("rank ", options_.rank),
                  " has waited ", age, " s to join; the store does not say for whom");
  }
  const WaitingOperation& operation = asked_about_->operation;
  std::vector<int> awaited;  // They, or their devices.
  std::set_union(operation.missing.begin(), operation.missing.end(), operation.not_begun.begin(),
                 operation.not_begun.end(), std::back_inserter(awaited));
  return StrCat("rank ", options_.rank, " has waited ", age, " s in ", CallText(*asked_about_),
                awaited.empty() ? "" : StrCat(" for ", RanksText(awaited)),
                "; the store does not say where they are");
}

}  // namespace resilient::recovery
