#include "store/client/control_client.h"

#include <poll.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <variant>

#include "runtime/base/check.h"
#include "runtime/base/fork_guard.h"
#include "runtime/base/log.h"
#include "runtime/base/random.h"
#include "store/client/fence_token.h"
#include "store/client/identity.h"

namespace resilient::store {
namespace {

constexpr std::size_t kTasksMax = 4096;
constexpr int kBeatsMissed = 2;
constexpr Duration kContactGrace = Millis(500);
// Until a Welcome says otherwise.
constexpr Duration kDefaultBeat = std::chrono::seconds(1);
constexpr Duration kDefaultTtl = std::chrono::seconds(5);

template <typename... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};
template <typename... Handlers>
Overloaded(Handlers...) -> Overloaded<Handlers...>;

Status ClosedWhileItBegan() {
  return {StatusCode::kCancelled, "the session was closed while it began"};
}

}  // namespace

ControlClient::ControlClient(const ConnectOptions& options, std::vector<HostPort> addresses,
                             InterruptCheck interrupt, const Clock& clock)
    : clock_(clock),
      interrupt_(std::move(interrupt)),
      options_(options),
      job_(options.job),
      found_server_(options.expected_server),
      core_(MakeHello(options, Role::kControl)),
      link_(std::move(addresses), RandomSeed()),
      outage_(StrCat("the membership line of job ", options.job), clock.Now()),
      last_tick_(clock.Now()) {}

ControlClient::~ControlClient() { Close(Deadline::At(clock_.Now())); }

Status ControlClient::Start(RendezvousEvents& events, Deadline deadline) {
  const auto interrupt = [this] {
    if (closing()) return ClosedWhileItBegan();
    return interrupt_ ? interrupt_() : Status();
  };
  Result<Credentials> credentials = Credentials::Open(options_, interrupt, clock_, deadline);
  if (!credentials.ok()) return credentials.status();
  link_.Use(std::move(*credentials));
  {
    std::lock_guard lock(join_mutex_);
    RESILIENT_CHECK(events_ == nullptr);
    events_ = &events;
    last_tick_ = clock_.Now();
    thread_ = Thread("res-control", [this] { Run(); });
  }
  Status outcome = AwaitBeginning(deadline);
  if (!outcome.ok()) Close(Deadline::At(clock_.Now()));
  return outcome;
}

Status ControlClient::AwaitBeginning(Deadline deadline) {
  const Instant begun = clock_.Now();
  while (true) {
    Beginning beginning;
    {
      std::lock_guard lock(mutex_);
      if (closing_) return ClosedWhileItBegan();
      beginning = beginning_;
    }
    if (beginning.open) return Status();
    if (beginning.refused) return beginning.trouble;
    const Instant now = clock_.Now();
    if (deadline.ExpiredAt(now)) {
      const bool known = !beginning.trouble.ok();
      return Status(
          known ? beginning.trouble.code() : StatusCode::kUnreachable,
          StrCat(known ? beginning.trouble.message() : "the store did not answer", " (tried for ",
                 SecondsOf(now - begun), " s until the timeout, job ", job_, ")"));
    }
    std::vector<PollEntry> entries{{started_.fd(), POLLIN, 0}};
    const Instant slice = now + Millis(kInterruptPollMs);
    if (PollUntil(entries, clock_, Deadline::At(std::min(deadline.when(), slice))) > 0) {
      started_.Drain();
    }
    if (interrupt_) RESILIENT_RETURN_IF_ERROR(interrupt_());
  }
}

void ControlClient::Join(const JoinRequest& request) {
  Post([this, request] { Submit(JoinOp{request}); });
}

void ControlClient::Ready(std::uint64_t generation) {
  Post([this, generation] { Submit(ReadyOp{generation}); });
}

void ControlClient::Acknowledge(std::uint64_t generation) {
  Post([this, generation] { Submit(ReadyOp{generation, /*acknowledged=*/true}); });
}

void ControlClient::Send(const Report& report) {
  Post([this, report] { Submit(ReportOp{report}); });
}

void ControlClient::Ask(const Report& report, std::function<void(const Status&)> answered) {
  Post([this, report, answered = std::move(answered)] {
    if (const std::uint64_t seq = Submit(ReportOp{report}); seq != 0) {
      asked_.emplace(seq, answered);
    } else if (!lost_) {
      answered(Status(StatusCode::kResourceExhausted, "the membership line is full"));
    }
  });
}

void ControlClient::Tell(const WaitingReport& report) { SendOnce(WaitingOp{report}); }

void ControlClient::Tell(std::uint64_t ask, const Whereabouts& whereabouts) {
  SendOnce(WhereaboutsOp{ask, whereabouts});
}

bool ControlClient::Post(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    if (closing_) return false;
    if (tasks_.size() >= kTasksMax) {
      RESILIENT_LOG(kError, "the control thread of job ", job_, " has ", tasks_.size(),
                    " tasks waiting, the limit: one is dropped; is a task or event blocking it?");
      return false;
    }
    tasks_.push_back(std::move(task));
  }
  wake_.Wake();
  return true;
}

bool ControlClient::closing() {
  std::lock_guard lock(mutex_);
  return closing_;
}

Duration ControlClient::lease() {
  std::lock_guard lock(mutex_);
  return beginning_.lease;
}

void ControlClient::Close(Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    close_deadline_ = closing_ ? std::min(close_deadline_, deadline) : deadline;
    closing_ = true;
  }
  wake_.Wake();
  started_.Wake();
  std::lock_guard lock(join_mutex_);
  thread_.Join();
}

void ControlClient::Run() {
  while (Step()) {
  }
  link_.Close();
}

bool ControlClient::Step() {
  const LinkStep step = link_.NextStep();
  const Instant wake = NextWake(clock_.Now());
  const LinkInput input = Perform(step, wake_, clock_, wake);
  const Instant now = clock_.Now();
  starved_ += std::max(now - std::min(wake, step.due), Duration::zero());
  NotePause(now);
  link_.Advance(input, core_, now, inbox_);
  if (link_.TakeOpened()) OnOpened(now);
  for (ServerMessage& message : inbox_) {
    if (!lost_) Handle(message);
  }
  inbox_.clear();
  if (!link_.open()) OnTrouble();
  if (!lost_) outage_.Note(link_, now);
  TellBeginning();
  RunTasks();
  if (!lost_ && now >= last_beat_event_ + BeatInterval()) TellBeat(now);
  NoteContact(now);
  if (link_.open() && now >= last_beat_ + BeatInterval()) Beat(now);
  return !GoodbyeDone(now);
}

Instant ControlClient::NextWake(Instant now) {
  Instant wake = now + BeatInterval();
  if (link_.open()) wake = std::min(wake, last_beat_ + BeatInterval());
  if (!lost_) wake = std::min(wake, last_beat_event_ + BeatInterval());
  std::lock_guard lock(mutex_);
  if (!tasks_.empty()) return now;
  return closing_ ? std::min(wake, close_deadline_.when()) : wake;
}

// A thread that was not run for half a lease was stopped, suspended or starved together with its
// process. The server hears of it before anything else.
void ControlClient::NotePause(Instant now) {
  const Duration gap = now - std::exchange(last_tick_, now);
  if (gap <= LeaseTtl() / 2) return;
  RESILIENT_LOG(kWarn, "this process was paused for ", SecondsOf(gap),
                " s (stopped, suspended or starved of processor time); its lease is ",
                SecondsOf(LeaseTtl()), " s",
                gap > LeaseTtl() ? ": the store may have given its seat away" : "");
  BeginSilence(now);
  events_->OnPaused();
  confirming_beat_ = beat_ + 1;
  if (link_.open()) Beat(now);
}

void ControlClient::BeginSilence(Instant now) {
  last_contact_ = now;
  last_taken_ = now;
  starved_ = Duration::zero();
}

// Whether the store's host takes the beats. The latest may be on its way: an acknowledgement is
// delayed by up to 0.2 s.
bool ControlClient::HostTakesBeats(Instant now) const {
  return now - last_taken_ < BeatInterval() * 3 / 2;
}

// Whether another connection is tried. Where the store's host takes the beats the network works,
// and the store is busy: a new connection would wait as this one. Only a proxy may have taken them
// for a store that it cannot reach.
bool ControlClient::IsTooLong(Duration silence, Instant now) const {
  if (link_.local()) return false;
  if (silence < kBeatsMissed * BeatInterval() + kContactGrace) return false;
  return !HostTakesBeats(now) || silence >= LeaseTtl() * 7 / 10;
}

void ControlClient::NoteContact(Instant now) {
  if (!link_.open()) return;
  if (std::exchange(received_, link_.received()) != link_.received()) BeginSilence(now);
  if (!link_.unacknowledged()) last_taken_ = now;
  // Where this thread waits for a processor, so may the store: that time says nothing of it.
  const Duration silence = now - last_contact_ - starved_;
  outage_.NoteSilence(link_, silence);
  if (!IsTooLong(silence, now)) return;
  link_.Drop(Status(StatusCode::kUnreachable,
                    StrCat("the store at ", link_.peer(), " answered no heartbeat for ",
                           SecondsOf(silence), " s")),
             now);
  HostTakesBeats(now) ? outage_.NoteReplaced(link_, now) : outage_.Note(link_, now);
}

void ControlClient::Handle(ServerMessage& message) {
  std::visit([this](auto& one) { Handle(one); }, message);
}

void ControlClient::Handle(Event& event) {
  std::visit(Overloaded{
                 [this](View& view) {
                   const std::uint64_t began = link_.welcome().began_unix_ms;
                   view.fence_token = FenceTokenOf(began, view.generation);
                   events_->OnView(view);
                 },
                 [](const SharedViewEvent&) {},  // Of a server; it is decoded as a View.
                 [this](const RunningEvent& running) { events_->OnRunning(running.generation); },
                 [this](const Fence& fence) { events_->OnFence(fence); },
                 [this](const JoinRefusedEvent& refused) {
                   events_->OnJoinRefused(refused.join, refused.why);
                 },
                 [this](const SessionLostEvent& lost) { LoseSession(lost.why); },
                 [this](const HeartbeatAckEvent& acknowledged) {
                   if (confirming_beat_ == 0 || acknowledged.beat < confirming_beat_) return;
                   confirming_beat_ = 0;
                   events_->OnConfirmed();
                 },
                 [this](const PingEvent&) { Beat(last_tick_); },
                 [this](const HeldEvent& event) {
                   TellHeld(event);
                   const auto left = Millis(static_cast<std::int64_t>(
                       std::min<std::uint64_t>(event.job_for_ms, kHoldMax / Millis(1))));
                   held_ = left > Duration::zero();
                   events_->OnHeld(clock_.Now() + left);
                 },
                 [this](const WhereEvent& event) { events_->OnWhere(event.ask); },
                 [this](const LateEvent& event) { events_->OnLate(event.notice); },
                 [this](const AskProgressEvent& event) {
                   events_->OnAskProgress(event.generation, event.groups);
                 },
                 [this](const AllEnteredEvent& event) {
                   events_->OnAllEntered(event.generation, event.calls);
                 },
                 [this](const DrainingEvent& event) {
                   RESILIENT_LOG(kWarn, "the store of job ", job_, " ends: ", event.reason,
                                 "; this process goes on when it is back");
                 },
             },
             event);
}

void ControlClient::TellHeld(const HeldEvent& event) {
  const std::string who =
      event.rank < 0 ? std::string("several members")
                     : StrCat("rank ", event.rank, " (host ", event.host, ", pid ", event.pid, ")");
  const std::string why = event.reason.empty() ? "" : StrCat(": ", event.reason);
  if (event.held) {
    RESILIENT_LOG(kWarn, "HELD: ", who, " of job ", job_, " may be silent for up to ",
                  SecondsOf(Millis(event.for_ms)), " s and is waited for", why);
  } else {
    RESILIENT_LOG(kWarn, "the hold of ", who, " of job ", job_, " has ended", why);
  }
}

void ControlClient::Handle(const Reply& reply) {
  if (!core_.OnReply(reply)) return;
  const auto sent = joins_.find(reply.seq);
  const std::optional<std::uint64_t> join =
      sent == joins_.end() ? std::nullopt : std::optional(sent->second);
  if (join) joins_.erase(sent);
  const auto asked = asked_.extract(reply.seq);
  if (reply.seq == leave_seq_) {
    left_ = true;
  } else if (reply.status.code() == StatusCode::kStaleGeneration) {
    LoseSession(reply.status);
  } else if (!asked.empty()) {
    asked.mapped()(reply.status);
  } else if (!reply.status.ok() && join) {
    events_->OnJoinRefused(*join, reply.status);
  } else if (!reply.status.ok()) {
    RESILIENT_LOG(kWarn, "the store refused a message of the membership line of job ", job_, ": ",
                  reply.status.ToString());
  }
}

// A connection is up: it is told at once that this process lives, then what was not answered.
void ControlClient::OnOpened(Instant now) {
  const Welcome& welcome = link_.welcome();
  const bool restarted = !server_id_.empty() && welcome.server != server_id_;
  if (restarted || (!server_id_.empty() && !welcome.session_known)) {
    LoseSession(
        Status(StatusCode::kStoreLost,
               StrCat("the store at ", link_.peer(),
                      restarted ? StrCat(" was restarted (server ", welcome.server,
                                         ", before: ", server_id_, ") and lost its memberships")
                                : std::string(" does not know this session any more"),
                      " (job ", job_, "); the job has to start anew")));
    return;
  }
  // A hold may have ended meanwhile; one that goes on is told again.
  if (std::exchange(held_, false)) events_->OnHeld(now);
  server_id_ = welcome.server;
  BeginSilence(now);
  TellBeat(now);  // Nobody may go by the lease that was assumed before.
  Beat(now);
  for (const Request& request : core_.Unanswered()) link_.Send(request);
}

// Ends the session when the peer's refusal is one that waiting does not change.
void ControlClient::OnTrouble() {
  if (lost_ || server_id_.empty() || !link_.refused()) return;
  const Status why = link_.trouble();
  if (why.code() == StatusCode::kStaleGeneration || why.code() == StatusCode::kAuth) {
    LoseSession(why);
  } else if (why.code() == StatusCode::kJob) {
    LoseSession(Status(StatusCode::kStoreLost,
                       StrCat("the store of this session is gone, another one answers at ",
                              link_.peer(), ": ", why.message())));
  }
}

void ControlClient::LoseSession(const Status& why) {
  if (std::exchange(lost_, true)) return;
  link_.Close();
  events_->OnSessionLost(why);
}

void ControlClient::TellBeat(Instant now) {
  last_beat_event_ = now;
  events_->OnBeat(now, last_contact_, LeaseTtl());
}

void ControlClient::Beat(Instant now) {
  last_beat_ = now;
  SendOnce(HeartbeatOp{++beat_});
}

void ControlClient::SendOnce(Op op) {
  if (link_.open() && !lost_) link_.Send(Request{.op = std::move(op)});
}

std::uint64_t ControlClient::Submit(Op op) {
  if (lost_) return 0;
  std::optional<std::uint64_t> join;
  if (const auto* joins = std::get_if<JoinOp>(&op)) join = joins->request.number;
  const Result<const Request*> request = core_.Submit(std::move(op));
  if (!request.ok()) {
    RESILIENT_LOG(kError, "the membership line of job ", job_,
                  " is full: ", request.status().message());
    if (join) events_->OnJoinRefused(*join, request.status());
    return 0;
  }
  if (join) joins_.emplace((*request)->seq, *join);
  if (link_.open()) link_.Send(**request);
  return (*request)->seq;
}

void ControlClient::RunTasks() {
  std::deque<std::function<void()>> tasks;
  {
    std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (std::function<void()>& task : tasks) task();
}

void ControlClient::TellBeginning() {
  {
    std::lock_guard lock(mutex_);
    if (beginning_.open) return;
    beginning_ = Beginning{!server_id_.empty(), link_.refused(), link_.trouble(), {}};
    if (beginning_.open) beginning_.lease = LeaseTtl();
    // It answered a moment ago: it has not yet to come, it has gone.
    if (!found_server_.empty() && link_.tried_all() &&
        link_.trouble().code() == StatusCode::kRefused) {
      beginning_.refused = true;
      beginning_.trouble =
          Status(StatusCode::kStoreLost,
                 StrCat("the store found at ", link_.peer(), " (server ", found_server_,
                        ") has stopped since: ", link_.trouble().message()));
    }
  }
  started_.Wake();
}

// True when the thread may end: the goodbye was acknowledged, cannot be, or took too long.
bool ControlClient::GoodbyeDone(Instant now) {
  {
    std::lock_guard lock(mutex_);
    if (!closing_) return false;
    if (lost_ || left_ || server_id_.empty() || close_deadline_.ExpiredAt(now)) return true;
  }
  if (leave_seq_ != 0) return false;
  const Result<const Request*> leave = core_.Submit(LeaveOp{});
  if (!leave.ok()) return true;
  leave_seq_ = (*leave)->seq;
  if (link_.open()) link_.Send(**leave);
  return false;
}

Duration ControlClient::BeatInterval() const {
  const std::uint64_t told = link_.welcome().heartbeat_interval_ms;
  return told > 0 ? Duration(Millis(told)) : kDefaultBeat;
}

Duration ControlClient::LeaseTtl() const {
  const std::uint64_t told = link_.welcome().lease_ttl_ms;
  return told > 0 ? Duration(Millis(told)) : kDefaultTtl;
}

namespace {

// What MakeRendezvous gives out. In a forked child the state behind it may be torn (the control
// thread may have been changing it) and its thread does not exist: it is left alone there. Owner:
// Session. Thread: thread-safe.
class SessionLine final : public Rendezvous {
 public:
  SessionLine(const ConnectOptions& options, InterruptCheck interrupt, const Clock& clock,
              std::function<Status(Deadline)> started)
      : started_(std::move(started)) {
    Result<std::vector<HostPort>> addresses = ParseAddresses(options.addresses);
    bad_options_ = addresses.status();
    if (!addresses.ok()) return;
    client_ = std::make_unique<ControlClient>(options, std::move(*addresses), std::move(interrupt),
                                              clock);
  }
  ~SessionLine() override { LetGoInChild(); }

  Status Start(RendezvousEvents& events, Deadline deadline) override {
    RESILIENT_RETURN_IF_ERROR(bad_options_);
    if (!Usable()) {
      return Status(StatusCode::kForked,
                    "this membership line belongs to the process that forked this one; a child "
                    "has to open a session of its own");
    }
    RESILIENT_RETURN_IF_ERROR(client_->Start(events, deadline));
    return started_ == nullptr ? Status::Ok() : started_(deadline);
  }
  void Join(const JoinRequest& request) override {
    if (Usable()) client_->Join(request);
  }
  void Ready(std::uint64_t generation) override {
    if (Usable()) client_->Ready(generation);
  }
  void Acknowledge(std::uint64_t generation) override {
    if (Usable()) client_->Acknowledge(generation);
  }
  void Send(const Report& report) override {
    if (Usable()) client_->Send(report);
  }
  void Ask(const Report& report, std::function<void(const Status&)> answered) override {
    if (Usable()) client_->Ask(report, std::move(answered));
  }
  void Tell(const WaitingReport& report) override {
    if (Usable()) client_->Tell(report);
  }
  void Tell(std::uint64_t ask, const Whereabouts& whereabouts) override {
    if (Usable()) client_->Tell(ask, whereabouts);
  }
  bool Post(std::function<void()> task) override {
    return Usable() && client_->Post(std::move(task));
  }
  Duration lease() const override { return Usable() ? client_->lease() : Duration::zero(); }
  std::string service() const override {
    return Usable() ? client_->service() : Rendezvous::service();
  }
  void Close(Deadline deadline) override {
    if (Usable()) client_->Close(deadline);
  }
  void AbandonInChild() override { LetGoInChild(); }

 private:
  bool Usable() const { return client_ != nullptr && !mark_.InChild(); }
  void LetGoInChild() {
    if (mark_.InChild()) static_cast<void>(client_.release());
  }

  const ProcessMark mark_;
  const std::function<Status(Deadline)> started_;
  Status bad_options_;
  std::unique_ptr<ControlClient> client_;
};

}  // namespace

std::unique_ptr<Rendezvous> MakeRendezvous(const ConnectOptions& options, InterruptCheck interrupt,
                                           const Clock& clock,
                                           std::function<Status(Deadline)> started) {
  return std::make_unique<SessionLine>(options, std::move(interrupt), clock, std::move(started));
}

}  // namespace resilient::store
