#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/recovery/session_impl.h"

namespace resilient::recovery {

void SessionImpl::StepLocked(const Event& event) {
  const SessionState from = machine_.state();
  const std::uint64_t ended_before = machine_.ended_generation();
  const std::uint64_t events_before = events_.last();
  for (Action& action : machine_.Step(event, clock_.Now())) {
    // The two that operations must see at once, before the control thread gets to the rest.
    if (action.kind == ActionKind::kBuildWorld) {
      TakePlaceLocked(action.view);
      flight_ = std::make_shared<Flight>(action.generation);
    }
    if (action.kind == ActionKind::kOpenGate) wish_ = {0, options_.seat_wait};
    if (action.kind == ActionKind::kAbortCommunicators && flight_ != nullptr) {
      flight_->End(action.cause);
    }
    actions_.push_back(std::move(action));
  }
  NoteProgressLocked(event, from, ended_before);
  if (machine_.state() != from || events_.last() != events_before) changed_.notify_all();
}

void SessionImpl::NoteProgressLocked(const Event& event, SessionState from,
                                     std::uint64_t ended_before) {
  const double wall_s = clock_.WallSeconds();
  NoteEndLocked(event, from, ended_before, wall_s);
  NoteStateLocked(from, wall_s);
  std::string line = incidents_.Mark(from, machine_.state(), machine_.view().generation, wall_s);
  if (!line.empty()) {
    log_lines_.emplace_back(LogLevel::kInfo,
                            LogRecord{.event = {}, .fields = {}, .text = std::move(line)});
  }
  for (LogRecord& incident : incidents_.TakeEnded()) {
    log_lines_.emplace_back(LogLevel::kWarn, std::move(incident));
  }
}

void SessionImpl::NoteStateLocked(SessionState from, double wall_s) {
  const SessionState to = machine_.state();
  if (to == from) return;
  const auto add = [&](SessionEvent::Kind kind, const Status& cause) {
    AddEventLocked(kind, machine_.view().generation, cause, wall_s);
  };
  switch (to) {
    case SessionState::kReady:
      if (incidents_.open()) add(SessionEvent::Kind::kRebuilt, {});
      return;
    case SessionState::kRunning:
      acknowledged_ = MembershipLocked();
      acknowledged_.fence_token = machine_.view().fence_token;
      return add(SessionEvent::Kind::kRunning, {});
    case SessionState::kFenced:
      return add(SessionEvent::Kind::kRefused, machine_.first_cause());
    case SessionState::kFailed:
      return add(SessionEvent::Kind::kFailed, machine_.first_cause());
    case SessionState::kClosed:
      return add(SessionEvent::Kind::kClosed, {});
    case SessionState::kInit:
    case SessionState::kJoining:
    case SessionState::kBuilding:
    case SessionState::kAborting:
      return;
  }
}

void SessionImpl::AddEventLocked(SessionEvent::Kind kind, std::uint64_t generation,
                                 const Status& cause, double wall_s) {
  events_.Add({.kind = kind, .generation = generation, .cause = cause, .unix_s = wall_s});
}

void SessionImpl::NoteEndLocked(const Event& event, SessionState from, std::uint64_t ended_before,
                                double wall_s) {
  const View& view = machine_.view();
  std::uint64_t generation = machine_.ended_generation();
  Status cause = machine_.first_cause();
  IncidentSource source = IncidentSource::kView;
  if (event.kind == EventKind::kFence) {
    cause = event.status;
    source = IncidentSource::kFence;
  }
  if (generation <= ended_before) {
    // Given up by the service: for this process that is the end of what it was in, fence or not.
    const bool lost = event.kind == EventKind::kSessionLost && from != machine_.state() &&
                      view.generation > generation;
    if (!lost) return;
    generation = view.generation;
    source = IncidentSource::kSession;
  }
  incidents_.Begin(view, generation, source, cause, wall_s);
  AddEventLocked(SessionEvent::Kind::kFenced, generation, cause, wall_s);
  log_lines_.emplace_back(LogLevel::kInfo, LogRecord{.event = {},
                                                     .fields = {},
                                                     .text = StrCat("generation ", generation,
                                                                    " ended: ", cause.ToString())});
}

void SessionImpl::StepFromCaller(const Event& event, Lock* lock) {
  StepLocked(event);
  if (actions_.empty() && log_lines_.empty()) return;
  lock->unlock();
  // False after Close: what is left to do does not matter any more.
  (void)rendezvous_->Post([this] { Drain(); });
  lock->lock();
}

void SessionImpl::Apply(const Event& event) {
  {
    Lock lock(mutex_);
    StepLocked(event);
  }
  Drain();
}

void SessionImpl::Drain() {
  OwnThreadScope scope(this);
  for (;;) {
    const bool wrote = WriteLines();
    Action action;
    bool have_action = false;
    {
      Lock lock(mutex_);
      if (!actions_.empty()) {
        action = std::move(actions_.front());
        actions_.pop_front();
        have_action = true;
      }
    }
    if (have_action) {
      Perform(action);
    } else if (!wrote) {
      return;
    }
  }
}

// Not under the mutex: the log may be a pipe that nobody reads. False: there was nothing to write.
bool SessionImpl::WriteLines() {
  std::deque<std::pair<LogLevel, LogRecord>> lines;
  {
    Lock lock(mutex_);
    lines.swap(log_lines_);
  }
  for (const auto& [level, line] : lines) {
    if (LogEnabled(level)) LogLine(level, line);
  }
  return !lines.empty();
}

void SessionImpl::Perform(const Action& action) {
  switch (action.kind) {
    case ActionKind::kSendJoin:
      SendJoin(action);
      return;
    case ActionKind::kBuildWorld:
      BuildWorld(action.view);
      return;
    case ActionKind::kAbortCommunicators:
      AbortCommunicators(action);
      return;
    case ActionKind::kSendReady:
      rendezvous_->Ready(action.generation);
      return;
    case ActionKind::kReportBuildFailed:
      rendezvous_->Send({ReportKind::kCommFailed, action.generation, -1, action.cause});
      return;
    case ActionKind::kOpenGate:
      // The state alone lets operations in; the first time there is nothing that was left behind.
      if (opened_before_.exchange(true)) rendezvous_->Acknowledge(action.generation);
      return;
    case ActionKind::kFail:
      if (EndIsAnnounced()) return;  // It is this process that ends; it has said why.
      RESILIENT_LOG(kError, "recovery gave up after generation ", action.generation, " of rank ",
                    rank_.load(), ": ", action.cause.ToString());
      return;
  }
}

void SessionImpl::SendJoin(const Action& action) {
  JoinRequest request;
  request.rank = rank_;
  request.world_size = world_size_;
  request.endpoint = EncodeSessionEndpoint(host_watch_.Offer(factory_->endpoint()));
  request.join_timeout = options_.init_timeout;
  request.generation = action.generation;
  request.number = action.join;
  request.device = options_.device;
  request.spare_if_taken = options_.spare_if_taken;
  {
    Lock lock(mutex_);
    request.seat_wait = wish_.seat_wait;
    request.min_world = wish_.min_world;
  }
  rendezvous_->Join(request);
}

// A world that has been resized has its ranks numbered anew, and a spare gets a rank: this one
// finds itself by its endpoint, the world's group follows, and what was made of the old numbers is
// no more.
void SessionImpl::TakePlaceLocked(const View& view) {
  const auto size = static_cast<int>(view.members.size());
  const std::string own = factory_->endpoint();
  const auto is_own = [&own](const Member& member) {
    return DecodeSessionEndpoint(member.endpoint).communicator == own;
  };
  const int rank = rank_;
  if (size == world_size_ && rank >= 0 && rank < size &&
      is_own(view.members[static_cast<std::size_t>(rank)])) {
    return;
  }
  const auto place = std::find_if(view.members.begin(), view.members.end(), is_own);
  if (place == view.members.end()) return;  // BuildWorld says that it is not in it.
  rank_ = place->rank;
  world_size_ = size;
  incidents_.set_reporter_rank(rank_);
  waits_.set_rank(rank_);
  for (auto& [name, slot] : groups_) {
    slot->outdated = name != kWorldGroup;
    if (slot->outdated) continue;
    slot->rank = rank_;
    slot->ranks.resize(view.members.size());
    std::iota(slot->ranks.begin(), slot->ranks.end(), 0);
  }
}

void SessionImpl::BuildWorld(const View& view) {
  std::vector<int> ranks;
  ranks.reserve(view.members.size());
  for (const Member& member : view.members) ranks.push_back(member.rank);
  const bool in_view = static_cast<int>(ranks.size()) == world_size_;
  Result<GroupSpec> spec = SpecOf(kWorldGroup, ranks, in_view ? rank_.load() : -1, view);
  Status failed = spec.status();
  if (failed.ok()) host_watch_.Follow(view, rank_);
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Flight> flight;
  bool wanted = false;
  if (failed.ok()) {
    spec->nccl = options_.nccl;
    std::lock_guard create_lock(create_mutex_);
    {
      Lock lock(mutex_);
      if (machine_.state() == SessionState::kClosed) return;
      flight = flight_;
    }
    communicator = factory_->Create(std::move(spec).value(), flight->cell());
    Lock lock(mutex_);
    wanted = flight_ == flight && !flight->Ended() && machine_.state() != SessionState::kClosed;
    if (wanted) world_ = communicator;
  }
  if (failed.ok() && communicator == nullptr) {
    failed = Status(StatusCode::kCommFailed, "the world's communicator could not be made");
  }
  if (!failed.ok()) {
    Lock lock(mutex_);
    StepLocked({EventKind::kBuildFailed, view.generation, failed, {}});
    return;  // Drain, which called, goes on with what this asks for.
  }
  // It ended while it was being made.
  if (!wanted) Dismiss(*communicator, flight.get());
}

void SessionImpl::AbortCommunicators(const Action& action) {
  std::shared_ptr<Flight> flight;
  std::vector<std::shared_ptr<Communicator>> communicators;
  {
    Lock lock(mutex_);
    flight = flight_;
    communicators = TakeCommunicatorsLocked();
  }
  // Ends every communicator of the generation at once; Abort is for those that look at it late.
  if (flight != nullptr) flight->cell()->Set(action.cause);
  for (const auto& communicator : communicators) communicator->Abort(action.cause);
  aborting_ = std::move(communicators);
  CheckQuiet();
}

void SessionImpl::PostQuietCheck() {
  (void)rendezvous_->Post([this] {
    CheckQuiet();
    Drain();
  });
}

// Every operation has a record, so the count of those in flight says exactly when nothing of the
// generation touches user memory any more; nothing has to be polled. An abort that hangs in a
// driver uses up the budget of the recovery.
void SessionImpl::CheckQuiet() {
  {
    Lock lock(mutex_);
    if (flight_ == nullptr || !flight_->IsQuiet()) return;
    StepLocked({EventKind::kQuiet, flight_->generation(), {}, {}});
  }
  aborting_.clear();
}

void SessionImpl::OnView(const View& view) { Apply({EventKind::kView, view.generation, {}, view}); }

void SessionImpl::OnRunning(std::uint64_t generation) {
  Apply({EventKind::kRunning, generation, {}, {}});
}

void SessionImpl::OnFence(const Fence& fence) {
  const bool own = fence.cause.code() == StatusCode::kDeviceStalled &&
                   fence.cause.detail().rank == rank_ && IsPresent(fence.generation);
  if (own) {
    // As one that is lost: nothing runs behind a kernel that never ends, in whatever generation.
    hung_device_.OnHangs(clock_.Now());
    LookWhileDeviceHangs();
    return Apply({EventKind::kSessionLost, 0, fence.cause, {}});
  }
  Apply({EventKind::kFence, fence.generation, fence.cause, {}});
}

void SessionImpl::OnJoinRefused(std::uint64_t join, const Status& why) {
  Event refused{EventKind::kJoinRefused, 0, why, {}};
  refused.join = join;
  Apply(refused);
}

void SessionImpl::OnSessionLost(const Status& why) { Apply({EventKind::kSessionLost, 0, why, {}}); }

void SessionImpl::OnConnected(const std::string& group, std::uint64_t generation) {
  if (group != kWorldGroup) return;
  (void)rendezvous_->Post([this, generation] { Apply({EventKind::kBuilt, generation, {}, {}}); });
}

void SessionImpl::OnLinkLost(const std::string& group, std::uint64_t generation, int global_rank,
                             const Status& why) {
  (void)rendezvous_->Post([this, group, generation, global_rank, why] {
    RESILIENT_LOG(kInfo, "the link to rank ", global_rank, " of group '", group, "', generation ",
                  generation, ", is lost: ", why.ToString());
    ReportLink(ReportKind::kLinkLost, generation, global_rank, why);
    if (link_reports_generation_ == generation) lost_links_.Note(group, global_rank);
  });
}

void SessionImpl::OnUnreached(const std::string& group, std::uint64_t generation, int global_rank,
                              const Status& why) {
  (void)rendezvous_->Post([this, group, generation, global_rank, why] {
    RESILIENT_LOG(kInfo, "group '", group, "', generation ", generation, ": ", why.ToString());
    ReportLink(ReportKind::kUnreached, generation, global_rank, why);
    if (!IsPresent(generation)) return;
    const Instant now = clock_.Now();
    Instant& since = unreached_since_.try_emplace(global_rank, now).first->second;
    if (now - since < kUnreachedTold) return;
    since = now;
    RESILIENT_LOG(kWarn, "group '", group, "' of rank ", rank_.load(),
                  " waits for a link: ", why.message(),
                  "; it is tried again as long as that rank lives");
  });
}

void SessionImpl::OnMismatch(const std::string&, std::uint64_t generation, const Status& mismatch) {
  ReportVerdict({ReportKind::kMismatch, generation, mismatch.detail().rank, mismatch});
}

void SessionImpl::OnStalled(const std::string&, std::uint64_t generation, const Status& why) {
  ReportVerdict({ReportKind::kCommFailed, generation, why.detail().rank, why});
  // No call on the device succeeds any more, in whatever generation: the others go on with a
  // process that takes its seat.
  if (why.code() != StatusCode::kDeviceLost) return;
  (void)rendezvous_->Post([this, why] { Apply({EventKind::kSessionLost, 0, why, {}}); });
}

// Not by way of the control thread, which may be late: a program that has its error ends, and what
// ended it must reach the service before its leave does.
void SessionImpl::ReportVerdict(const Report& report) {
  if (IsPresent(report.generation)) rendezvous_->Send(report);
}

// Each group has a link to the rank and each may report it again; the service needs to hear it
// once, and again when its first ping was answered and the link still is down.
void SessionImpl::ReportLink(ReportKind kind, std::uint64_t generation, int rank,
                             const Status& why) {
  if (!IsPresent(generation)) return;
  if (link_reports_generation_ != generation) {
    link_reports_.clear();
    lost_links_.Clear();
    unreached_since_.clear();
    link_reports_generation_ = generation;
  }
  const Instant now = clock_.Now();
  const auto last = link_reports_.find({kind, rank});
  if (last != link_reports_.end() && now - last->second < kLinkReportInterval) return;
  link_reports_[{kind, rank}] = now;
  rendezvous_->Send({kind, generation, rank, why});
}

void SessionImpl::NoteNeed(const OperationRecord& record, const Status& status) {
  Flight& flight = record.flight();
  if (status.code() != StatusCode::kLeft || !record.binding() || flight.Ended()) return;
  const FailureDetail& detail = status.detail();
  if (!flight.NoteLeaver(detail.rank)) return;
  ReportNeed(flight.generation(), detail.rank,
             StrCat(record.Name(), " #", detail.seq, " of group '", detail.group, "'"));
}

// A goodbye in a group reaches its peers before the leave reaches the service, if it is one.
void SessionImpl::ReportNeed(std::uint64_t generation, int rank, const std::string& what) {
  ReportVerdict({ReportKind::kNeedsLeaver, generation, rank, Status(StatusCode::kLeft, what)});
}

// Also while no generation runs: the seat of a dead process is to be filled, whatever it was in.
void SessionImpl::ReportDeath(const Neighbour& neighbour, const ProcessEnd& end) {
  FailureDetail detail;
  detail.rank = neighbour.rank;
  detail.host = neighbour.host;
  detail.pid = neighbour.token.pid;
  Report report;
  report.kind = ReportKind::kProcessDied;
  report.accused_rank = neighbour.rank;
  report.accused_incarnation = neighbour.incarnation;
  report.wait_status = end.wait_status;
  {
    Lock lock(mutex_);
    if (machine_.state() == SessionState::kClosed) return;
    report.generation = machine_.view().generation;
  }
  detail.generation = report.generation;
  report.status = Status(StatusCode::kRankLost,
                         StrCat("rank ", neighbour.rank, " (pid ", neighbour.token.pid,
                                ") was seen to end by rank ", rank_.load(), " of its host"),
                         std::move(detail));
  RESILIENT_LOG(kInfo, report.status.message());
  rendezvous_->Send(report);
}

bool SessionImpl::EndIsAnnounced() const {
  Lock lock(mutex_);
  return end_announced_;
}

bool SessionImpl::IsPresent(std::uint64_t generation) const {
  Lock lock(mutex_);
  return flight_ != nullptr && flight_->generation() == generation && !flight_->Ended() &&
         machine_.state() != SessionState::kClosed;
}

}  // namespace resilient::recovery
