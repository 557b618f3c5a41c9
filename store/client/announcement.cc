#include <resilient/store/announcement.h>

#include <poll.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/base/fork_guard.h"
#include "runtime/base/process.h"
#include "runtime/base/thread.h"
#include "runtime/net/socket.h"
#include "store/core/presence_key.h"

namespace resilient::store {
namespace {

// Shorter than what a line waits for before it complains of a missing store.
constexpr Duration kTryFor = std::chrono::seconds(5);
constexpr Duration kFirstAnnouncePause = Millis(100);
constexpr Duration kLastAnnouncePause = std::chrono::seconds(10);
// A line that is being made when it is closed may be up by then: the store hears a goodbye.
constexpr Duration kSettle = Millis(500);

bool WaitingHelps(StatusCode code) {
  return code == StatusCode::kRefused || code == StatusCode::kUnreachable ||
         code == StatusCode::kResolve || code == StatusCode::kStoreLost ||
         code == StatusCode::kResourceExhausted;
}

// The announcement in the process that made it. Owner: ProcessAnnouncement. Thread: thread-safe.
class Announcer final : private RendezvousEvents {
 public:
  Announcer(ConnectOptions options, const Clock& clock)
      : clock_(clock), options_(std::move(options)) {
    thread_ = Thread("res-presence", [this] { Run(); });
  }
  ~Announcer() override { Close(Deadline::At(clock_.Now())); }

  void Close(Deadline deadline) {
    {
      const std::lock_guard lock(mutex_);
      goodbye_ = closing_ ? std::min(goodbye_, deadline) : deadline;
      settled_ = std::min(goodbye_, Deadline::After(clock_.Now(), kSettle));
      closing_ = true;
    }
    wake_.Wake();
    const std::lock_guard lock(join_mutex_);
    thread_.Join();
  }

 private:
  void OnView(const View& /*view*/) override {}
  void OnRunning(std::uint64_t /*generation*/) override {}
  void OnFence(const Fence& /*fence*/) override {}
  void OnJoinRefused(std::uint64_t /*join*/, const Status& /*why*/) override {}
  void OnHeld(Instant /*until*/) override {}
  void OnSessionLost(const Status& /*why*/) override {
    {
      const std::lock_guard lock(mutex_);
      lost_ = true;
    }
    wake_.Wake();
  }

  void Run() {
    Duration pause = kFirstAnnouncePause;
    while (true) {
      const StatusCode end = Attend();
      if (!WaitingHelps(end)) return;
      // Where nothing listens nobody is disturbed by another try.
      const bool quick = end == StatusCode::kRefused || end == StatusCode::kStoreLost;
      pause = quick ? kFirstAnnouncePause : std::min(2 * pause, kLastAnnouncePause);
      if (!Wait(Deadline::After(clock_.Now(), pause))) return;
    }
  }

  // One line to the store, for as long as it lasts; why it ended.
  StatusCode Attend() {
    {
      const std::lock_guard lock(mutex_);
      lost_ = false;
    }
    const std::unique_ptr<Rendezvous> line = MakeRendezvous(
        options_, [this] { return Settled(); }, clock_);
    const Status started = line->Start(*this, Deadline::After(clock_.Now(), kTryFor));
    if (!started.ok()) return started.code();
    while (Wait(Deadline::Never())) {
      if (lost()) return StatusCode::kStoreLost;
    }
    line->Close(goodbye());
    return StatusCode::kCancelled;
  }

  // Until `deadline` or until something has changed. False: this is to be closed.
  bool Wait(Deadline deadline) {
    if (closing()) return false;
    std::vector<PollEntry> entries{{wake_.fd(), POLLIN, 0}};
    if (PollUntil(entries, clock_, deadline) > 0) wake_.Drain();
    return !closing();
  }
  bool closing() const {
    const std::lock_guard lock(mutex_);
    return closing_;
  }
  bool lost() const {
    const std::lock_guard lock(mutex_);
    return lost_;
  }
  // Not OK: it is no use any more to wait for a line.
  Status Settled() const {
    const std::lock_guard lock(mutex_);
    const bool settled = closing_ && settled_.ExpiredAt(clock_.Now());
    return settled ? Status(StatusCode::kCancelled, "closed") : Status();
  }
  Deadline goodbye() const {
    const std::lock_guard lock(mutex_);
    return goodbye_;
  }

  const Clock& clock_;
  const ConnectOptions options_;
  WakeFd wake_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  bool closing_ = false;
  bool lost_ = false;  // The present line.
  Deadline goodbye_ = Deadline::Never();
  Deadline settled_ = Deadline::Never();
  std::mutex join_mutex_;  // Held while the thread ends.
  Thread thread_;
};

// Leaves it alone in a forked child, where its thread does not exist.
class ProcessAnnouncement final : public Announcement {
 public:
  ProcessAnnouncement(ConnectOptions options, const Clock& clock)
      : announcer_(std::make_unique<Announcer>(std::move(options), clock)) {}
  ~ProcessAnnouncement() override {
    if (mark_.InChild()) static_cast<void>(announcer_.release());
  }
  void Close(Deadline deadline) override {
    if (!mark_.InChild()) announcer_->Close(deadline);
  }

 private:
  const ProcessMark mark_;
  std::unique_ptr<Announcer> announcer_;
};

}  // namespace

std::unique_ptr<Announcement> Announce(ConnectOptions options, const AnnouncedRank& who,
                                       const Clock& clock) {
  const ProcessIdentity process = ThisProcess();
  options.leased_key = PresenceKey({who.world_size, who.rank});
  options.leased_value = process.host + " " + std::to_string(process.pid);
  return std::make_unique<ProcessAnnouncement>(std::move(options), clock);
}

}  // namespace resilient::store
