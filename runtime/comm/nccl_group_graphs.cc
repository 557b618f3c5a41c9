#include <algorithm>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/nccl_group.h"

// The operations of an NCCL communicator that graphs hold: into the capture, under watch in their
// replays, and until the program gives them up.
namespace resilient {

// Those before it are launched by now, so that all ranks call NCCL in one order.
bool NcclGroup::LaunchCaptured() {
  std::vector<SubmittedOp> ops;
  for (std::size_t left = pending_.front().batch_rest + 1; left > 0; --left)
    ops.push_back(pending_.pop_front());
  if (Status refused = captures_.Begin(ops, stream_); !refused.ok()) {
    const bool lost = refused.code() == StatusCode::kDeviceLost;
    if (lost) refused = Status(refused.code(), StrCat(refused.message(), ", ", Where()), Detail());
    for (SubmittedOp& op : ops) finished_.Add(std::move(op), refused);
    if (!lost) return true;  // Of this capture alone.
    Fail(refused);
    return false;
  }
  const std::vector<SubmittedOp>& launching = captures_.launching();
  if (!MakePremulSum(launching.front().op)) return false;
  const NcclLaunch launch = LaunchOn(captures_.stream());
  NcclResult result = NcclResult::kSuccess;
  if (launching.size() == 1) {
    result = LaunchNccl(launch, launching.front().op);
  } else {
    std::vector<const Operation*> batch(launching.size());
    std::transform(launching.begin(), launching.end(), batch.begin(),
                   [](const SubmittedOp& op) { return &op.op; });
    result = LaunchNcclBatch(launch, batch);
  }
  if (result != NcclResult::kSuccess && result != NcclResult::kInProgress) {
    const SubmittedOp& first = launching.front();
    Failed(result, StrCat("capturing ", Describe(first.op), " #", first.seq));
    return false;
  }
  spin_until_ = context_.now + kSpin;  // The caller waits for it.
  launching_ = result == NcclResult::kInProgress;
  if (!launching_) OnLaunched();
  return state_ == State::kReady;
}

void NcclGroup::SweepCaptures() { Failed(captures_.Sweep(finished_), "work on the device"); }

void NcclGroup::WatchReplay() {
  const NcclCaptures::Replay* before = captures_.replay();
  const Instant since = before == nullptr ? Instant::min() : before->since;
  if (Failed(captures_.Look(context_.now), "work on the device")) return;
  NcclCaptures::Replay* replay = captures_.replay();
  const bool moved = replay == nullptr ? before != nullptr : replay->since != since;
  if (moved) context_.device_clock.OnMoved(context_.now);
  if (replay == nullptr) return;
  if (replay->since != since) watch_.OnReplay();
  if (watch_.NotInReplay(replay->place).empty()) replay->op.timeouts.OnAllEntered(context_.now);
}

// Of an operation with a root nothing is known: who is not in it may have done its part.
std::vector<int> NcclGroup::MissingInReplay() const {
  const NcclCaptures::Replay& replay = *captures_.replay();
  return HasRoot(replay.op.op.kind) ? std::vector<int>() : watch_.NotInReplay(replay.place);
}

// What a rank that has gone has not done it will not do; what it has done is here in a moment.
void NcclGroup::CheckLeftReplay(const std::vector<int>& left) {
  const NcclCaptures::Replay* replay = captures_.replay();
  if (replay == nullptr || context_.now - replay->since < kWaitTellAfter) return;
  const std::vector<int> missing = MissingInReplay();
  for (const int rank : left) {
    if (std::find(missing.begin(), missing.end(), rank) == missing.end()) continue;
    return Hold(PeerLeft(spec_, rank, ReplayText(replay->op.op), replay->op.seq), kBriefly, true);
  }
}

bool NcclGroup::IsLaunchingFor(Duration time) const {
  const std::vector<SubmittedOp>& launching = captures_.launching();
  return !launching.empty() && context_.now - launching.front().submitted >= time;
}

// In a launch NCCL may connect with peers first: one that has gone was not connected with then.
void NcclGroup::CheckLeftLaunching(const std::vector<int>& left) {
  if (!IsLaunchingFor(kWaitTellAfter)) return;
  for (const SubmittedOp& op : captures_.launching()) {
    for (const int rank : left) {
      if (IsPointToPoint(op.op.kind) && rank != op.op.peer) continue;
      return Hold(PeerLeft(spec_, rank, Describe(op.op), op.seq), kBriefly, true);
    }
  }
}

OpTimeouts::Verdict NcclGroup::JudgeReplay() {
  NcclCaptures::Replay* replay = captures_.replay();
  if (replay == nullptr) return OpTimeouts::Verdict::kInTime;
  OpTimeouts& timeouts = replay->op.timeouts;
  next_deadline_check_ =
      std::min(next_deadline_check_, timeouts.NextCheck(context_.now, port_->held_until()));
  return timeouts.Check(context_.now, port_->held_until());
}

bool NcclGroup::EndIfReplayIsLate() {
  if (JudgeReplay() == OpTimeouts::Verdict::kInTime) return false;
  WatchReplay();  // It may have ended since the last look.
  if (state_ != State::kReady) return true;
  const OpTimeouts::Verdict verdict = JudgeReplay();
  if (verdict == OpTimeouts::Verdict::kInTime) return false;
  const NcclCaptures::Replay* replay = captures_.replay();
  LateOp late = LateSince(replay->op, verdict, context_.now, context_.clock);
  late.missing = MissingInReplay();
  if (late.missing.empty()) late.awaited = Others();
  Fail(LateStatus(spec_, late, verdict));
  return true;
}

// What was launched, beside the graphs. Where that was not seen it is its release that knows.
bool NcclGroup::HasLeftTheDevice(bool is_released) const {
  for (std::size_t i = 0; i < launched_.size(); ++i) {
    const Launched& one = launched_[i];
    if (!one.recorded && is_released) continue;
    if (!one.recorded || cuda_.EventQuery(HandleOf(one.end)) == CudaResult::kNotReady) return false;
  }
  return true;
}

void NcclGroup::LetGraphsKeep() {
  const std::size_t graphs = captures_.graphs();
  if (graphs > 0)
    RESILIENT_LOG(
        kWarn, "CUDA graphs (", graphs, ") hold operations of ", Where(),
        ", which is over: what NCCL has of it is freed when they are gone, and a replay of "
        "them leaves undefined memory; delete them, and capture again");
  release_->Abandon(captures_.Keep());
}

std::string NcclGroup::ReplayText(const Operation& op) {
  return StrCat("the replay of ", Describe(op), " by a CUDA graph");
}

}  // namespace resilient
