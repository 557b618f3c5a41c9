#include <algorithm>
#include <utility>

#include "runtime/comm/group.h"
#include "runtime/comm/mismatch.h"

// The part of CommGroup that ends operations which take too long. A standstill counts once a header
// of every peer has been seen: until then a peer may be on its way. Where a rank hears of some
// peers only (all but the root of a reduce), the one that hears of all decides.

namespace resilient {

void CommGroup::NoteEntered(int peer, std::uint64_t seq) {
  std::uint64_t& entered = PeerAt(peer).entered;
  const bool news = current_ != nullptr && entered < started_ && seq >= started_;
  entered = std::max(entered, seq);
  if (news && ++entered_ == port_->size() - 1) current_op_.timeouts.OnAllEntered(context_.now);
}

void CommGroup::CountEntered() {
  entered_ = static_cast<int>(std::count_if(
      peers_.begin(), peers_.end(), [&](const Peer& peer) { return peer.entered >= started_; }));
  if (entered_ == port_->size() - 1) current_op_.timeouts.OnAllEntered(context_.now);
}

void CommGroup::NoteMoves() {
  ForEachLink([&](MessageLink& link) {
    if (!link.TakeMoved()) return;
    if (link.lane() == Lane::kCollective) {
      current_op_.timeouts.OnMoved(context_.now);
    } else if (&link == PeerAt(link.peer()).inbound.get()) {
      point_to_point_.OnMoved(link.peer());
    }
  });
}

Instant CommGroup::NextDeadline() const {
  if (state_ != State::kLive) return kNever;
  Instant next = point_to_point_.NextCheck();
  if (current_ != nullptr) {
    next = std::min(next, current_op_.timeouts.NextCheck(context_.now, port_->held_until()));
  } else if (!pending_.empty()) {
    next = std::min(next, pending_.front().timeouts.NextCheck(context_.now, port_->held_until()));
  }
  return next;
}

void CommGroup::CheckDeadlines() {
  using Verdict = OpTimeouts::Verdict;
  if (state_ != State::kLive) return;
  NoteMoves();
  // The others wait for the first one.
  SubmittedOp* first = pending_.empty() ? nullptr : &pending_.front();
  if (current_ != nullptr) first = current_->Done() ? nullptr : &current_op_;
  if (first != nullptr) {
    const Verdict verdict = first->timeouts.Check(context_.now, port_->held_until());
    if (verdict != Verdict::kInTime) return FailCommunicator(LateCollective(*first, verdict));
  }
  SubmittedOp* late = point_to_point_.FindLate();
  if (late == nullptr) return;
  const Verdict verdict = late->timeouts.Check(context_.now, port_->held_until());
  if (verdict == Verdict::kInTime) return;  // A hold has begun just now.
  LateOp what = LateSince(*late, verdict, context_.now, context_.clock);
  if (late->op.peer != kAnyPeer) {
    (verdict == Verdict::kStalled ? what.awaited : what.missing).push_back(late->op.peer);
  }
  FailCommunicator(LateStatus(spec_, what, verdict));
}

Status CommGroup::LateCollective(const SubmittedOp& op, OpTimeouts::Verdict verdict) const {
  LateOp late = LateSince(op, verdict, context_.now, context_.clock);
  // A standstill counts once all have entered it, here or by their own account.
  const bool all_entered = verdict == OpTimeouts::Verdict::kStalled;
  for (int rank = 0; rank < port_->size(); ++rank) {
    const Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (rank == spec_.rank) continue;
    const bool needed = current_ == nullptr ? peer.link == nullptr : current_->Needs(rank);
    const bool entered = all_entered || (current_ != nullptr && peer.entered >= started_);
    if (needed) (entered ? late.awaited : late.missing).push_back(rank);
  }
  return LateStatus(spec_, late, verdict);
}

}  // namespace resilient
