#include <algorithm>
#include <string_view>
#include <utility>

#include <resilient/exit.h>

#include "runtime/base/log.h"
#include "runtime/recovery/session_impl.h"

namespace resilient::recovery {
namespace {

// A caller inside Run. Owner: its stack. Thread: confined.
struct BlockedRun {
  Session& session;
  const std::string& group;
  const Communicator::KeepWaiting& keep_waiting;
  bool begun = false;

  bool KeepWaiting() {
    if (!std::exchange(begun, true)) session.BeginBlocked(group, false, 0);
    return !keep_waiting || keep_waiting();
  }
  ~BlockedRun() {
    if (begun) session.EndBlocked();
  }
};

Status GroupOutdated(const std::string& group, const View& view) {
  return Status(StatusCode::kFailedPrecondition,
                StrCat("group '", group,
                       "' was made of ranks of a world that had more of them; since "
                       "generation ",
                       view.generation, " it has ", view.members.size(),
                       ", numbered anew: make the group anew"));
}

std::string_view WhyClosed() {
  if (!ExitHasBegun()) return "";
  return "; the process is ending, and what runs after the session's goodbye, as an exit handler "
         "does that was registered before torch was imported, cannot use it any more";
}

Status GroupClosed(const std::string& group) {
  return Status(StatusCode::kFailedPrecondition,
                StrCat("group '", group, "' is closed on this rank"));
}

}  // namespace

Status SessionImpl::NotRunningLocked(const std::string& group, const std::string& what) const {
  if (machine_.state() == SessionState::kClosed || leaving_) {
    return Status(StatusCode::kFailedPrecondition,
                  StrCat("the session is closed on this rank: ", what, " of group '", group,
                         "' was not started", WhyClosed()));
  }
  if (const Status cause = machine_.failure(); !cause.ok()) return NotStarted(cause, group, what);
  return Status(StatusCode::kFailedPrecondition,
                StrCat("Init has not returned: ", what, " of group '", group, "' was not started"));
}

Status SessionImpl::CheckNewGroupLocked(const std::string& name,
                                        const std::vector<int>& ranks) const {
  // Behind a shut gate a group may be made: what fails there is its operations. So a fence between
  // Init and the creation of the world's group meets the caller where he expects one.
  const SessionState state = machine_.state();
  if (!machine_.ever_ran() || state == SessionState::kFailed || state == SessionState::kClosed) {
    return NotRunningLocked(name, "the creation");
  }
  const int world_size = static_cast<int>(machine_.view().members.size());
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  std::string wrong;
  if (name.empty()) {
    wrong = "has no name";
  } else if (name.ends_with("/cuda") || name.ends_with("/control")) {
    wrong = "is called as what serves the devices of another one; take another name";
  } else if (groups_.count(name) != 0) {
    wrong = "exists already";
  } else if (used_names_.count(name) != 0) {
    wrong = "was used and closed in this generation already; take another name";
  } else if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    wrong = "names a rank twice";
  } else if (!sorted.empty() && (sorted.front() < 0 || sorted.back() >= world_size)) {
    wrong = StrCat("names a rank outside the world of ", world_size);
  } else if (std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) {
    wrong = StrCat("does not contain this rank, ", rank_.load());
  } else if (name == kWorldGroup &&
             (ranks != sorted || static_cast<int>(ranks.size()) != world_size)) {
    wrong = "is the world's and must name all its ranks in order";
  }
  if (!wrong.empty()) {
    return Status(StatusCode::kInvalidArgument, StrCat("group '", name, "' ", wrong));
  }
  if (groups_.size() >= kOpenGroupsMax || used_names_.size() >= kGroupNamesPerGenerationMax) {
    return Status(
        StatusCode::kResourceExhausted,
        StrCat("group '", name, "' is one too many: at most ", kOpenGroupsMax,
               " groups may be open and ", kGroupNamesPerGenerationMax, " made in one generation"));
  }
  return Status::Ok();
}

Result<std::shared_ptr<Group>> SessionImpl::CreateGroup(std::string name, std::vector<int> ranks,
                                                        NcclOptions nccl, std::string made_at) {
  if (mark_.InChild()) return ForkedStatus();
  RESILIENT_RETURN_IF_ERROR(CheckNcclOptions(nccl));
  if (name == kWorldGroup) nccl = options_.nccl;  // Its communicator is made before it is.
  Lock lock(mutex_);
  RESILIENT_RETURN_IF_ERROR(CheckNewGroupLocked(name, ranks));
  const auto position = std::find(ranks.begin(), ranks.end(), rank_);
  const int rank = static_cast<int>(position - ranks.begin());
  auto group = std::make_shared<GroupImpl>(shared_from_this(), std::move(name), std::move(ranks),
                                           rank, std::move(nccl), std::move(made_at));
  groups_[group->name()] = &group->slot();
  return std::shared_ptr<Group>(std::move(group));
}

Result<std::uint64_t> SessionImpl::Submit(GroupSlot& slot, Operation operation, Completion done) {
  if (mark_.InChild()) return ForkedStatus();
  Result<Entry> entry = Enter(slot, operation);
  if (!entry.ok()) return entry.status();
  auto record = std::make_shared<OperationRecord>(entry->flight, bell_, slot.name, operation);
  Result<std::uint64_t> seq = Status(StatusCode::kInternal, "not submitted");
  {
    std::lock_guard lock(record->submit_mutex());
    seq = entry->communicator->Submit(std::move(operation), Wrap(record, std::move(done)));
    if (seq.ok()) record->set_seq(*seq);
  }
  if (seq.ok()) return seq;
  return Refused(*record, slot.name, seq.status());
}

Result<std::vector<std::uint64_t>> SessionImpl::SubmitBatch(
    GroupSlot& slot, std::vector<Communicator::Submission> batch) {
  if (mark_.InChild()) return ForkedStatus();
  if (batch.empty()) return std::vector<std::uint64_t>{};
  Result<Entry> entry = Enter(slot, batch.front().op);
  if (!entry.ok()) return entry.status();
  for (std::size_t i = 1; i < batch.size(); ++i) entry->flight->Enter();
  std::vector<std::shared_ptr<OperationRecord>> records;
  std::vector<std::unique_lock<std::mutex>> locks;
  for (Communicator::Submission& one : batch) {
    records.push_back(std::make_shared<OperationRecord>(entry->flight, bell_, slot.name, one.op));
    locks.emplace_back(records.back()->submit_mutex());
    one.done = Wrap(records.back(), std::move(one.done));
  }
  auto seqs = entry->communicator->SubmitBatch(std::move(batch));
  if (seqs.ok()) {
    for (std::size_t i = 0; i < records.size(); ++i) records[i]->set_seq((*seqs)[i]);
    return seqs;
  }
  locks.clear();
  Status refused = seqs.status();
  for (const auto& record : records) refused = Refused(*record, slot.name, refused);
  return refused;
}

Result<Communicator::Ran> SessionImpl::Run(GroupSlot& slot, Operation operation, Completion done,
                                           const Communicator::KeepWaiting& keep_waiting) {
  if (mark_.InChild()) return ForkedStatus();
  // Asked for the first time when it has waited for a while: then the thread counts as blocked.
  BlockedRun blocked{*this, slot.name, keep_waiting};
  const Communicator::KeepWaiting noting = [&blocked] { return blocked.KeepWaiting(); };
  Result<Entry> entry = Enter(slot, operation);
  if (!entry.ok()) return entry.status();
  auto record = std::make_shared<OperationRecord>(entry->flight, bell_, slot.name, operation);
  Result<Communicator::Ran> ran = Status(StatusCode::kInternal, "not run");
  {
    std::lock_guard lock(record->submit_mutex());
    ran = entry->communicator->Run(std::move(operation), Wrap(record, std::move(done)), noting);
    if (ran.ok()) record->set_seq(ran->seq);
  }
  if (!ran.ok()) return Refused(*record, slot.name, ran.status());
  if (ran->outcome) {
    waits_.NoteEnd(record->communicator(), record->point_to_point());
    NoteNeed(*record, *ran->outcome);
    ran->outcome = record->Outcome(*ran->outcome);
  }
  return ran;
}

// What a caller is told of an operation that the communicator did not take.
Status SessionImpl::Refused(const OperationRecord& record, const std::string& group, Status why) {
  Flight& flight = record.flight();
  if (flight.Ended()) {
    why = NotStarted(flight.cause(), group, record.Name());
  } else if (IsOfCommunicator(why.code())) {
    flight.NoteBroken();
  } else {
    NoteNeed(record, why);
  }
  return why;
}

// Lets one operation into the present generation, or says why not.
Result<SessionImpl::Entry> SessionImpl::Enter(GroupSlot& slot, const Operation& operation) {
  if (options_.observer != nullptr) options_.observer->NoteOperation();
  for (;;) {
    if (!pause_watch_.MayAct(clock_.Now())) {
      RESILIENT_RETURN_IF_ERROR(AwaitConfirmation(slot, operation));
    }
    Lock lock(mutex_);
    if (machine_.state() != SessionState::kRunning) {
      // Nobody may be waiting in Rebuild to notice that the budget is spent.
      StepFromCaller({EventKind::kTick, 0, {}, {}}, &lock);
    }
    if (machine_.state() != SessionState::kRunning || leaving_) {
      return NotRunningLocked(slot.name, Describe(operation));
    }
    if (slot.closed) return GroupClosed(slot.name);
    if (slot.outdated) return GroupOutdated(slot.name, machine_.view());
    if (slot.aborted_in == flight_->generation()) return slot.aborted;
    if (const auto& communicator = CommunicatorLocked(slot); communicator != nullptr) {
      flight_->Enter();
      return Entry{flight_, communicator};
    }
    const std::shared_ptr<Flight> flight = flight_;
    lock.unlock();
    // Then look again: a fence may have come meanwhile.
    RESILIENT_RETURN_IF_ERROR(CreateCommunicator(slot, *flight));
  }
}

// Behind a pause of this process. OK also when the session has come to know of a fence: the caller
// looks at its state.
Status SessionImpl::AwaitConfirmation(const GroupSlot& slot, const Operation& operation) {
  const Deadline deadline = Deadline::After(clock_.Now(), ladder_.answer);
  for (;;) {
    {
      Lock lock(mutex_);
      if (machine_.state() != SessionState::kRunning) return Status::Ok();
      const Instant now = clock_.Now();
      if (pause_watch_.MayAct(now)) return Status::Ok();
      if (deadline.ExpiredAt(now)) break;
      changed_.wait_for(lock, std::min<Duration>(Millis(kInterruptPollMs), deadline.LeftAt(now)));
    }
    if (options_.interrupt) RESILIENT_RETURN_IF_ERROR(options_.interrupt());
  }
  return Status(StatusCode::kStoreLost,
                StrCat("this process was paused (stopped, suspended or starved of processor time), "
                       "and the store has not said within the budget of ",
                       ToSeconds(ladder_.answer), " s whether the job goes on without it: ",
                       Describe(operation), " of group '", slot.name,
                       "' was not started; see whether the store can be reached, and try again"));
}

std::shared_ptr<Communicator>& SessionImpl::CommunicatorLocked(GroupSlot& slot) {
  return slot.name == kWorldGroup ? world_ : slot.communicator;
}

// OK also when somebody else made it, or when it is not wanted any more: the caller looks again.
Status SessionImpl::CreateCommunicator(GroupSlot& slot, const Flight& flight) {
  std::lock_guard create_lock(create_mutex_);
  GroupSpec spec;
  {
    Lock lock(mutex_);
    if (machine_.state() != SessionState::kRunning || flight_.get() != &flight || slot.closed ||
        CommunicatorLocked(slot) != nullptr) {
      return Status::Ok();
    }
    Result<GroupSpec> made = SpecOf(slot.name, slot.ranks, slot.rank, machine_.view());
    if (!made.ok()) return made.status();
    spec = std::move(made).value();
    spec.nccl = slot.nccl;
    spec.made_at = slot.made_at;
  }
  std::shared_ptr<Communicator> communicator = factory_->Create(std::move(spec), flight.cell());
  if (communicator == nullptr) {
    return Status(StatusCode::kCommFailed,
                  StrCat("the communicator of group '", slot.name, "' could not be made"));
  }
  {
    Lock lock(mutex_);
    if (machine_.state() == SessionState::kRunning && flight_.get() == &flight && !slot.closed) {
      slot.communicator = std::move(communicator);
      used_names_.try_emplace(slot.name, RanksOfGroup(slot.ranks, slot.made_at));
      return Status::Ok();
    }
  }
  Dismiss(*communicator, &flight);
  return Status::Ok();
}

Result<GroupSpec> SessionImpl::SpecOf(const std::string& name, const std::vector<int>& ranks,
                                      int rank, const View& view) const {
  GroupSpec spec;
  spec.name = name;
  spec.generation = view.generation;
  spec.attempt = view.attempt;
  spec.secret = view.secret;
  spec.rank = rank;
  for (const int global_rank : ranks) {
    const auto member =
        std::find_if(view.members.begin(), view.members.end(),
                     [global_rank](const Member& held) { return held.rank == global_rank; });
    if (member == view.members.end()) {
      return Status(
          StatusCode::kFailedPrecondition,
          StrCat("rank ", global_rank, " of group '", name, "' is not in the world of generation ",
                 view.generation, "; make the group anew from the ranks that are"));
    }
    spec.members.push_back({member->rank, DecodeSessionEndpoint(member->endpoint).communicator,
                            member->host, member->pid});
  }
  if (rank < 0 || rank >= static_cast<int>(spec.members.size())) {
    return Status(StatusCode::kProtocol,
                  StrCat("this process is not in the view of generation ", view.generation,
                         ", which has ", view.members.size(), " members"));
  }
  return spec;
}

Completion SessionImpl::Wrap(std::shared_ptr<OperationRecord> record, Completion done) {
  // The session outlives its communicators, and they run every completion before they end.
  return [this, record = std::move(record), done = std::move(done)](const Status& status) {
    OwnThreadScope scope(this);
    waits_.NoteEnd(record->communicator(), record->point_to_point());
    NoteNeed(*record, status);
    if (done) done(record->Outcome(status));
  };
}

int SessionImpl::RankIn(const GroupSlot& slot) const {
  if (mark_.InChild()) return slot.rank;  // No lock: another thread may have held it at the fork.
  Lock lock(mutex_);
  return slot.rank;
}

int SessionImpl::SizeOf(const GroupSlot& slot) const {
  if (mark_.InChild()) return static_cast<int>(slot.ranks.size());
  Lock lock(mutex_);
  return static_cast<int>(slot.ranks.size());
}

Status SessionImpl::UsableOf(const GroupSlot& slot) const {
  if (mark_.InChild()) return ForkedStatus();
  Lock lock(mutex_);
  if (slot.closed) return GroupClosed(slot.name);
  return slot.outdated ? GroupOutdated(slot.name, machine_.view()) : Status::Ok();
}

void SessionImpl::CloseGroup(GroupSlot& slot) {
  if (mark_.InChild()) return;
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Flight> flight;
  {
    Lock lock(mutex_);
    if (slot.closed) return;
    slot.closed = true;
    groups_.erase(slot.name);
    communicator = std::move(CommunicatorLocked(slot));
    flight = flight_;
  }
  if (communicator == nullptr) return;
  Dismiss(*communicator, flight.get());
  std::shared_ptr<Communicator> oldest;  // Destroyed outside the lock.
  Lock lock(mutex_);
  used_names_.try_emplace(slot.name, RanksOfGroup(slot.ranks, slot.made_at));
  left_.push_back(std::move(communicator));
  if (left_.size() <= kLeftCommunicatorsMax) return;
  const auto free =
      std::find_if(left_.begin(), left_.end(), [](const auto& one) { return !one->HoldsDevice(); });
  if (free == left_.end()) return;
  oldest = std::move(*free);
  left_.erase(free);
}

void SessionImpl::AbortGroup(GroupSlot& slot, const std::string& why) {
  if (mark_.InChild()) return;
  const int rank = rank_;
  FailureDetail detail;
  detail.rank = rank;
  detail.host = opener_host_;
  detail.pid = opener_pid_;
  detail.group = slot.name;
  detail.since_unix_s = clock_.WallSeconds();
  std::uint64_t generation = 0;
  Status cause;
  std::shared_ptr<Communicator> communicator;
  {
    Lock lock(mutex_);
    if (slot.closed || flight_ == nullptr || flight_->Ended() ||
        machine_.state() != SessionState::kRunning) {
      return;
    }
    generation = detail.generation = flight_->generation();
    cause =
        Status(StatusCode::kCommFailed,
               StrCat("rank ", rank, " (host ", opener_host_, ", pid ", opener_pid_,
                      ") aborted group '", slot.name, "' in generation ", generation, ": ", why),
               std::move(detail));
    flight_->NoteBroken();  // Also where no operation runs that could say so.
    slot.aborted_in = generation;
    slot.aborted = cause;
    communicator = CommunicatorLocked(slot);
  }
  // The service ends the generation for all; this group ends here and now, also when the service
  // cannot be reached.
  rendezvous_->Send({ReportKind::kCommFailed, generation, rank, cause});
  if (communicator != nullptr) communicator->Abort(cause);
}

std::vector<std::shared_ptr<Communicator>> SessionImpl::CommunicatorsLocked() const {
  std::vector<std::shared_ptr<Communicator>> all(left_.begin(), left_.end());
  if (world_ != nullptr) all.push_back(world_);
  for (const auto& [name, slot] : groups_) {
    if (slot->communicator != nullptr) all.push_back(slot->communicator);
  }
  return all;
}

std::vector<std::shared_ptr<Communicator>> SessionImpl::TakeCommunicatorsLocked() {
  std::vector<std::shared_ptr<Communicator>> taken = CommunicatorsLocked();
  world_ = nullptr;
  for (auto& [name, slot] : groups_) slot->communicator = nullptr;
  left_.clear();
  used_names_.clear();
  return taken;
}

}  // namespace resilient::recovery
