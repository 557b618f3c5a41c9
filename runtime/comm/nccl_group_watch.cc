#include <algorithm>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/nccl_group.h"

// What the ranks of an NCCL communicator tell each other and the session of what they wait for.
namespace resilient {

std::size_t NcclGroup::HeadSize() const {
  const bool entered = !launched_.empty() && launched_[0].entered;
  return entered ? launched_[0].op.batch_rest + 1 : 0;
}

void NcclGroup::HearPeers() {
  if (control_ == nullptr || state_ > State::kFlushing) return;
  for (NcclControl::Heard& heard : control_->Take()) {
    auto progress = DecodeProgress(heard.bytes);
    if (!progress) continue;
    const bool asks = progress->asks;
    if (asks && state_ == State::kReady) WatchReplay();  // It is told where this rank stands now.
    if (state_ > State::kFlushing) return;
    peer_failed_attempt_ = std::max(peer_failed_attempt_, progress->failed_attempt);
    const Launched* head = Head();
    const Operation* op = head == nullptr ? nullptr : &head->op.op;
    const std::uint64_t seq = head == nullptr ? 0 : head->op.seq;
    const Status mismatch = watch_.Hear(heard.from, *std::move(progress), op, seq);
    if (asks || !mismatch.ok()) Tell(heard.from, false);
    if (!mismatch.ok() && state_ == State::kReady) OnMismatch(mismatch);
  }
}

bool NcclGroup::Tell(int peer, bool asks) {
  const Launched* head = Head();
  const NcclCaptures::Replay* replay = captures_.replay();
  NcclProgress progress =
      watch_.Tell(peer, head == nullptr ? nullptr : &head->op.op,
                  head == nullptr ? 0 : head->op.seq, replay == nullptr ? nullptr : &replay->place);
  progress.asks = asks;
  progress.failed_attempt = failed_attempt_;
  return control_->Say(peer, EncodeProgress(progress));
}

// The session hears of it now. Here it ends when the peers have been told what they are compared
// with, so that each says both sides.
void NcclGroup::OnMismatch(const Status& mismatch) {
  RESILIENT_LOG(kWarn, mismatch.message());
  context_.events.OnMismatch(spec_.name, spec_.generation, mismatch);
  Hold(mismatch, kBriefly, true);
}

void NcclGroup::Watch() {
  if (state_ < State::kReady) {
    WatchConnecting();
    return TellWaiting();
  }
  if (state_ == State::kHolding && !held_known_) return WatchFailure();
  if (state_ != State::kReady) return;
  NoteEntered();
  if (context_.now < next_tell_) return;
  next_tell_ = context_.now + kTellPeers;
  NoteReached();
  for (std::size_t i = 0; i < HeadSize(); ++i) {
    Launched& one = launched_[i];
    if (watch_.Missing(one.op.op, one.number, NcclWatch::Stage::kBegun).empty())
      one.op.timeouts.OnAllEntered(context_.now);
  }
  const Status mismatch = watch_.Compare();
  if (!mismatch.ok()) return OnMismatch(mismatch);
  WatchReplay();
  if (state_ != State::kReady) return;
  TellPeers();
  TellWaiting();
  CheckLeft();
}

// NCCL waits for a rank that has failed or left as for any other. Who has failed says so, until all
// compare; that one has left shows when something is said to it.
void NcclGroup::WatchConnecting() {
  const bool connecting = state_ == State::kConnecting;
  if (connecting && peer_failed_attempt_ == Attempt()) {
    connect_failure_ = Status(StatusCode::kCancelled, "another rank could not connect");
    return Compare();
  }
  const bool failed = state_ == State::kComparing && failed_attempt_ == Attempt();
  if ((!connecting && !failed) || context_.now < next_tell_) return;
  next_tell_ = context_.now + kTellPeers;
  const std::vector<int> left = control_->Left();
  if (connecting && !left.empty()) {
    connect_failure_ = PeerLeft(spec_, left.front(), "", 0);
    return Compare();
  }
  TellAll(false);
}

// The start of the first of launched_ is asked for only while it is not over: what has ended has
// begun. Also while it is being launched: where NCCL connects for it first, that waits for peers.
void NcclGroup::NoteEntered() {
  if (launched_.empty() || launched_.front().entered) return;
  const Launched& first = launched_.front();
  if (first.start == nullptr) return;
  const CudaResult begun = cuda_.EventQuery(HandleOf(first.start));
  if (begun == CudaResult::kSuccess) EnterFirst();
}

// Whether the device has not begun what is the first in its queue.
bool NcclGroup::IsQueued() const {
  return state_ == State::kReady && HeadSize() == 0 && (!launched_.empty() || !pending_.empty());
}

// Each turn. A communicator that has failed may still have a kernel there.
void NcclGroup::NoteDevice() {
  if (state_ < State::kReady) return;
  context_.device_clock.NoteRuns(this, HeadSize() > 0 || captures_.replay() != nullptr);
  if (IsQueued()) context_.device_clock.OnQueued(context_.now);
}

// Operations begin one after the other. That the device has come to what a later one waits for on
// its caller's stream shows that it works.
void NcclGroup::NoteReached() {
  if (!IsQueued()) return;
  for (std::size_t i = 1; i < launched_.size(); ++i) {
    Launched& one = launched_[i];
    if (one.reached || cuda_.EventQuery(HandleOf(one.op.ready)) != CudaResult::kSuccess) continue;
    one.reached = true;
    context_.device_clock.OnMoved(context_.now);
  }
}

// With the rest of its batch.
void NcclGroup::EnterFirst() {
  context_.device_clock.OnMoved(context_.now);
  const std::size_t rest = launched_[0].op.batch_rest;
  for (std::size_t i = 0; i <= rest; ++i) {
    Launched& one = launched_[i];
    if (one.entered) continue;
    one.entered = true;
    one.entered_at = context_.now;
    one.number = watch_.OnEntered(one.op.op, one.op.seq);
  }
}

void NcclGroup::TellAll(bool asks) {
  for (const int rank : Others()) Tell(rank, asks);
}

// All of the group where a collective has waited for some time, of messages their peers; else the
// next rank, so that ranks which have run different operations without waiting learn of it.
void NcclGroup::TellPeers() {
  const Launched* head = Head();
  const NcclCaptures::Replay* replay = captures_.replay();
  if (replay != nullptr && context_.now - replay->since >= kTellPeers) return TellAll(true);
  if (IsLaunchingFor(kTellPeers)) return TellAll(true);  // Who has left shows when it is told.
  const bool waits = head != nullptr && context_.now - head->entered_at >= kTellPeers;
  if (!waits && !watch_.HasNews()) return;
  if (waits && IsPointToPoint(head->op.op.kind)) {
    for (std::size_t i = 0; i < HeadSize(); ++i) Tell(launched_[i].op.op.peer, true);
    return;
  }
  const int next = (spec_.rank + 1) % port_->size();
  for (const int rank : Others()) {
    if (!waits && rank != next) continue;
    if (Tell(rank, waits) && rank == next) watch_.NoteTold();
  }
}

void NcclGroup::TellWaiting() {
  if (context_.now < next_wait_told_) return;
  std::vector<WaitingOperation> waiting;
  const auto add = [&](const SubmittedOp& op, Instant since, std::vector<int> missing) {
    if (context_.now - since < kWaitTellAfter || waiting.size() == kWaitingOperationsMax)
      return false;
    WaitingOperation told = ToldOf(op, context_.now);
    told.age = context_.now - since;
    told.missing = std::move(missing);
    waiting.push_back(std::move(told));
    return true;
  };
  for (std::size_t i = 0; i < HeadSize(); ++i) {
    const Launched& one = launched_[i];
    const Operation& op = one.op.op;
    if (!add(one.op, one.entered_at,
             GlobalRanks(spec_, watch_.Missing(op, one.number, NcclWatch::Stage::kSubmitted))))
      continue;
    waiting.back().not_begun = GlobalRanks(spec_, watch_.NotBegun(op, one.number));
    if (IsPointToPoint(op.kind)) waiting.back().number = one.number;
  }
  const std::size_t head = waiting.size();
  if (head > 0 && head == HeadSize()) {
    waiting.back().behind = launched_.size() - head + pending_.size();
  } else if (state_ < State::kReady && !pending_.empty()) {
    // At the meeting the CPU transport knows for whom; behind it all have come.
    std::vector<int> missing;
    if (state_ == State::kMeeting)
      missing = context_.waits->Missing(ControlName(), spec_.generation, context_.now);
    add(pending_.front(), pending_.front().submitted, std::move(missing));
    if (!waiting.empty()) waiting.back().behind = pending_.size() - 1;
  }
  // Whom NCCL waits for in a launch nobody knows.
  for (const SubmittedOp& op : captures_.launching()) add(op, op.submitted, {});
  if (const NcclCaptures::Replay* replay = captures_.replay()) {
    const std::size_t others = waiting.size();
    add(replay->op, replay->since, GlobalRanks(spec_, MissingInReplay()));
    if (waiting.size() > others) {
      waiting.back().what = ReplayText(replay->op.op);
      waiting.back().seq = 0;  // Captured once, replayed many times: no number says how often.
    }
  }
  if (waiting.empty()) return;
  next_wait_told_ = context_.now + kWaitTellAfter;
  context_.events.OnWaiting(spec_.name, spec_.generation, std::move(waiting));
}

void NcclGroup::TellProgress() {
  if (state_ > State::kReady) return;  // The fence or the end is on its way.
  std::vector<const Operation*> waiting;
  for (std::size_t i = 0; i < launched_.size(); ++i) {
    if (launched_[i].entered) waiting.push_back(&launched_[i].op.op);
  }
  GroupProgress progress = watch_.Progress(waiting);
  progress.device = context_.device_clock.Tell(DeviceName(), IsQueued(), context_.now);
  progress.device->begun = watch_.begun();
  context_.events.OnProgress(spec_.generation, std::move(progress));
}

// NCCL knows no goodbye: who waits for a rank that has said one would wait for ever.
void NcclGroup::CheckLeft() {
  const std::vector<int> left = control_->Left();
  CheckLeftReplay(left);
  if (state_ == State::kReady) CheckLeftLaunching(left);
  if (state_ != State::kReady) return;
  for (std::size_t i = 0; i < HeadSize(); ++i) {
    const Launched& one = launched_[i];
    for (const int rank : left) {
      if (!watch_.GoneBefore(rank, one.op.op, one.number)) continue;
      return Hold(PeerLeft(spec_, rank, Describe(one.op.op), one.op.seq), kBriefly, true);
    }
  }
}

// Over sockets NCCL says of a rank that has left what it says of a network that has failed. That
// one has left shows when it is told something.
void NcclGroup::WatchFailure() {
  if (context_.now >= next_tell_) {
    next_tell_ = context_.now + kTellPeers;
    TellAll(false);
  }
  for (const int rank : control_->Left()) {
    if (launched_.empty()) return Hold(PeerLeft(spec_, rank, "", 0), kBriefly, true);
    const std::size_t rest = launched_.front().op.batch_rest;
    for (std::size_t i = 0; i <= rest; ++i) {
      const Launched& one = launched_[i];
      if (!HasGoneFrom(one, rank)) continue;
      return Hold(PeerLeft(spec_, rank, Describe(one.op.op), one.op.seq), kBriefly, true);
    }
  }
}

std::vector<int> NcclGroup::WhoAwaitsUs() const {
  std::vector<int> ranks = Others();
  const std::vector<int> left = control_->Left();
  std::erase_if(ranks, [&](int rank) {
    return watch_.HasAllOfOurs(rank) || std::find(left.begin(), left.end(), rank) != left.end();
  });
  return ranks;
}

// NCCL still has what peers have not taken. They are asked, and the session is told whom it is for.
void NcclGroup::WatchFlush() {
  if (context_.now < next_tell_) return;
  next_tell_ = context_.now + kTellPeers;
  TellAll(true);
  const std::vector<int> ranks = WhoAwaitsUs();
  const Duration age = context_.now - flushing_since_;
  if (ranks.empty() || age < kWaitTellAfter) return;
  WaitingOperation told;
  told.seq = watch_.ended();
  told.what = "the end of the group, for the last that this rank has sent";
  told.age = age;
  told.missing = GlobalRanks(spec_, ranks);
  context_.events.OnWaiting(spec_.name, spec_.generation, {std::move(told)});
}

// Whether `rank`, which has left, has done so without its part in what may not have begun here.
bool NcclGroup::HasGoneFrom(const Launched& one, int rank) const {
  const Operation& op = one.op.op;
  if (one.entered) return watch_.GoneBefore(rank, op, one.number);
  return IsPointToPoint(op.kind) ? op.peer == rank : watch_.GoneBefore(rank, op, one.op.seq);
}

std::vector<int> NcclGroup::Others() const {
  std::vector<int> others;
  for (int rank = 0; rank < port_->size(); ++rank) {
    if (rank != spec_.rank) others.push_back(rank);
  }
  return others;
}

// Group ranks that the meeting is known to wait for; where that is not known yet all others.
std::vector<int> NcclGroup::NotCome() const {
  std::vector<int> ranks = Others();
  const std::vector<int> told =
      context_.waits->Missing(ControlName(), spec_.generation, context_.now);
  if (told.empty()) return ranks;
  std::erase_if(ranks, [&](int rank) {
    const int global = spec_.members[static_cast<std::size_t>(rank)].global_rank;
    return std::find(told.begin(), told.end(), global) == told.end();
  });
  return ranks;
}

// The others wait for the first one, but for its batch, which goes with it.
void NcclGroup::CheckDeadline() {
  next_deadline_check_ = kNever;
  if (state_ == State::kReady && EndIfReplayIsLate()) return;
  if (state_ > State::kReady) return;
  if (!launched_.empty()) {
    const std::size_t rest = launched_.front().op.batch_rest;
    for (std::size_t i = 0; i <= rest; ++i) {
      Launched& one = launched_[i];
      if (EndIfLate(one.op, one.number, one.entered)) return;
    }
  } else if (!captures_.launching().empty()) {
    for (SubmittedOp& op : captures_.launching()) {
      if (EndIfLate(op, 0, false)) return;
    }
  } else if (!pending_.empty()) {
    const std::size_t rest = pending_.front().batch_rest;
    for (std::size_t i = 0; i <= rest; ++i) {
      if (EndIfLate(pending_[i], 0, false)) return;
    }
  }
}

bool NcclGroup::EndIfLate(SubmittedOp& op, std::uint64_t number, bool entered) {
  const OpTimeouts::Verdict verdict = op.timeouts.Check(context_.now, port_->held_until());
  next_deadline_check_ =
      std::min(next_deadline_check_, op.timeouts.NextCheck(context_.now, port_->held_until()));
  if (verdict == OpTimeouts::Verdict::kInTime) return false;
  LateOp late = LateSince(op, verdict, context_.now, context_.clock);
  if (entered) {
    late.missing = watch_.Missing(op.op, number, NcclWatch::Stage::kBegun);
    const bool message = IsPointToPoint(op.op.kind);
    if (late.missing.empty()) late.awaited = message ? std::vector{op.op.peer} : Others();
  } else if (state_ == State::kMeeting) {
    late.missing = NotCome();
  }
  Fail(LateStatus(spec_, late, verdict));
  return true;
}

}  // namespace resilient
