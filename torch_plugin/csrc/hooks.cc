#include "torch_plugin/csrc/hooks.h"

#include <algorithm>
#include <condition_variable>
#include <vector>

#include <resilient/exit.h>

#include "torch_plugin/csrc/thread.h"

namespace resilient::plugin {

struct AbortWatch::Shared {
  struct Followed {
    std::uint64_t after;  // Number of the last event before it was put here.
    std::weak_ptr<AbortHooks> hooks;
  };

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Followed> followed;  // Guarded by mutex.
  std::uint64_t watched = 0;       // Guarded by mutex. The last event whose hooks have been run.

  void RunHooks(std::uint64_t number) {
    std::vector<std::shared_ptr<AbortHooks>> all;
    {
      const std::lock_guard lock(mutex);
      for (const Followed& one : followed) {
        auto hooks = one.after < number ? one.hooks.lock() : nullptr;
        if (hooks) all.push_back(std::move(hooks));
      }
    }
    for (const auto& hooks : all) hooks->Run();
  }

  void Watch(const Session& session, std::uint64_t after) {
    while (true) {
      const auto event = session.AwaitEvent(after, Deadline::Never());
      if (!event.ok()) return;  // The session is closed.
      after = event->number;
      const bool failed =
          event->kind == SessionEvent::Kind::kFenced && event->cause.code() != StatusCode::kGrowth;
      // A process that ends needs no record of its own end, and must not wait for one.
      if (failed && !ExitHasBegun()) RunHooks(event->number);
      const std::lock_guard lock(mutex);
      watched = after;
      changed.notify_all();
    }
  }
};

namespace {

// Number of the session's last event so far; 0: none.
std::uint64_t LastEvent(const Session& session) {
  const Deadline now = Deadline::At(SystemClock().Now());
  std::uint64_t last = 0;
  for (auto event = session.AwaitEvent(0, now); event.ok(); event = session.AwaitEvent(last, now)) {
    last = event->number;
  }
  return last;
}

}  // namespace

AbortWatch::~AbortWatch() { Stop(false); }

Status AbortWatch::Follow(const std::shared_ptr<Session>& session,
                          const std::shared_ptr<AbortHooks>& hooks) {
  const std::uint64_t last = LastEvent(*session);
  const std::lock_guard lock(mutex_);
  if (shared_ == nullptr) {
    const auto shared = std::make_shared<Shared>();
    shared->watched = last;
    auto thread =
        StartThread("res-hooks", [shared, session, last] { shared->Watch(*session, last); });
    if (!thread.ok()) return thread.status();
    thread_ = std::move(thread).value();
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

void AbortWatch::CatchUp(const Session& session, Deadline deadline) const {
  std::shared_ptr<Shared> shared;
  {
    const std::lock_guard lock(mutex_);
    if (thread_.get_id() == std::this_thread::get_id()) return;
    shared = shared_;
  }
  if (shared == nullptr) return;
  const std::uint64_t last = LastEvent(session);
  std::unique_lock lock(shared->mutex);
  shared->changed.wait_for(lock, deadline.LeftAt(SystemClock().Now()),
                           [&] { return shared->watched >= last; });
}

void AbortWatch::Stop(bool in_forked_child) {
  if (in_forked_child) {
    // The thread does not exist here, and a std::thread that is joinable ends the process.
    if (thread_.joinable()) new std::thread(std::move(thread_));
    return;
  }
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    thread = std::move(thread_);
  }
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();  // A hook has closed the session; Watch ends behind it.
  } else {
    thread.join();
  }
}

}  // namespace resilient::plugin
