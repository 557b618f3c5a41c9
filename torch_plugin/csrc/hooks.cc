#include "torch_plugin/csrc/hooks.h"

#include <stdio_ext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <thread>
#include <vector>

#include <resilient/exit.h>
#include <resilient/per_process.h>

#include "torch_plugin/csrc/thread.h"

namespace resilient::plugin {
namespace {

using Hooks = std::shared_ptr<const AbortHooks::Table>;

// Number of the session's last event so far; 0: none.
std::uint64_t LastEvent(const Session& session) {
  const Deadline now = Deadline::At(SystemClock().Now());
  std::uint64_t last = 0;
  for (auto event = session.AwaitEvent(0, now); event.ok(); event = session.AwaitEvent(last, now)) {
    last = event->number;
  }
  return last;
}

constexpr Duration kHooksEnd = std::chrono::milliseconds(300);

// How many threads of this process are in hooks now, or let go of a session, and the end of the
// process beside them.
//
// Owner: the process (PerProcess). Thread: thread-safe.
class RunningHooks {
 public:
  // Where it is registered more than once, the first call does it all.
  RunningHooks() { (void)::on_exit(&OnExit, nullptr); }

  void Begin() { Add(1); }
  void End() { Add(-1); }

  // For the end of the process.
  bool AwaitNone(Deadline deadline) {
    awaited_.store(true);
    std::unique_lock lock(mutex_);
    const bool none = changed_.wait_for(lock, deadline.LeftAt(SystemClock().Now()),
                                        [this] { return count_.load() == 0; });
    if (!none) FreeStderr();
    return none;
  }

 private:
  void Add(int change) {
    const std::lock_guard lock(mutex_);
    count_ += change;
    changed_.notify_all();
  }

  // One that hangs in a write that nobody reads has the stream's lock, for which the interpreter
  // and the library of C++ wait at the exit, to write out what this stream never keeps.
  static void FreeStderr() {
    if (::ftrylockfile(stderr) == 0) {
      ::funlockfile(stderr);
    } else {
      ::__fsetlocking(stderr, FSETLOCKING_BYCALLER);
    }
  }

  // Registered late, it runs before what was there already is taken down, which one that still runs
  // may be using.
  static void OnExit(int code, void* /*unused*/);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int> count_{0};         // Written under mutex_.
  std::atomic<bool> awaited_{false};  // Who ends the process has waited already.
};

// Made with the first watch, on a thread of the program's.
constinit PerProcess<RunningHooks> all_running;

void RunningHooks::OnExit(int code, void* /*unused*/) {
  RunningHooks* const running = all_running.Present();
  if (running == nullptr || running->count_.load() == 0) return;
  if (!running->awaited_.load() &&
      running->AwaitNone(Deadline::After(SystemClock().Now(), kHooksEnd))) {
    return;
  }
  if (::ftrylockfile(stdout) == 0) (void)::fflush_unlocked(stdout);
  ::_exit(code);
}

// What a hook owns may be Python's, and nobody may let go of that in a process that is ending.
template <typename Owned>
void Drop(Owned owned) {
  if (ExitHasBegun()) new Owned(std::move(owned));
}

}  // namespace

struct AbortWatch::Shared {
  struct Followed {
    std::uint64_t after;  // Number of the last event before it was put here.
    std::weak_ptr<AbortHooks> hooks;
  };

  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex:
  std::vector<Followed> followed;
  std::uint64_t taken = 0;  // The last event that was looked at.
  std::deque<Hooks> due;    // Of the failures up to that one.
  bool running = false;     // The thread is in foreign code, and may stay there.
  bool ended = false;

  void Take(const Session& session) {
    const std::lock_guard lock(mutex);
    const Deadline now = Deadline::At(SystemClock().Now());
    while (true) {
      const auto event = session.AwaitEvent(taken, now);
      if (!event.ok()) return;
      taken = event->number;
      if (event->kind != SessionEvent::Kind::kFenced) continue;
      if (event->cause.code() == StatusCode::kGrowth) continue;
      for (const Followed& one : followed) {
        const auto hooks = one.after < taken ? one.hooks.lock() : nullptr;
        if (hooks && !hooks->empty()) due.push_back(hooks->Now());
      }
    }
  }

  // On the thread.
  void RunDue() {
    std::unique_lock lock(mutex);
    while (!due.empty()) {
      Hooks hooks = std::move(due.front());
      due.pop_front();
      running = true;
      changed.notify_all();
      lock.unlock();
      // A process that ends needs no record of its own end, and must not wait for one.
      all_running.Get().Begin();
      if (!ExitHasBegun()) AbortHooks::Run(*hooks);
      Drop(std::move(hooks));
      all_running.Get().End();
      lock.lock();
      running = false;
    }
  }

  // On the thread.
  void Watch(std::shared_ptr<Session> session, std::uint64_t after) {
    while (true) {
      const auto event = session->AwaitEvent(after, Deadline::Never());
      if (!event.ok()) break;  // The session is closed.
      after = event->number;
      Take(*session);
      RunDue();
    }
    // It may be the last one that has the session, whose end the exit must not overtake either.
    all_running.Get().Begin();
    Drop(std::move(session));
    all_running.Get().End();
    const std::lock_guard lock(mutex);
    ended = true;
    changed.notify_all();
  }
};

bool AwaitAbortHooks(Deadline deadline) { return all_running.Get().AwaitNone(deadline); }

std::shared_ptr<AbortWatch::Shared> AbortWatch::shared() const {
  const std::lock_guard lock(mutex_);
  return shared_;
}

Status AbortWatch::Follow(const std::shared_ptr<Session>& session,
                          const std::shared_ptr<AbortHooks>& hooks) {
  const std::uint64_t last = LastEvent(*session);
  const std::lock_guard lock(mutex_);
  if (shared_ == nullptr) {
    (void)all_running.Get();
    const auto shared = std::make_shared<Shared>();
    shared->taken = last;
    auto thread = StartThread("res-hooks", [shared, own = session, last]() mutable {
      shared->Watch(std::move(own), last);
    });
    if (!thread.ok()) return thread.status();
    thread->detach();
    shared_ = shared;
  }
  const std::lock_guard shared_lock(shared_->mutex);
  auto& followed = shared_->followed;
  const auto gone = [](const Shared::Followed& one) { return one.hooks.expired(); };
  followed.erase(std::remove_if(followed.begin(), followed.end(), gone), followed.end());
  for (const Shared::Followed& one : followed) {
    if (one.hooks.lock() == hooks) return Status::Ok();
  }
  followed.push_back({last, hooks});
  return Status::Ok();
}

void AbortWatch::Take(const Session& session) const {
  if (const auto shared = this->shared()) shared->Take(session);
}

void AbortWatch::LetBegin(const Session& session, Deadline deadline) const {
  const auto shared = this->shared();
  if (shared == nullptr) return;
  shared->Take(session);
  std::unique_lock lock(shared->mutex);
  shared->changed.wait_for(lock, deadline.LeftAt(SystemClock().Now()),
                           [&] { return shared->due.empty() || shared->running; });
}

void AbortWatch::AwaitEnd(Deadline deadline) const {
  const auto shared = this->shared();
  if (shared == nullptr) return;
  std::unique_lock lock(shared->mutex);
  shared->changed.wait_for(lock, deadline.LeftAt(SystemClock().Now()),
                           [&] { return shared->ended || shared->running; });
}

}  // namespace resilient::plugin
