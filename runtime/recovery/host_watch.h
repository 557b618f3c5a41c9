#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <resilient/clock.h>
#include <resilient/rendezvous.h>

#include "runtime/base/futex.h"
#include "runtime/base/process.h"
#include "runtime/base/robust_token.h"
#include "runtime/base/thread.h"
#include "runtime/recovery/watch_list.h"

namespace resilient::recovery {

// Lets the other ranks of this host see this one's end at once, and sees theirs: each holds a
// RobustToken, and each has a thread "res-watch" that sleeps on those of the others. A rank that
// has nobody to watch has no thread.
//
// Owner: SessionImpl. Thread: Offer and LetGo on the control thread, whose life stands for the
// process's; Follow and Close thread-safe. Lifetime: Close before what `on_death` uses goes.
class HostWatch {
 public:
  // On the watch thread, once for each neighbour; must not block and not call back.
  using OnDeath = std::function<void(const Neighbour&, const ProcessEnd&)>;

  HostWatch(bool enabled, OnDeath on_death, const Clock& clock,
            FutexSupport support = FutexSupport::kAsKernel);
  ~HostWatch();
  HostWatch(const HostWatch&) = delete;
  HostWatch& operator=(const HostWatch&) = delete;

  // What this rank joins with. The first call makes the token and takes it for the calling thread.
  SessionEndpoint Offer(std::string communicator);
  // From now on the members of `view` are watched and nobody else; this one is `rank` of them.
  void Follow(const View& view, int rank);
  // The control thread is about to end in good order.
  void LetGo();
  // Joins the thread. Idempotent.
  void Close();

 private:
  struct Watched {
    Neighbour neighbour;
    std::unique_ptr<TokenWatch> token;
    Instant died = Instant::max();  // When the word first said so; max: it does not.
  };

  // On the watch thread.
  void Run();
  void Adopt(std::vector<Neighbour> neighbours);
  void TellDeath(Neighbour neighbour, const ProcessEnd& end);
  void Look(Instant now);
  void Sleep(std::uint32_t changes_seen);

  const bool enabled_;
  const OnDeath on_death_;
  const Clock& clock_;
  const FutexSupport support_;
  // Counts what the thread is to look at: Follow, Close. It sleeps on it beside the tokens.
  std::uint32_t changes_ = 0;  // Only by __atomic_*.
  // Confined to the control thread.
  bool offered_ = false;
  SessionEndpoint own_;
  std::unique_ptr<RobustToken> token_;
  // Guarded by mutex_:
  std::mutex mutex_;
  std::vector<Neighbour> wanted_;
  bool wanted_changed_ = false;
  bool closing_ = false;
  Thread thread_;  // Started by Follow, joined by Close, which does that without the lock.
  // Confined to the watch thread.
  std::vector<Watched> watched_;
  std::vector<Neighbour> told_;  // Whose death was told, as long as they are followed.
};

}  // namespace resilient::recovery
