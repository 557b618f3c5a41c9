#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <resilient/communicator.h>
#include <resilient/rendezvous.h>
#include <resilient/session.h>

#include "runtime/base/thread.h"

namespace resilient::recovery {

// How long a test waits for an event that must come; far above what any machine needs.
constexpr std::chrono::seconds kTestBound(30);

// Ends a wait that should have ended long ago, so that the test fails with a text, not by hanging.
inline InterruptCheck GiveUpAtTestBound() {
  return [started = std::chrono::steady_clock::now()] {
    if (std::chrono::steady_clock::now() - started < kTestBound) return Status::Ok();
    return Status(StatusCode::kInterrupted, "the test waited longer than its bound");
  };
}

// Time that the test moves. Thread: thread-safe.
class ManualClock final : public Clock {
 public:
  Instant Now() const override { return Instant(Duration(now_ns_.load())); }
  double WallSeconds() const override { return 1e9 + static_cast<double>(now_ns_.load()) * 1e-9; }
  void Advance(Duration by) { now_ns_ += by.count(); }

 private:
  std::atomic<std::int64_t> now_ns_{1'000'000'000};
};

// A thread that runs tasks in order: the control thread and the comm thread of the fakes.
// Thread: thread-safe. Lifetime: Stop joins it.
class TaskThread {
 public:
  explicit TaskThread(std::string name) : name_(std::move(name)) {}
  ~TaskThread() { Stop(); }

  // Tasks posted before run now.
  void Start() {
    std::lock_guard lock(mutex_);
    if (stopping_ || thread_.Joinable()) return;
    thread_ = Thread(name_, [this] { Run(); });
  }

  bool Post(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    if (stopping_) return false;
    tasks_.push_back(std::move(task));
    changed_.notify_all();
    return true;
  }

  // Runs what was posted before, then ends the thread. Idempotent.
  void Stop() {
    Thread thread;
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
      thread = std::move(thread_);
    }
    if (thread.Joinable()) thread.Join();
  }

  void AbandonInChild() { thread_.AbandonInChild(); }

 private:
  void Run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  const std::string name_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  Thread thread_;
};

// What a session said to the membership service, and a wait for more. Outlives the session.
// Thread: thread-safe.
class Record {
 public:
  void Note(const std::function<void(Record&)>& change) {
    std::lock_guard lock(mutex_);
    change(*this);
    changed_.notify_all();
  }
  // False when `met` was not true within the bound.
  bool Await(const std::function<bool(const Record&)>& met) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kTestBound, [&] { return met(*this); });
  }
  template <typename T>
  T Get(const std::function<T(const Record&)>& read) {
    std::lock_guard lock(mutex_);
    return read(*this);
  }

  // Guarded by the record's mutex: read them inside Note, Await and Get.
  std::vector<JoinRequest> joins;
  std::vector<std::uint64_t> readies;
  std::vector<std::uint64_t> acknowledged;
  std::vector<Report> reports;
  std::vector<Report> asked;
  std::vector<WaitingReport> waiting;
  std::vector<std::pair<std::uint64_t, Whereabouts>> whereabouts;
  std::vector<std::vector<int>> knocks;  // The ranks of each round.
  bool closed = false;
  bool abandoned = false;
  std::vector<std::string> calls;  // In order, for tests of the order.

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

// A membership line without a service: the test says what the service would say. With `autopilot`
// a join is answered with a view of the next generation and a ready with running.
// Thread: thread-safe.
class FakeRendezvous final : public Rendezvous {
 public:
  struct Script {
    bool autopilot = true;
    int world_size = 4;
    Status start;
    std::uint64_t first_generation = 1;
    Duration lease{};  // Zero: not known.
  };

  FakeRendezvous(Script script, std::shared_ptr<Record> record)
      : script_(std::move(script)), record_(std::move(record)), control_("fake-control") {
    generation_ = script_.first_generation - 1;
  }

  Status Start(RendezvousEvents& events, Deadline) override {
    if (!script_.start.ok()) return script_.start;
    events_ = &events;
    control_.Start();
    return Status::Ok();
  }
  Duration lease() const override { return script_.lease; }
  void Join(const JoinRequest& request) override {
    record_->Note([&](Record& record) {
      record.joins.push_back(request);
      record.calls.push_back("join");
    });
    if (autopilot_.load()) SayView(++generation_);
  }
  void Ready(std::uint64_t generation) override {
    record_->Note([&](Record& record) {
      record.readies.push_back(generation);
      record.calls.push_back("ready");
    });
    if (autopilot_.load()) SayRunning(generation);
  }
  void Acknowledge(std::uint64_t generation) override {
    record_->Note([&](Record& record) { record.acknowledged.push_back(generation); });
  }
  void Send(const Report& report) override {
    record_->Note([&](Record& record) { record.reports.push_back(report); });
  }
  void Ask(const Report& report, std::function<void(const Status&)> answered) override {
    control_.Post([this, report, answered = std::move(answered)]() mutable {
      const bool waits = !answers_.load();
      if (waits) unanswered_.push_back(answered);
      record_->Note([&](Record& record) { record.asked.push_back(report); });
      if (!waits) answered(Status::Ok());
    });
  }
  void Tell(const WaitingReport& report) override {
    record_->Note([&](Record& record) { record.waiting.push_back(report); });
  }
  void Tell(std::uint64_t ask, const Whereabouts& whereabouts) override {
    record_->Note([&](Record& record) { record.whereabouts.emplace_back(ask, whereabouts); });
  }
  bool Post(std::function<void()> task) override { return control_.Post(std::move(task)); }
  void Close(Deadline) override {
    control_.Stop();
    record_->Note([](Record& record) {
      record.closed = true;
      record.calls.push_back("rendezvous closed");
    });
  }
  void AbandonInChild() override {
    control_.AbandonInChild();
    record_->abandoned = true;  // No lock in a forked child.
  }

  // What the service says.
  void set_autopilot(bool on) { autopilot_ = on; }
  void SayView(std::uint64_t generation) {
    generation_ = generation;
    View view;
    view.life = 1;
    view.round = 1;
    view.generation = generation;
    view.secret = "secret";
    view.fence_token = 1000 + generation;
    for (int rank = 0; rank < script_.world_size; ++rank) {
      view.members.push_back({rank, "i" + std::to_string(rank), "host", 100 + rank,
                              "endpoint-" + std::to_string(rank)});
    }
    SayView(std::move(view));
  }
  void SayView(View view) {
    control_.Post([this, view = std::move(view)] { events_->OnView(view); });
  }
  // A lease without end: manual time that goes on is no pause.
  void SayBeat(Instant now, Instant contact, Duration lease = Duration::max()) {
    control_.Post([this, now, contact, lease] { events_->OnBeat(now, contact, lease); });
  }
  void SayPaused() {
    control_.Post([this] { events_->OnPaused(); });
  }
  void SayConfirmed() {
    control_.Post([this] { events_->OnConfirmed(); });
  }
  void SayRunning(std::uint64_t generation) {
    control_.Post([this, generation] { events_->OnRunning(generation); });
  }
  void SayFence(std::uint64_t generation, Status cause) {
    control_.Post([this, generation, cause] { events_->OnFence({generation, cause}); });
  }
  void SayRefused(Status why) {
    SayRefused(record_->Get<std::uint64_t>([](const Record& record) {
      return record.joins.empty() ? 0 : record.joins.back().number;
    }),
               std::move(why));
  }
  void SayRefused(std::uint64_t join, Status why) {
    control_.Post([this, join, why] { events_->OnJoinRefused(join, why); });
  }
  void SayAskProgress(std::uint64_t generation, std::vector<std::string> groups) {
    control_.Post([this, generation, groups] { events_->OnAskProgress(generation, groups); });
  }
  void SayAllEntered(std::uint64_t generation, std::vector<EnteredCall> calls) {
    control_.Post([this, generation, calls] { events_->OnAllEntered(generation, calls); });
  }
  // What is asked from now on waits for SayAnswer; otherwise it is answered with OK.
  void HoldAnswers() { answers_.store(false); }
  void SayAnswer(Status answer) {
    control_.Post([this, answer = std::move(answer)] {
      for (const auto& answered : std::exchange(unanswered_, {})) answered(answer);
    });
  }
  void SayHeld(Instant until) {
    control_.Post([this, until] { events_->OnHeld(until); });
  }
  void SayLost(Status why) {
    control_.Post([this, why] { events_->OnSessionLost(why); });
  }
  // Returns when everything posted so far, and what that posted, has run.
  void Settle() {
    for (int round = 0; round < 3; ++round) {
      auto done = std::make_shared<std::atomic<bool>>(false);
      if (!control_.Post([this, done] {
            done->store(true);
            record_->Note([](Record&) {});
          })) {
        return;
      }
      ASSERT_TRUE(record_->Await([&](const Record&) { return done->load(); }));
    }
  }

 private:
  const Script script_;
  const std::shared_ptr<Record> record_;
  TaskThread control_;
  RendezvousEvents* events_ = nullptr;  // Set by Start.
  std::atomic<bool> autopilot_{script_.autopilot};
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<bool> answers_{true};
  std::vector<std::function<void(const Status&)>> unanswered_;  // Confined to the control thread.
};

class FakeFactory;

// Takes operations and completes them as the test says. Thread: thread-safe.
class FakeCommunicator final : public Communicator,
                               public std::enable_shared_from_this<FakeCommunicator> {
 public:
  FakeCommunicator(GroupSpec spec, TaskThread& comm, bool hold)
      : spec_(std::move(spec)), comm_(comm), hold_(hold) {}
  ~FakeCommunicator() override { Finish(Cancelled(), true); }

  int rank() const override { return spec_.rank; }
  int size() const override { return static_cast<int>(spec_.members.size()); }
  Result<std::uint64_t> Submit(Operation op, Completion done) override {
    std::lock_guard lock(mutex_);
    if (!end_.ok()) return end_;
    if (op.peer >= size()) return Status(StatusCode::kInvalidArgument, "no such peer");
    const bool point_to_point = IsPointToPoint(op.kind);
    const std::uint64_t seq = point_to_point ? ++point_to_point_seq_ : ++collective_seq_;
    // Alone in the group: what it gathers is its own.
    if (op.kind == OpKind::kAllGather && size() == 1 && op.count > 0) {
      std::memcpy(op.outputs.at(0).data, op.data, op.count * SizeOf(op.dtype));
    }
    pending_.push_back(std::move(done));
    if (!hold_) CompleteLocked(Status::Ok());
    return seq;
  }
  Result<std::vector<std::uint64_t>> SubmitBatch(std::vector<Submission> batch) override {
    std::vector<std::uint64_t> seqs;
    for (Submission& one : batch) {
      const Result<std::uint64_t> seq = Submit(std::move(one.op), std::move(one.done));
      if (!seq.ok()) return seq.status();
      seqs.push_back(*seq);
    }
    return seqs;
  }
  // With `set_run_inline`: ends within the call. Else as Submit.
  Result<Ran> Run(Operation op, Completion done, const KeepWaiting& /*keep_waiting*/) override {
    {
      std::lock_guard lock(mutex_);
      if (!end_.ok()) return end_;
      if (run_inline_) return Ran{.seq = ++collective_seq_, .outcome = run_outcome_};
    }
    Result<std::uint64_t> seq = Submit(std::move(op), std::move(done));
    if (!seq.ok()) return seq.status();
    return Ran{.seq = *seq, .outcome = std::nullopt};
  }
  void Abort(const Status& cause) override { Finish(cause, !linger_.load()); }
  bool IsQuiet() const override {
    std::lock_guard lock(mutex_);
    return pending_.empty();
  }
  void Leave() override {
    left_ = true;
    Finish(Cancelled(), true);
  }
  // As the test says with `set_progress`; else nothing has begun.
  ProgressAnswer AskProgress(const std::string& transport) override {
    std::lock_guard lock(mutex_);
    if (!progress_ || transport != spec_.name) return ProgressAnswer::kNotBegun;
    comm_.Post([tell = *progress_] { tell(); });
    return ProgressAnswer::kComing;
  }
  void NoteAllEntered(const EnteredCall& call) override {
    std::lock_guard lock(mutex_);
    all_entered_.push_back(call);
  }

  // The oldest operation ends with `status`.
  void CompleteNext(const Status& status) {
    std::lock_guard lock(mutex_);
    CompleteLocked(status);
  }
  void set_run_inline(Status outcome) {
    std::lock_guard lock(mutex_);
    run_outcome_ = std::move(outcome);
    run_inline_ = true;
  }
  // What AskProgress has the comm thread do.
  void set_progress(std::function<void()> tell) {
    std::lock_guard lock(mutex_);
    progress_ = std::move(tell);
  }
  std::vector<EnteredCall> all_entered() const {
    std::lock_guard lock(mutex_);
    return all_entered_;
  }
  // Abort no longer completes what is in flight, as if a driver still used the memory.
  void set_linger(bool on) { linger_ = on; }
  bool left() const { return left_.load(); }
  const GroupSpec& spec() const { return spec_; }

 private:
  static Status Cancelled() { return Status(StatusCode::kCancelled, "cancelled"); }
  void Finish(const Status& status, bool complete) {
    std::lock_guard lock(mutex_);
    if (end_.ok()) end_ = status;
    while (complete && !pending_.empty()) CompleteLocked(end_);
  }
  void CompleteLocked(const Status& status) {
    ASSERT_FALSE(pending_.empty());
    Completion done = std::move(pending_.front());
    pending_.pop_front();
    comm_.Post([done = std::move(done), status] { done(status); });
  }

  const GroupSpec spec_;
  TaskThread& comm_;
  const bool hold_;
  std::atomic<bool> linger_{false};
  std::atomic<bool> left_{false};
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  bool run_inline_ = false;
  Status run_outcome_;
  Status end_;
  std::deque<Completion> pending_;
  std::uint64_t collective_seq_ = 0;
  std::uint64_t point_to_point_seq_ = 0;
  std::optional<std::function<void()>> progress_;
  std::vector<EnteredCall> all_entered_;
};

// Thread: thread-safe.
class FakeFactory final : public CommunicatorFactory {
 public:
  struct Script {
    bool connect = true;  // OnConnected comes by itself.
    bool hold = false;    // Operations wait for CompleteNext.
    bool fail = false;    // Create returns null.
  };

  FakeFactory(Script script, std::shared_ptr<Record> record, CommunicatorEvents& events)
      : record_(std::move(record)), events_(events), script_(script), comm_("fake-comm") {
    comm_.Start();
  }
  ~FakeFactory() override {
    for (const auto& communicator : created_) {
      EXPECT_EQ(communicator.use_count(), 1) << "the factory outlives its communicators";
    }
  }

  std::string endpoint() const override { return "my-endpoint"; }
  std::shared_ptr<Communicator> Create(GroupSpec spec, std::shared_ptr<AbortCell> abort) override {
    std::lock_guard lock(mutex_);
    EXPECT_FALSE(closed_) << "nothing is made after Close";
    if (script_.fail) return nullptr;
    auto communicator = std::make_shared<FakeCommunicator>(spec, comm_, script_.hold);
    abort->Listen([weak = std::weak_ptr<FakeCommunicator>(communicator),
                   cell = std::weak_ptr<AbortCell>(abort)] {
      const auto strong = weak.lock();
      const auto reason = cell.lock();
      if (strong != nullptr && reason != nullptr) strong->Abort(reason->cause());
    });
    created_.push_back(communicator);
    if (script_.connect) SayConnected(spec.name, spec.generation);
    record_->Note([](Record&) {});
    return communicator;
  }
  void Hold(Instant until) override {
    std::lock_guard lock(mutex_);
    held_until_ = until;
  }
  void Knock(const GroupSpec& world, const std::vector<int>& ranks, Duration) override {
    EXPECT_EQ(world.name, kWorldGroup);
    record_->Note([&](Record& record) { record.knocks.push_back(ranks); });
  }
  // Returns when everything said so far has been heard.
  void Settle() {
    std::promise<void> heard;
    ASSERT_TRUE(comm_.Post([&heard] { heard.set_value(); }));
    ASSERT_EQ(heard.get_future().wait_for(kTestBound), std::future_status::ready);
  }
  void SayKnocked(std::uint64_t generation, int rank, Status found) {
    comm_.Post([this, generation, rank, found] { events_.OnKnocked(generation, rank, found); });
  }
  Instant held_until() const {
    std::lock_guard lock(mutex_);
    return held_until_;
  }
  void Close(Deadline) override {
    {
      std::lock_guard lock(mutex_);
      closed_ = true;
      for (const auto& communicator : created_) {
        communicator->Abort(Status(StatusCode::kCancelled, "closed"));
      }
    }
    comm_.Stop();
    record_->Note([](Record& record) { record.calls.push_back("factory closed"); });
  }

  void SayConnected(const std::string& group, std::uint64_t generation) {
    comm_.Post([this, group, generation] { events_.OnConnected(group, generation); });
  }
  void SayLinkLost(const std::string& group, std::uint64_t generation, int rank) {
    comm_.Post([this, group, generation, rank] {
      events_.OnLinkLost(group, generation, rank, Status(StatusCode::kCommFailed, "reset by peer"));
    });
  }
  void SayMismatch(const std::string& group, std::uint64_t generation, Status mismatch) {
    comm_.Post(
        [this, group, generation, mismatch] { events_.OnMismatch(group, generation, mismatch); });
  }
  void SayStalled(const std::string& group, std::uint64_t generation, Status why) {
    comm_.Post([this, group, generation, why] { events_.OnStalled(group, generation, why); });
  }
  void SayWaiting(const std::string& group, std::uint64_t generation, WaitingOperation waiting) {
    comm_.Post(
        [this, group, generation, waiting] { events_.OnWaiting(group, generation, {waiting}); });
  }
  void SayProgress(std::uint64_t generation, GroupProgress progress) {
    comm_.Post([this, generation, progress] { events_.OnProgress(generation, progress); });
  }
  void set_script(Script script) {
    std::lock_guard lock(mutex_);
    script_ = script;
  }
  // The latest communicator of `group`; null when there is none.
  std::shared_ptr<FakeCommunicator> Latest(const std::string& group) {
    std::lock_guard lock(mutex_);
    for (auto it = created_.rbegin(); it != created_.rend(); ++it) {
      if ((*it)->spec().name == group) return *it;
    }
    return nullptr;
  }
  std::size_t CreatedCount() {
    std::lock_guard lock(mutex_);
    return created_.size();
  }

 private:
  const std::shared_ptr<Record> record_;
  CommunicatorEvents& events_;
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  Script script_;
  Instant held_until_ = Instant::min();
  bool closed_ = false;
  std::vector<std::shared_ptr<FakeCommunicator>> created_;
  TaskThread comm_;
};

// The end of one operation, for the test to wait for. Fails when it was never run.
class Outcome {
 public:
  Completion Callback() {
    return [state = state_](const Status& status) {
      std::lock_guard lock(state->mutex);
      EXPECT_EQ(state->runs, 0) << "a completion runs once";
      ++state->runs;
      state->status = status;
      state->changed.notify_all();
    };
  }
  Status Await() {
    std::unique_lock lock(state_->mutex);
    const bool ran =
        state_->changed.wait_for(lock, kTestBound, [this] { return state_->runs > 0; });
    EXPECT_TRUE(ran) << "the completion was not run";
    return state_->status;
  }
  bool HasRun() const {
    std::lock_guard lock(state_->mutex);
    return state_->runs > 0;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    int runs = 0;
    Status status;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

inline Status Lost(int rank) {
  FailureDetail detail;
  detail.rank = rank;
  detail.host = "host";
  detail.pid = 100 + rank;
  return Status(StatusCode::kRankLost, "rank " + std::to_string(rank) + " was killed", detail);
}

}  // namespace resilient::recovery
