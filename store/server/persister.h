#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <resilient/clock.h>
#include <resilient/status.h>

#include "runtime/base/thread.h"
#include "store/core/journal.h"
#include "store/server/crash_points.h"
#include "store/server/engine.h"
#include "store/server/metrics.h"
#include "store/server/uv_handle.h"

namespace resilient::store {

struct PersisterEvents {
  // On the loop's thread: everything up to and with this ticket is kept.
  std::function<void(std::uint64_t ticket)> on_kept;
  // On the writer thread, once, instead of any further on_kept: the disk refused. The server's
  // function does not return.
  std::function<void(const Status& why)> on_failure;
};

// Where commits are measured; nowhere by default. What it names outlives the persister.
struct CommitMeter {
  const Clock* clock = nullptr;
  ServerMetrics* metrics = nullptr;
};

// Brings the writes of the core to the engine, off the loop's thread: one thread "res-writer" makes
// what has gathered while it was busy into one transaction. Whoever adds bounds what is under way;
// see HeldEffects. Owner: Server. Thread: the loop's, but for on_failure. Lifetime: Stop, at the
// latest by the destructor, before the loop ends.
class Persister {
 public:
  // `crash_points`: outlives this; null: none.
  Persister(UvLoop& loop, std::unique_ptr<Engine> engine, PersisterEvents events,
            CrashPoints* crash_points = nullptr, CommitMeter meter = {});
  ~Persister() { Stop(); }
  Persister(const Persister&) = delete;
  Persister& operator=(const Persister&) = delete;

  // Takes the writes of one step. Tickets ascend. REQUIRES: there is one.
  std::uint64_t Add(std::vector<Write> writes);
  std::uint64_t last_ticket() const { return last_ticket_; }
  // Lets the thread have what was added: once for a turn of the loop rather than for each step.
  void Flush();
  // Waits until everything that was added is kept (or the engine has failed), and joins. No
  // callback comes afterwards. Idempotent.
  void Stop();

 private:
  void WriteLoop();
  // False: failed.
  bool WriteOut(std::vector<Write> writes, std::uint64_t ticket);

  const PersisterEvents events_;
  CrashPoints* const crash_points_;
  const CommitMeter meter_;
  // Self-synchronised.
  UvAsync kept_signal_;
  std::atomic<std::uint64_t> kept_ = 0;
  // Confined to the writer thread.
  const std::unique_ptr<Engine> engine_;
  // Confined to the loop's thread.
  std::vector<Write> added_;
  std::uint64_t last_ticket_ = 0;
  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Write> queue_;
  std::uint64_t queue_ticket_ = 0;
  bool stopping_ = false;

  Thread thread_;  // Last: it uses all of the above.
};

}  // namespace resilient::store
