#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/comm/group.h"

// The part of CommGroup that tells which operations wait, and for whom. Those that the lane runs as
// well, as one call says all that waits in the group.

namespace resilient {

Instant CommGroup::NextTell() const {
  if (state_ != State::kLive) return kNever;
  Instant next = point_to_point_.NextTell();
  if (lane_ != nullptr) {
    next = std::min(next, lane_->waiting_since());
  } else if (current_ != nullptr) {
    if (!current_->Done()) next = std::min(next, current_since_ + kWaitTellAfter);
  } else if (!pending_.empty()) {
    next = std::min(next, pending_.front().submitted + kWaitTellAfter);
  }
  return next == kNever ? kNever : std::max(next, told_ + kWaitTellAfter);
}

void CommGroup::TellWaiting() {
  const Instant due = NextTell();
  if (context_.now < due) return;
  if (context_.now - due >= kUnwatched) {
    told_ = context_.now;  // What has come meanwhile is still to be read.
    return;
  }
  std::vector<WaitingOperation> waiting;
  if (std::optional<WaitingOperation> collective = WaitingCollective())
    waiting.push_back(std::move(*collective));
  point_to_point_.AddWaiting(waiting, kWaitingOperationsMax - waiting.size());
  if (waiting.empty()) return;
  told_ = context_.now;
  context_.events.OnWaiting(spec_.name, spec_.generation, std::move(waiting));
}

std::optional<WaitingOperation> CommGroup::WaitingCollective() const {
  if (lane_ != nullptr) return lane_->Waiting(context_.now);
  const bool runs = current_ != nullptr;
  if (runs ? current_->Done() : pending_.empty()) return std::nullopt;
  const SubmittedOp& op = runs ? current_op_ : pending_.front();
  if (!op.op.binding) return std::nullopt;
  if (context_.now < (runs ? current_since_ : op.submitted) + kWaitTellAfter) return std::nullopt;
  WaitingOperation told = ToldOf(op, context_.now);
  const bool stands = runs && op.timeouts.StandsFor(kWaitTellAfter, context_.now);
  std::vector<int> missing;
  std::vector<int> silent;
  for (int rank = 0; rank < port_->size(); ++rank) {
    const Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (rank == spec_.rank || !peer.end.ok()) continue;
    // Once all links are up it is rank 0 whose word about shared memory is awaited, and it awaits
    // that of each rank.
    const bool here = runs         ? peer.entered >= started_ || !current_->HearsOf(rank)
                      : !resolved_ ? peer.link != nullptr
                                   : (spec_.rank == 0 ? peer.answered : rank != 0);
    if (!here) missing.push_back(rank);
    if (stands && current_->Needs(rank)) silent.push_back(rank);
  }
  told.missing = GlobalRanks(spec_, missing);
  told.silent = GlobalRanks(spec_, silent);
  told.behind = pending_.size() - (runs ? 0 : 1);
  return told;
}

void CommGroup::TellProgress() {
  GroupProgress progress;
  progress.group = spec_.name;
  progress.entered = started_;
  if (lane_ != nullptr) {
    progress.entered = lane_->begun();
  } else if (current_ == nullptr && !pending_.empty()) {
    progress.entered = pending_.front().seq;  // It lacks nothing but links.
  }
  for (int rank = 0; rank < port_->size(); ++rank) {
    if (rank == spec_.rank) continue;
    PeerProgress peer = point_to_point_.Progress(rank);
    if (peer.sent == 0 && peer.received == 0) continue;
    peer.rank = spec_.members[static_cast<std::size_t>(rank)].global_rank;
    progress.peers.push_back(peer);
  }
  context_.events.OnProgress(spec_.generation, std::move(progress));
}

void CommGroup::NoteAllEntered(const EnteredCall& call) {
  if (call.point_to_point) return point_to_point_.NoteAllEntered(call.seq);
  SubmittedOp* op = pending_.empty() ? nullptr : &pending_.front();
  if (current_ != nullptr) op = &current_op_;
  if (op != nullptr && op->seq == call.seq) op->timeouts.OnAllEntered(context_.now);
}

}  // namespace resilient
