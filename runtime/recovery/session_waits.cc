#include <utility>

#include "runtime/base/log.h"
#include "runtime/net/presence.h"
#include "runtime/recovery/session_impl.h"

// What this rank waits for, and where it is while others wait for it.
namespace resilient::recovery {

void SessionImpl::OnWaiting(const std::string& group, std::uint64_t generation,
                            std::vector<WaitingOperation> waiting) {
  waits_.Note(group, generation, std::move(waiting), clock_.Now());
  if (waiting_posted_.exchange(true)) return;  // What is told next has it all.
  (void)rendezvous_->Post([this] {
    waiting_posted_ = false;
    TellWaiting(clock_.Now());
  });
}

void SessionImpl::TellWaiting(Instant now) {
  std::uint64_t generation = 0;
  {
    Lock lock(mutex_);
    if (machine_.state() != SessionState::kRunning || flight_ == nullptr || flight_->Ended())
      return;
    generation = flight_->generation();
  }
  if (const auto report = waits_.Report(generation, callers_.Look(), now)) {
    rendezvous_->Tell(*report);
  }
}

void SessionImpl::OnBeat(Instant now, Instant contact, Duration lease) {
  pause_watch_.OnBeat(now, lease);
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

void SessionImpl::OnConfirmed() {
  Lock lock(mutex_);
  pause_watch_.OnConfirmed();
  changed_.notify_all();
}

void SessionImpl::TellJoining(bool first, Instant now) {
  if (!joining_since_) joining_since_ = now;
  WaitingReport report = waits_.JoinReport(*joining_since_, now).value_or(WaitingReport{});
  if (first && !options_.presence.empty()) {
    report.present = PresentRanks(options_.presence, options_.world_size, options_.rank);
  }
  if (report.tell || !report.present.empty()) rendezvous_->Tell(report);
}

void SessionImpl::OnLate(const LateNotice& notice) {
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
    (void)self->rendezvous_->Post([rendezvous = self->rendezvous_.get(), ask, whereabouts] {
      rendezvous->Tell(ask, whereabouts);
    });
  });
}

}  // namespace resilient::recovery
