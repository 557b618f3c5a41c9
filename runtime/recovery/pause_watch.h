#pragma once

#include <atomic>

#include <resilient/clock.h>

namespace resilient::recovery {

// Whether this process may act on what it knows. Right behind a pause (SIGSTOP, a suspended host, a
// frozen container) it may not: its seat may have been given away, and its threads run again in any
// order. The control thread says that it runs; when it has not for half a lease, or has found that
// it was not run for so long, nobody acts until the membership service has answered anew.
//
// Owner: SessionImpl. Thread: MayAct from any thread and without a lock, the rest from the control
// thread.
class PauseWatch {
 public:
  // The control thread runs, at `now`.
  void OnBeat(Instant now, Duration lease) {
    limit_.store(lease / 2, std::memory_order_relaxed);
    last_run_.store(now, std::memory_order_release);
  }
  // It was not run for half a lease. Before the OnBeat that follows, so that nobody sees a thread
  // that runs and no pause.
  void OnPaused() { paused_.store(true, std::memory_order_relaxed); }
  // The service has answered what was asked after the pause: this process has its seat.
  void OnConfirmed() { paused_.store(false, std::memory_order_relaxed); }

  bool MayAct(Instant now) const {
    const Instant ran = last_run_.load(std::memory_order_acquire);
    // Not "now - ran": kNever lies too far ahead.
    const bool runs = now < ran || now - ran <= limit_.load(std::memory_order_relaxed);
    return runs && !paused_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<Instant> last_run_{kNever};  // Nothing is known before the first beat.
  std::atomic<Duration> limit_{Duration::max()};
  std::atomic<bool> paused_{false};
};

}  // namespace resilient::recovery
