#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include <c10/util/Exception.h>
#include <resilient/clock.h>
#include <resilient/per_process.h>
#include <resilient/session.h>

#include "torch_plugin/csrc/time_policy.h"

namespace resilient::plugin {

// The functions that others have put on one process group, by the numbers that they gave them; one
// with a number that is taken replaces the one before, as c10d's own tables do.
//
// Owner: the backend, and weakly or strongly who runs them. Thread: thread-safe. No lock is held
// while a function runs, so that it may take itself out, or wait for one that does: a call that has
// begun goes on behind Remove. What one raises is shown, and stops none of the others. In a forked
// child, where the lock may be held by a thread that is not there, nothing is put in, taken out or
// run: torch takes its hooks out there, too, when it lets go of the parent's groups.
template <typename... Args>
class HookTable {
 public:
  using Hook = std::function<void(Args...)>;

  void Add(std::int64_t id, Hook hook) {
    if (mark_.InChild()) return;
    Change([&](Table& table) { table[id] = std::make_shared<const Hook>(std::move(hook)); });
  }

  void Remove(std::int64_t id) {
    if (mark_.InChild()) return;
    Change([&](Table& table) { table.erase(id); });
  }

  bool empty() const { return mark_.InChild() || empty_.load(std::memory_order_relaxed); }

  using Table = std::map<std::int64_t, std::shared_ptr<const Hook>>;

  // Those that are there now, kept alive; never null. REQUIRES: not in a forked child.
  std::shared_ptr<const Table> Now() const {
    const std::lock_guard lock(mutex_);
    return table_;
  }

  static void Run(const Table& table, const Args&... args) {
    for (const auto& [id, hook] : table) {
      try {
        (*hook)(args...);
      } catch (const std::exception& error) {
        TORCH_WARN("hook ", id, " of a process group raised: ", error.what());
      }
    }
  }

  void Run(const Args&... args) const {
    if (!empty()) Run(*Now(), args...);
  }

 private:
  template <typename Edit>
  void Change(Edit edit) {
    std::shared_ptr<const Table> before;  // What only it holds dies behind the lock.
    const std::lock_guard lock(mutex_);
    auto table = std::make_shared<Table>(*table_);
    edit(*table);
    empty_.store(table->empty(), std::memory_order_relaxed);
    before = std::exchange(table_, std::move(table));
  }

  const ProcessMark mark_;
  std::atomic<bool> empty_{true};
  mutable std::mutex mutex_;
  std::shared_ptr<const Table> table_ = std::make_shared<Table>();  // Guarded by mutex_.
};

// Run once for each failure that ends a generation, whoever aborted, behind the fence: torch's
// flight recorder writes its trace. Not run when the world only grows.
using AbortHooks = HookTable<>;

// Run once for each Work that has ended well, with its completion key and its duration in
// milliseconds, on whatever thread it ends on, the communicator's too: what is called must be
// short, take no interpreter's lock and call nothing of ours.
using CompletionHooks = HookTable<std::uint64_t, float>;

// True when no thread of this process is in an abort hook by `deadline`, of whichever session. For
// who ends the process; the exit does not wait for those that are left. Blocks.
bool AwaitAbortHooks(Deadline deadline);

// What one process group keeps over all its sessions. Thread: as its members.
struct GroupParts {
  std::shared_ptr<AbortHooks> abort = std::make_shared<AbortHooks>();
  std::shared_ptr<CompletionHooks> completion = std::make_shared<CompletionHooks>();
  std::shared_ptr<TimeoutExtension> extension = std::make_shared<TimeoutExtension>();
};

// The thread "res-hooks", which waits for the failures of one session and runs the abort hooks of
// its groups; started with the first of them. They may take their time, for ever too, and hold up
// nothing but each other: nobody waits for one. What runs is kept alive until it has returned.
//
// Owner: SessionContext. Thread: thread-safe. Lifetime: the thread is never joined. It ends by
// itself behind Session::Close and what it has to run, and touches only what it owns.
class AbortWatch {
 public:
  AbortWatch() = default;
  AbortWatch(const AbortWatch&) = delete;
  AbortWatch& operator=(const AbortWatch&) = delete;

  // Runs them for all failures from now on, while they exist. Idempotent. kResourceExhausted when
  // there can be no thread.
  Status Follow(const std::shared_ptr<Session>& session, const std::shared_ptr<AbortHooks>& hooks);

  // What is registered now will run for the failures that the session has told of so far, even if
  // it is taken out before its turn.
  void Take(const Session& session) const;

  // Take, and returns when the thread is at it: some microseconds, unless it cannot run. For
  // whoever lets go of hooks next that know their owner weakly, and do nothing without it.
  void LetBegin(const Session& session, Deadline deadline) const;

  // Returns when the thread has ended, or a hook keeps it from that. REQUIRES: the session is
  // closed; not in a forked child.
  void AwaitEnd(Deadline deadline) const;

 private:
  struct Shared;

  std::shared_ptr<Shared> shared() const;

  mutable std::mutex mutex_;
  std::shared_ptr<Shared> shared_;  // Guarded by mutex_. With the thread; null: not started.
};

}  // namespace resilient::plugin
