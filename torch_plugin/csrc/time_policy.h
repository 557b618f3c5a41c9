#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>

#include <resilient/clock.h>
#include <resilient/operation.h>

namespace resilient::plugin {

// What torch gives a group whose creator said nothing.
inline constexpr std::chrono::milliseconds kTorchDefaultTimeout = std::chrono::minutes(30);

// A timeout of torch in the library's unit, with a century as the longest: nanoseconds of 64 bits
// end after 292 years, milliseconds do not, and an implicit conversion of one that is longer gives
// any number.
constexpr Duration Saturated(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24) * 365 * 100;
  return std::clamp(timeout, -kLongest, kLongest);
}

// What bounds the operations of a world's groups. A group that was handed torch's default has the
// timeout of the world. By default a timeout says how long an operation may stand still once all
// have entered it, and a rank that lives is waited for; torch's default leaves that to op_deadline.
// Thread: value type.
struct TimePolicy {
  bool strict = false;  // As c10d: a timeout bounds each operation, whoever is on the way.
  Duration op_deadline = std::chrono::seconds(120);
  std::chrono::milliseconds world_timeout = kTorchDefaultTimeout;

  // `extension` comes on top of the timeout, and never of what op_deadline bounds.
  void Bound(Operation& operation, std::chrono::milliseconds group_timeout,
             std::chrono::milliseconds extension = {}) const;
};

// Of one group at a time.
inline constexpr std::chrono::milliseconds kExtensionMax = std::chrono::hours(24) * 365;

// What a program has added to the timeout of one process group for what it starts next: c10d's
// ephemeral timeouts. Each addition counts for all that is started from then on, until the first of
// it has ended; those that count add up.
//
// Owner: what the group keeps over its sessions, and the Leases. Thread: thread-safe.
class TimeoutExtension : public std::enable_shared_from_this<TimeoutExtension> {
 public:
  // What something that starts has on top, and the additions that end with it, if it is the first
  // behind them. Destroyed before End it was not started after all: they are for what comes next.
  // Thread: confined.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&& other) noexcept;
    ~Lease() { Release(false); }

    std::chrono::milliseconds total() const { return total_; }
    bool empty() const { return extension_ == nullptr; }  // Nothing ends with it.
    void End() { Release(true); }

   private:
    friend class TimeoutExtension;
    void Release(bool ended);

    std::shared_ptr<TimeoutExtension> extension_;
    std::chrono::milliseconds total_{};
    std::chrono::milliseconds owned_{};
  };

  // Nothing below 1 ms changes anything; all together no more than kExtensionMax.
  void Add(std::chrono::milliseconds timeout);
  Lease Take();

 private:
  std::atomic<bool> any_{false};        // So that who has added nothing takes no lock.
  std::mutex mutex_;                    // A leaf.
  std::chrono::milliseconds active_{};  // Guarded by mutex_. Of what starts now.
  std::chrono::milliseconds owned_{};   // Guarded by mutex_. The part that ends with a Lease.
};

}  // namespace resilient::plugin
