#include <resilient/exit.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <string>
#include <utility>

#include <resilient/per_process.h>

#include "runtime/base/exit_watch.h"
#include "runtime/base/log.h"
#include "runtime/base/log_flush.h"
#include "runtime/base/thread.h"

namespace resilient {
namespace {

constexpr Duration kWaitMax = std::chrono::hours(1);  // Of one wait: a condition's time is smaller.

// Owner: the process, which never destroys it: its exit is what it watches. Thread: thread-safe.
class ProcessExit {
 public:
  void SetBudget(Duration budget) {
    const std::lock_guard lock(mutex_);
    watch_.SetBudget(budget);
    changed_.notify_all();
    if (std::exchange(registered_, true)) return;
    // Registered late, it runs early: before what was there already is taken down. Where it cannot
    // be registered the exit is not bounded.
    (void)std::atexit([] { ExitBegins(); });
  }

  ExitWatch::CallId Begin(std::string what) {
    const std::lock_guard lock(mutex_);
    const ExitWatch::CallId id = watch_.Begin(std::move(what), clock_.Now());
    WatchLocked();
    return id;
  }

  void End(ExitWatch::CallId id) {
    const std::lock_guard lock(mutex_);
    watch_.End(id);
    changed_.notify_all();
  }

  bool begun() const { return begun_.load(std::memory_order_relaxed); }

  void OnExit() {
    begun_.store(true, std::memory_order_relaxed);
    const std::lock_guard lock(mutex_);
    watch_.OnExit(clock_.Now());
    WatchLocked();
  }

 private:
  // Only once there is something to watch: most processes have none.
  void WatchLocked() {
    if (watching_ || watch_.Due() == kNever) return;
    watching_ = true;
    // Nobody can join it: it is there for the time in which the process ends.
    Thread("res-exit", [this] { Watch(); }).Detach();
  }

  void Watch() {
    std::unique_lock lock(mutex_);
    while (true) {
      if (const auto blocked = watch_.Blocked(clock_.Now())) {
        RESILIENT_LOG(kError, "the process is ending, and is ended now with exit code ",
                      kBlockedExitCode, ", as a call into a driver keeps it from that: ", *blocked,
                      "; only the end of a process ends such a call");
        (void)FlushLog();
        ::_exit(kBlockedExitCode);
      }
      const Instant due = watch_.Due();
      if (due == kNever) break;
      const Duration left = Deadline::At(due).LeftAt(clock_.Now());
      changed_.wait_for(lock, std::min<Duration>(left, kWaitMax));
    }
    watching_ = false;
  }

  SystemClock clock_;
  std::atomic<bool> begun_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  ExitWatch watch_;
  bool registered_ = false;
  bool watching_ = false;
};

constinit PerProcess<ProcessExit> this_exit;

}  // namespace

void SetExitBudget(Duration budget) { this_exit.Get().SetBudget(budget); }
void ExitBegins() { this_exit.Get().OnExit(); }
void EndProcess(std::string_view why) {
  RESILIENT_LOG(kError, "the process is ended now with exit code ", kBlockedExitCode, ": ", why,
                "; only the end of a process ends such a wait");
  (void)FlushLog();
  ::_exit(kBlockedExitCode);
}
bool ExitHasBegun() {
  const ProcessExit* const present = this_exit.Present();
  return present != nullptr && present->begun();
}

DriverCall::DriverCall(std::string what) : id_(this_exit.Get().Begin(std::move(what))) {}
DriverCall::~DriverCall() {
  if (!mark_.InChild()) this_exit.Get().End(id_);
}

}  // namespace resilient
