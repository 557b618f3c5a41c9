#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <resilient/exit.h>

#include "runtime/base/log.h"
#include "runtime/comm/endpoint.h"
#include "runtime/net/presence.h"
#include "runtime/recovery/session_impl.h"
#include "runtime/recovery/watch_list.h"

// What this rank waits for, and where it is while others wait for it.
namespace resilient::recovery {

void SessionImpl::OnWaiting(const std::string& group, std::uint64_t generation,
                            std::vector<WaitingOperation> waiting) {
  waits_.Note(group, generation, std::move(waiting), clock_.Now());
  PostTellWaiting();
}

void SessionImpl::OnProgress(std::uint64_t generation, GroupProgress progress) {
  waits_.NoteProgress(generation, std::move(progress));
  PostTellWaiting();
}

void SessionImpl::PostTellWaiting() {
  if (waiting_posted_.exchange(true)) return;  // What is told next has it all.
  (void)rendezvous_->Post([this] {
    waiting_posted_ = false;
    TellWaiting(clock_.Now(), false);
  });
}

void SessionImpl::TellWaiting(Instant now, bool again) {
  std::shared_ptr<Flight> flight;
  {
    Lock lock(mutex_);
    if (machine_.state() != SessionState::kRunning || flight_ == nullptr || flight_->Ended())
      return;
    flight = flight_;
  }
  if (!waits_.HasAny(flight->generation(), now)) return;
  Callers::Snapshot callers = callers_.Look();
  const Census census = census_.Look(callers.threads, now);
  callers.may_act = census.may_act;
  // What stands for so long may be judged, whoever might still act.
  const bool stands = options_.stall > Duration::zero() && no_progress_ >= options_.stall &&
                      now - no_progress_told_ <= kWaitingLife;
  callers.all = census.may_act.empty() || stands;
  callers.token = census.token;
  // Last: what has entered before somebody was seen to sleep is counted.
  callers.in_flight = flight->in_flight();
  auto report = waits_.Report(flight->generation(), callers, now);
  const bool answers = report && (!report->progress.empty() || !report->made.empty());
  const bool news = report && (report->blocked || report->tell || answers);
  if (report) AddMade(&*report);
  if (report && (!again || news)) rendezvous_->Tell(*report);
  if (report && link_reports_generation_ == report->generation) {
    for (const Need& need : lost_links_.NeededBy(report->calls)) {
      ReportLink(ReportKind::kNeedsLeaver, report->generation, need.rank,
                 Status(StatusCode::kLeft, need.what));
    }
  }
  if (census.wants_program_threads && census_.MayAsk(now)) AskForThreads();
}

// So that threads of libraries are told from those of the program. The answer comes at once, unless
// native code holds the interpreter's lock; what waits is told again with it.
void SessionImpl::AskForThreads() {
  if (options_.observer == nullptr) return;
  options_.observer->Ask([session = weak_from_this()](const Whereabouts& whereabouts) {
    const std::shared_ptr<SessionImpl> self = session.lock();
    if (self == nullptr) return;
    (void)self->rendezvous_->Post(
        [raw = self.get(), threads = whereabouts.threads, no_progress = whereabouts.no_progress] {
          const Instant now = raw->clock_.Now();
          raw->census_.Learn(threads, now);
          raw->no_progress_ = no_progress;
          raw->no_progress_told_ = now;
          raw->TellWaiting(now, true);
        });
  });
}

void SessionImpl::OnBeat(Instant now, Instant contact, Duration lease) {
  pause_watch_.OnBeat(now, lease);
  outage_.OnBeat(now, contact, lease);
  if (outage_.lasts() > lease) LookWithoutStore(now, lease);
  if (hung_device_.hangs()) LookWhileDeviceHangs();
  bool joining = false;
  bool first = false;
  {
    Lock lock(mutex_);
    contact_ = contact;
    changed_.notify_all();  // Whoever doubted that this thread runs.
    joining = machine_.state() == SessionState::kJoining;
    first = !machine_.ever_ran();
  }
  if (joining) {
    TellJoining(first, now);
  } else {
    joining_since_.reset();
  }
  if (const std::string line = waits_.OverdueLine(now); !line.empty()) {
    RESILIENT_LOG(kWarn, line);
  }
}

void SessionImpl::LookWithoutStore(Instant now, Duration lease) {
  View view;
  Status cause;
  bool rebuilding = false;
  {
    Lock lock(mutex_);
    rebuilding = machine_.ever_ran() && machine_.state() == SessionState::kJoining;
    const bool running =
        machine_.state() == SessionState::kRunning && flight_ != nullptr && !flight_->Ended();
    if (!running && !rebuilding) return;
    view = machine_.view();
    cause = machine_.first_cause();
  }
  std::optional<Status> verdict;
  if (rebuilding) {
    verdict = outage_.RebuildVerdict(rendezvous_->service(), cause);
  } else {
    const std::vector<WaitingCall> calls = waits_.CallsOf(view.generation, now);
    const bool links_are_its = link_reports_generation_ == view.generation;
    verdict = outage_.Verdict(rendezvous_->service(), calls,
                              links_are_its ? lost_links_ : LostLinks(), view.members);
    if (!verdict) Knock(view, outage_.Round(view.generation, calls), lease);
  }
  if (!verdict) return;
  // For a store that comes back: this process takes part in nothing any more.
  rendezvous_->Send({ReportKind::kEnding, view.generation, rank_.load(), *verdict});
  Event lost{EventKind::kSessionLost, 0, *verdict, {}};
  lost.has_first_cause = rebuilding;
  Apply(lost);
}

void SessionImpl::Knock(const View& view, const std::vector<int>& ranks, Duration patience) {
  if (ranks.empty()) return;
  std::vector<int> all;
  all.reserve(view.members.size());
  for (const Member& member : view.members) all.push_back(member.rank);
  Result<GroupSpec> world = SpecOf(kWorldGroup, all, rank_.load(), view);
  if (!world.ok()) return;  // It was for the communicators, too.
  factory_->Knock(*world, ranks, patience);
}

void SessionImpl::OnKnocked(std::uint64_t generation, int global_rank, const Status& found) {
  (void)rendezvous_->Post([this, generation, global_rank, found] {
    if (!found.ok()) {
      RESILIENT_LOG(kInfo, "rank ", global_rank, " of generation ", generation,
                    " gives no answer over the network: ", found.message());
    }
    outage_.OnKnocked(generation, global_rank, found);
  });
}

void SessionImpl::OnConfirmed() {
  Lock lock(mutex_);
  pause_watch_.OnConfirmed();
  changed_.notify_all();
}

void SessionImpl::TellJoining(bool first, Instant now) {
  if (!joining_since_) joining_since_ = now;
  WaitingReport report = waits_.JoinReport(*joining_since_, now).value_or(WaitingReport{});
  if (first && !options_.presence_job.empty()) {
    RanksOnHost ranks = PresentRanks({options_.presence_job, options_.presence_init},
                                     options_.world_size, options_.rank);
    report.present = std::move(ranks.present);
    report.unverified = std::move(ranks.unverified);
  }
  const bool sees = !report.present.empty() || !report.unverified.empty();
  if (report.tell || sees) rendezvous_->Tell(report);
}

// What serves the devices of a group is called as the group, with a suffix.
std::shared_ptr<Communicator> SessionImpl::CommunicatorOf(std::uint64_t generation,
                                                          const std::string& transport,
                                                          bool* left) {
  Lock lock(mutex_);
  *left = true;
  if (machine_.state() != SessionState::kRunning || flight_ == nullptr || flight_->Ended() ||
      flight_->generation() != generation) {
    return nullptr;
  }
  auto slot = groups_.find(transport);
  if (slot == groups_.end()) slot = groups_.find(transport.substr(0, transport.rfind("/cuda")));
  if (slot == groups_.end()) {
    *left = used_names_.count(transport) != 0;
    return nullptr;
  }
  *left = false;
  return CommunicatorLocked(*slot->second);
}

void SessionImpl::OnAskProgress(std::uint64_t generation, const std::vector<std::string>& groups) {
  using Answer = ProgressAnswer;
  bool known = false;
  for (const std::string& group : groups) {
    bool left = false;
    const auto communicator = CommunicatorOf(generation, group, &left);
    const Answer answer = communicator != nullptr ? communicator->AskProgress(group)
                                                  : (left ? Answer::kOver : Answer::kNotBegun);
    if (answer == Answer::kOver) {
      waits_.NoteAskedOfClosed(generation, group);
      known = true;
    }
    if (answer != Answer::kNotBegun) continue;
    GroupProgress none;
    none.group = group;
    none.exists = false;
    waits_.NoteProgress(generation, std::move(none));
    known = true;
  }
  if (known) TellWaiting(clock_.Now(), false);
}

std::optional<GroupMade> SessionImpl::MadeOfLocked(const std::string& transport) const {
  for (const std::string& name : {transport, transport.substr(0, transport.rfind("/cuda"))}) {
    if (const auto open = groups_.find(name); open != groups_.end()) {
      const GroupSlot& slot = *open->second;
      if (slot.outdated) return std::nullopt;  // Its ranks are those of another world.
      const bool used = (name == kWorldGroup ? world_ : slot.communicator) != nullptr;
      return GroupMade{transport, RanksOfGroup(slot.ranks, slot.made_at), used};
    }
    if (const auto closed = used_names_.find(name); closed != used_names_.end())
      return GroupMade{transport, closed->second, true};
  }
  return std::nullopt;
}

void SessionImpl::AddMade(WaitingReport* report) const {
  std::set<std::string> names;
  for (const WaitingCall& call : report->calls) names.insert(call.group);
  for (const GroupProgress& progress : report->progress) names.insert(progress.group);
  for (const GroupMade& closed : report->made) names.insert(closed.group);
  report->made.clear();
  Lock lock(mutex_);
  for (const std::string& name : names) {
    if (auto made = MadeOfLocked(name)) report->made.push_back(*std::move(made));
  }
}

void SessionImpl::OnAllEntered(std::uint64_t generation, const std::vector<EnteredCall>& calls) {
  for (const EnteredCall& call : calls) {
    bool left = false;
    if (const auto communicator = CommunicatorOf(generation, call.group, &left))
      communicator->NoteAllEntered(call);
  }
}

// Between this host and that of `rank`, with the addresses that the links use.
std::string SessionImpl::LinkText(int rank) const {
  Lock lock(mutex_);
  const auto address = [](const Member& member) {
    return DecodeEndpoint(DecodeSessionEndpoint(member.endpoint).communicator).address;
  };
  std::string here, there;
  for (const Member& member : machine_.view().members) {
    if (member.rank == rank_) here = StrCat(member.host, " (", address(member), ")");
    if (member.rank == rank) there = StrCat(member.host, " (", address(member), ")");
  }
  return StrCat("the link between host ", here, " and host ", there);
}

// All have entered what this rank waits in: those from which nothing comes.
void SessionImpl::AddSilentRanks(LateNotice* notice) const {
  constexpr std::size_t kNamed = 8;
  const std::vector<int> silent = waits_.Silent();
  Lock lock(mutex_);
  const std::vector<Member>& members = machine_.view().members;
  const auto own = std::ranges::find(members, rank_.load(), &Member::rank);
  for (const Member& member : members) {
    if (!std::ranges::binary_search(silent, member.rank)) continue;
    if (notice->ranks.size() == kNamed) {
      ++notice->more;
      continue;
    }
    const bool elsewhere = own != members.end() && own->host != member.host;
    notice->ranks.push_back(
        {member.rank,
         StrCat("rank ", member.rank, " (host ", member.host, ", pid ", member.pid,
                "): has entered it", elsewhere ? "" : ", and nothing has come from it for a while"),
         elsewhere});
  }
}

void SessionImpl::OnLate(const LateNotice& heard) {
  LateNotice notice = heard;
  if (notice.generation != 0 && notice.ranks.empty()) AddSilentRanks(&notice);
  for (LateRank& late : notice.ranks) {
    if (!late.of_network) continue;
    late.text += StrCat("; nothing comes from it over ", LinkText(late.rank),
                        ": look at the network between them");
  }
  if (const std::string line = waits_.Line(notice, clock_.Now()); !line.empty()) {
    RESILIENT_LOG(kWarn, line);
  }
}

// The observer may take seconds, and answers on a thread of its own.
void SessionImpl::OnWhere(std::uint64_t ask) {
  if (options_.observer == nullptr) return rendezvous_->Tell(ask, Whereabouts{});
  options_.observer->Ask([session = weak_from_this(), ask](const Whereabouts& whereabouts) {
    const std::shared_ptr<SessionImpl> self = session.lock();
    if (self == nullptr) return;
    (void)self->rendezvous_->Post([raw = self.get(), ask, whereabouts] {
      raw->hung_device_.OnSeen(whereabouts, raw->clock_.Now());
      raw->rendezvous_->Tell(ask, whereabouts);
    });
  });
}

// Only the end of the process ends a wait for a kernel that never ends, and only then somebody
// takes its seat.
void SessionImpl::LookWhileDeviceHangs() {
  if (options_.observer == nullptr) return;
  options_.observer->Ask([session = weak_from_this()](const Whereabouts& whereabouts) {
    const std::shared_ptr<SessionImpl> self = session.lock();
    if (self == nullptr) return;
    (void)self->rendezvous_->Post([raw = self.get(), whereabouts] {
      raw->hung_device_.OnSeen(whereabouts, raw->clock_.Now());
      const ThreadStack* stuck = raw->hung_device_.StuckIn(raw->options_.budget);
      if (stuck == nullptr) return;
      EndProcess(StrCat("its device hangs, and its ", TextOfThread(stuck->name),
                        " has waited for it since before that was known, for RESILIENT_BUDGET (",
                        ToSeconds(raw->options_.budget), " s) by now, in ", stuck->top));
    });
  });
}

}  // namespace resilient::recovery
