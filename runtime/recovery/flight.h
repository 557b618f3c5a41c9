#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include <resilient/abort.h>
#include <resilient/communicator.h>
#include <resilient/status.h>

namespace resilient::recovery {

// What the operations of one generation have in common: how many are in flight and why they end.
// Owner: shared by the session and the completions of that generation, which may outlive the
// generation. Thread: thread-safe, except where noted.
class Flight {
 public:
  explicit Flight(std::uint64_t generation) : generation_(generation) {}

  std::uint64_t generation() const { return generation_; }
  const std::shared_ptr<AbortCell>& cell() const { return cell_; }

  // REQUIRES: the session's mutex is held and Ended() is false, or the caller has entered already.
  void Enter() { in_flight_.fetch_add(1); }
  // True when this was the last operation of an ended generation.
  bool Leave() { return in_flight_.fetch_sub(1) == 1 && Ended(); }

  // From here on every operation of this generation fails with `cause`. The first cause wins.
  // REQUIRES: the session's mutex is held, so that no operation enters afterwards.
  void End(const Status& cause) {
    if (Ended()) return;
    cause_ = cause;
    ended_.store(true);
  }
  bool Ended() const { return ended_.load(); }
  // REQUIRES: Ended().
  const Status& cause() const { return cause_; }

  // A communicator has failed for a reason of its own, which the service is being told: its fence
  // will follow, or the end of the session.
  void NoteBroken() { broken_.store(true); }
  bool IsBroken() const { return broken_.load(); }

  // An operation needs global rank `rank` (-1: any other), which has said goodbye. True: that is
  // not what was noted last, and the service is to be told.
  bool NoteLeaver(int rank) { return needed_leaver_.exchange(rank) != rank; }
  // Who has left, as far as operations have met it; nullopt: nobody that they needed.
  std::optional<int> needed_leaver() const {
    const int rank = needed_leaver_.load();
    return rank == kNobody ? std::nullopt : std::optional(rank);
  }

  // Nothing of this generation is in flight and nothing will be.
  bool IsQuiet() const { return Ended() && in_flight_.load() == 0; }
  // Operations of this generation that have entered and not left.
  std::int64_t in_flight() const { return in_flight_.load(); }

 private:
  const std::uint64_t generation_;
  const std::shared_ptr<AbortCell> cell_ = std::make_shared<AbortCell>();
  // Both sequentially consistent: who ends the generation and who leaves last must not miss each
  // other, or nobody would say that it is quiet.
  std::atomic<std::int64_t> in_flight_{0};
  std::atomic<bool> ended_{false};
  std::atomic<bool> broken_{false};
  static constexpr int kNobody = -2;
  std::atomic<int> needed_leaver_{kNobody};
  Status cause_;  // Written once, before ended_.
};

// Tells a session that nothing of a generation that has ended is in flight any more. Owner: shared
// by the session and the operations, some of which a driver may hold for longer than the session
// lives. Thread: thread-safe.
class QuietBell {
 public:
  explicit QuietBell(std::function<void()> ring) : ring_(std::move(ring)) {}
  void Ring() {
    const std::lock_guard lock(mutex_);
    if (ring_) ring_();
  }
  // Waits for a Ring that is under way.
  void Silence() {
    const std::lock_guard lock(mutex_);
    ring_ = nullptr;
  }

 private:
  std::mutex mutex_;
  std::function<void()> ring_;  // Guarded by mutex_. Does not block.
};

// The first cause as told to an operation that was never started.
Status NotStarted(const Status& cause, const std::string& group, const std::string& what);

// Whether a communicator that says so of an operation has failed: see Flight::NoteBroken.
bool IsOfCommunicator(StatusCode code);

// This rank needs `communicator`, of that flight, no more: a goodbye to the peers, but not where
// the generation has ended: a peer that the fence has not reached yet would take the goodbye for
// the cause. `flight` may be null. Thread: thread-safe.
void Dismiss(Communicator& communicator, const Flight* flight);

// One operation on its way through a communicator: what its error text needs. It has entered the
// flight, and leaves it when it is destroyed, which for a device is later than its end: when that
// does not touch the memory any more. Owner: its completion. Thread: thread-safe.
class OperationRecord {
 public:
  OperationRecord(std::shared_ptr<Flight> flight, std::shared_ptr<QuietBell> bell,
                  std::string group, const Operation& operation);
  ~OperationRecord() {
    if (flight_->Leave()) bell_->Ring();
  }
  OperationRecord(const OperationRecord&) = delete;
  OperationRecord& operator=(const OperationRecord&) = delete;

  // Held by the submitter while the communicator takes the operation, so that a completion which
  // is faster than the return of Submit finds the sequence number.
  std::mutex& submit_mutex() { return submit_mutex_; }
  // REQUIRES: submit_mutex is held.
  void set_seq(std::uint64_t seq) { seq_ = seq; }

  // What the caller is told when the communicator says `status`: the first cause of the fence for
  // whatever a fence has ended, also when the bytes were complete in the very moment.
  Status Outcome(const Status& status);

  // "all_reduce(float32[4], sum)".
  std::string Name() const { return Describe(summary_); }
  Flight& flight() const { return *flight_; }
  // CommunicatorName of the one that runs it.
  std::string communicator() const { return CommunicatorName(group_, summary_.device); }
  bool point_to_point() const { return IsPointToPoint(summary_.kind); }
  bool binding() const { return summary_.binding; }

 private:
  const std::shared_ptr<Flight> flight_;
  const std::shared_ptr<QuietBell> bell_;
  const std::string group_;
  const Operation summary_;  // Without its memory.
  std::mutex submit_mutex_;
  std::uint64_t seq_ = 0;  // Guarded by submit_mutex_.
};

}  // namespace resilient::recovery
