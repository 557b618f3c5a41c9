#include "runtime/comm/shm_lane.h"

#include <system_error>
#include <thread>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/base/spin.h"
#include "runtime/comm/group_port.h"
#include "runtime/comm/mismatch.h"

namespace resilient {
namespace {

// About what a rank takes for one step of a large operation. A peer that is later than that is
// waited for asleep.
constexpr unsigned kLaneSpins = 4000;
// With more ranks than cores spinning keeps the awaited rank from running.
constexpr unsigned kSpinsWhenCrowded = 20;
constexpr unsigned kYields = 50;
// How long a sleep lasts at most: bounds what a caller's interrupt waits for.
constexpr Duration kSleepSlice = Millis(50);

}  // namespace

struct ShmLane::Running {
  explicit Running(SubmittedOp submitted) : op(std::move(submitted)) {}
  SubmittedOp op;
  std::unique_ptr<ShmCollective> collective;  // Null until begun.
  Instant asked = Instant::min();             // When the caller was last asked whether it waits.
  // min: has not waited yet; kNever: is told, or is not to be.
  Instant tell_at = op.op.binding ? Instant::min() : kNever;
};

ShmLane::ShmLane(GroupPort& port, const AbortCell* abort, std::unique_ptr<ShmSegment> segment,
                 const ShmGeometry& geometry, const Clock& clock, bool checksums)
    : port_(port),
      abort_(abort),
      segment_(std::move(segment)),
      clock_(clock),
      spins_(HasCoresFor(port.spec().members.size()) ? kLaneSpins : kSpinsWhenCrowded),
      board_(segment_->memory(), geometry, port.spec().rank, checksums),
      ends_(static_cast<std::size_t>(port.size())) {}

ShmLane::~ShmLane() { RESILIENT_CHECK(!thread_.Joinable()); }

void ShmLane::Submit(SubmittedOp op) {
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(op));
  if (const Status started = StartThread(); !started.ok()) {
    // It goes when the next caller can start one, or with the lane.
    RESILIENT_LOG(kWarn, "group ", port_.spec().name, ": ", started.message());
  }
  changed_.notify_all();
}

Status ShmLane::StartThread() {
  if (thread_started_) return Status::Ok();
  try {
    thread_ = Thread("res-shm", [this] { ThreadBody(); });
  } catch (const std::system_error& error) {
    return Status(StatusCode::kResourceExhausted,
                  StrCat("cannot start a thread for collectives: ", error.what()));
  }
  thread_started_ = true;
  return Status::Ok();
}

bool ShmLane::TryEnter() {
  std::lock_guard lock(mutex_);
  if (entered_ || !queue_.empty() || handed_over_ != nullptr) return false;
  entered_ = true;
  return true;
}

void ShmLane::Leave() {
  std::lock_guard lock(mutex_);
  entered_ = false;
  if (told_ && handed_over_ == nullptr) {
    told_.reset();
    waiting_since_.store(kNever, std::memory_order_relaxed);
  }
  if (!queue_.empty() || handed_over_ != nullptr || joining_) changed_.notify_all();
}

std::optional<Status> ShmLane::Run(SubmittedOp op, const Communicator::KeepWaiting& keep_waiting) {
  auto running = std::make_unique<Running>(std::move(op));
  std::optional<Status> outcome = Drive(*running, &keep_waiting);
  if (!outcome) {
    std::lock_guard lock(mutex_);
    if (stopped_.load(std::memory_order_relaxed)) {
      outcome = cause_;  // The thread may have been joined.
    } else {
      handed_over_ = std::move(running);
      if (const Status started = StartThread(); !started.ok())
        RESILIENT_LOG(kWarn, "group ", port_.spec().name, ": ", started.message());
    }
  }
  Leave();
  return outcome;
}

std::optional<Status> ShmLane::Drive(Running& running,
                                     const Communicator::KeepWaiting* keep_waiting) {
  if (Stopping()) return Cause();
  if (running.collective == nullptr) {
    running.collective = MakeShmCollective(running.op.op, running.op.seq, port_.spec(), board_);
    begun_.store(running.op.seq, std::memory_order_relaxed);
  }
  // A rank that is never waited for must look up from its work as well.
  constexpr unsigned kMovesBetweenLooks = 8;
  bool moved = true;
  for (unsigned moves = 1;; ++moves) {
    if (moved) port_.OnStep();
    if (Stopping()) return Cause();
    const ShmCollective::Progress progress = running.collective->Advance();
    if (progress == ShmCollective::Progress::kDone) return Status::Ok();
    if (progress == ShmCollective::Progress::kFailed) return Fail(running.collective->failure());
    moved = progress == ShmCollective::Progress::kMoved;
    bool given_up = false;
    if (!moved) {
      if (std::optional<Status> end = Wait(running, keep_waiting, &given_up)) return end;
    } else if (moves % kMovesBetweenLooks == 0) {
      given_up = IsGivenUp(running, keep_waiting);
    }
    if (given_up) return std::nullopt;
  }
}

bool ShmLane::IsGivenUp(Running& running, const Communicator::KeepWaiting* keep_waiting) const {
  if (keep_waiting == nullptr) return false;
  const Instant now = clock_.Now();
  const bool first = running.asked == Instant::min();
  if (!first && now - running.asked < kSleepSlice) return false;
  running.asked = now;
  if (running.op.submitted == Instant::min()) running.op.submitted = now;
  return !first && !(*keep_waiting)();
}

std::optional<Status> ShmLane::Wait(Running& running, const Communicator::KeepWaiting* keep_waiting,
                                    bool* given_up) {
  int awaited = -1;
  for (unsigned turn = 0;; ++turn) {
    const int missing = board_.FirstMissing();
    if (missing < 0) return std::nullopt;
    if (Stopping()) return Cause();
    const unsigned ended = ended_.load(std::memory_order_acquire);
    if (ended > 0) {
      if (const Status end = EndOfMissing(running); !end.ok()) return Fail(end);
    }
    if (turn < spins_) {
      Pause();
    } else if (turn < spins_ + kYields) {
      std::this_thread::yield();
    } else {
      *given_up = IsGivenUp(running, keep_waiting);
      if (*given_up) return std::nullopt;
      board_.Sleep(missing, kSleepSlice,
                   [&] { return Stopping() || ended_.load(std::memory_order_seq_cst) != ended; });
      if (board_.FirstMissing() < 0) return std::nullopt;
      const Instant now = clock_.Now();
      if (missing != std::exchange(awaited, missing)) running.op.timeouts.OnMoved(now);
      if (const Status late = CheckTime(running, now); !late.ok()) return Fail(late);
      if (now >= running.tell_at) NoteWaiting(running, now);
    }
  }
}

Status ShmLane::CheckTime(Running& running, Instant now) const {
  SubmittedOp& op = running.op;
  if (running.collective->all_entered()) op.timeouts.OnAllEntered(now);
  const OpTimeouts::Verdict verdict = op.timeouts.Check(now, port_.held_until());
  if (verdict == OpTimeouts::Verdict::kInTime) return Status::Ok();
  LateOp late = LateSince(op, verdict, now, clock_);
  for (int peer = 0; peer < port_.size(); ++peer) {
    if (board_.HasPublished(peer, board_.step())) continue;
    (running.collective->all_entered() ? late.awaited : late.missing).push_back(peer);
  }
  return LateStatus(port_.spec(), late, verdict);
}

void ShmLane::NoteWaiting(Running& running, Instant now) {
  const Instant due = std::exchange(running.tell_at, now + kWaitTellAfter);
  if (due == Instant::min() || now - due >= kUnwatched) return;
  running.tell_at = kNever;
  Told told{.waiting = ToldOf(running.op, now),
            .submitted = running.op.submitted,
            .step = running.collective->all_entered() ? 0 : board_.step()};
  {
    std::lock_guard lock(mutex_);
    told_ = std::move(told);
    waiting_since_.store(now, std::memory_order_relaxed);
  }
  port_.doorbell().Ring();
}

std::optional<WaitingOperation> ShmLane::Waiting(Instant now) const {
  std::optional<Told> told;
  {
    std::lock_guard lock(mutex_);
    told = told_;
    if (told) told->waiting.behind = queue_.size();
  }
  if (!told) return std::nullopt;
  told->waiting.age = now - told->submitted;
  std::vector<int> missing;
  for (int peer = 0; peer < port_.size(); ++peer) {
    if (!board_.HasPublished(peer, told->step)) missing.push_back(peer);
  }
  told->waiting.missing = GlobalRanks(port_.spec(), missing);
  return std::move(told->waiting);
}

bool ShmLane::Stopping() const {
  return stopped_.load(std::memory_order_seq_cst) || (abort_ != nullptr && abort_->IsSet());
}

Status ShmLane::Cause() const {
  if (abort_ != nullptr && abort_->IsSet()) return abort_->cause();
  std::lock_guard lock(mutex_);
  return cause_;
}

Status ShmLane::EndOfMissing(const Running& running) const {
  std::lock_guard lock(mutex_);
  for (int peer = 0; peer < port_.size(); ++peer) {
    const Status& end = ends_[static_cast<std::size_t>(peer)];
    // What it had published before it left is looked at after it is known to have left.
    if (end.ok() || board_.HasPublished(peer, board_.step())) continue;
    const bool leaver = end.detail().seq == 0;  // Else it passes on the failure that stopped it.
    return leaver ? PeerLeft(port_.spec(), peer, Describe(running.op.op), running.op.seq) : end;
  }
  return Status::Ok();
}

Status ShmLane::Fail(const Status& why) {
  Status told = why;
  {
    std::lock_guard lock(mutex_);
    if (cause_.ok()) cause_ = why;
    if (!failure_) failure_ = why;
    stopped_.store(true, std::memory_order_release);
  }
  port_.doorbell().Ring();
  return told;
}

std::optional<Status> ShmLane::TakeFailure() {
  std::lock_guard lock(mutex_);
  return std::exchange(failure_, std::nullopt);
}

void ShmLane::Stop(const Status& cause) {
  {
    std::lock_guard lock(mutex_);
    if (cause_.ok()) cause_ = cause;
    stopped_.store(true, std::memory_order_seq_cst);
    changed_.notify_all();
  }
  board_.WakeSelf();
}

void ShmLane::OnPeerEnded(int peer, const Status& end) {
  {
    std::lock_guard lock(mutex_);
    Status& known = ends_[static_cast<std::size_t>(peer)];
    if (!known.ok()) return;
    known = end;
    ended_.fetch_add(1, std::memory_order_seq_cst);
  }
  board_.WakeSelf();
}

void ShmLane::ThreadBody() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] {
      const bool work = handed_over_ != nullptr || !queue_.empty();
      // Once stopped nothing touches the board any more: a caller's Run need not be waited for.
      return work ? !entered_ || stopped_.load(std::memory_order_relaxed) : joining_;
    });
    if (handed_over_ == nullptr && queue_.empty()) return;
    std::unique_ptr<Running> running = std::move(handed_over_);
    if (running == nullptr) {
      running = std::make_unique<Running>(std::move(queue_.front()));
      queue_.pop_front();
    }
    const bool enters = !entered_;
    entered_ = true;
    lock.unlock();
    const Status outcome = enters ? *Drive(*running, nullptr) : Cause();
    // Before the completion: who has waited for it may run the next operation itself.
    if (enters) Leave();
    Complete(std::move(running->op), outcome);
    lock.lock();
  }
}

void ShmLane::Complete(SubmittedOp op, const Status& outcome) {
  if (op.done) op.done(outcome);
  op = {};  // What it holds goes before the communicator says it is quiet.
  port_.OnCompleted();
}

void ShmLane::Join() {
  {
    std::lock_guard lock(mutex_);
    RESILIENT_CHECK(stopped_.load());
    joining_ = true;
    changed_.notify_all();
  }
  thread_.Join();
  // What no thread could be made for. A caller may still be on its way out of Run.
  std::unique_lock lock(mutex_);
  std::deque<SubmittedOp> left = std::exchange(queue_, {});
  if (handed_over_ != nullptr) left.push_front(std::move(handed_over_->op));
  handed_over_ = nullptr;
  const Status cause = cause_;
  lock.unlock();
  for (SubmittedOp& op : left) Complete(std::move(op), cause);
}

}  // namespace resilient
