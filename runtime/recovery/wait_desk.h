#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <resilient/clock.h>
#include <resilient/rendezvous.h>

#include "runtime/recovery/callers.h"

namespace resilient::recovery {

// What the operations of this rank wait for, as its communicators tell it: the reports for the
// membership service, and the line about it for whoever reads the log of a rank that waits.
// Owner: SessionImpl. Thread: Note and NoteEnd are thread-safe, the rest is the control
// thread's.
class WaitDesk {
 public:
  struct Options {
    int rank = -1;
    Duration wait_log = std::chrono::seconds(30);
    Duration stall = std::chrono::hours(1);
    Duration device_stall = std::chrono::minutes(10);
  };
  explicit WaitDesk(Options options) : options_(options) {}

  // Communicators' threads.
  void Note(const std::string& group, std::uint64_t generation,
            std::vector<WaitingOperation> waiting, Instant now);

  // An operation of `group` has ended: what was told of its kind is to be told again. Costs nothing
  // where nothing waits.
  void NoteEnd(const std::string& group, bool point_to_point);

  // How far this rank has come in one group: an answer that the service waits for.
  void NoteProgress(std::uint64_t generation, GroupProgress progress);
  // The service has asked about one that this rank has closed: what it was made of is the answer.
  void NoteAskedOfClosed(std::uint64_t generation, const std::string& group);

  // For the lines from now on.
  void set_rank(int rank) { options_.rank = rank; }
  // Whether something has been told of `generation` lately, or is to be answered.
  bool HasAny(std::uint64_t generation, Instant now) const;
  // With what NoteProgress was given since the last one, and of the groups that were asked about
  // and are closed the names. nullopt: there is none, and nothing has been told of `generation`
  // lately.
  std::optional<WaitingReport> Report(std::uint64_t generation, const Callers::Snapshot& callers,
                                      Instant now);
  // What has been told of `generation` lately.
  std::vector<WaitingCall> CallsOf(std::uint64_t generation, Instant now) const;
  // The session has been joining since `since`. nullopt: nothing is to be asked now.
  std::optional<WaitingReport> JoinReport(Instant since, Instant now);
  // The line that `notice` makes; empty: it was not asked for, or nothing waits any more.
  std::string Line(const LateNotice& notice, Instant now);
  // Of the operation that a notice was asked about: WaitingOperation::silent.
  std::vector<int> Silent() const;
  // The line for a notice that has not come; empty: none is overdue.
  std::string OverdueLine(Instant now);

 private:
  struct Told {
    std::uint64_t generation = 0;
    std::vector<WaitingOperation> waiting;
    Instant when{};
  };
  // REQUIRES: mutex_.
  void BeginAnswersOf(std::uint64_t generation);
  std::vector<WaitingCall> Calls(std::uint64_t generation, Instant now) const;
  bool IsLineDue(Duration age, Instant now) const;

  Options options_;  // But for the rank constant.
  mutable std::mutex mutex_;
  std::map<std::string, Told> told_;               // By group. Guarded by mutex_.
  std::atomic<bool> any_{false};                   // Something may be in told_.
  std::map<std::string, GroupProgress> progress_;  // By group, of one generation. Guarded.
  std::set<std::string> closed_asked_;             // Of that generation. Guarded by mutex_.
  std::uint64_t progress_generation_ = 0;          // Guarded by mutex_.
  // Confined to the control thread.
  Instant last_line_ = Instant::min();
  std::optional<Instant> asked_;
  std::optional<WaitingCall> asked_about_;  // Null: about the join.
  Instant asked_about_since_{};             // When that began.
  std::string may_act_;                     // Callers::Snapshot::may_act of the latest report.
};

}  // namespace resilient::recovery
