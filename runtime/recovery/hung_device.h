#pragma once

#include <string>
#include <utility>

#include <resilient/clock.h>
#include <resilient/whereabouts.h>

namespace resilient::recovery {

// Whether the main thread of a process whose device hangs waits for that device. Such a wait (a
// cudaStreamSynchronize) ends with the process alone, and raises nothing before: nobody can tell
// the program of the failure. It is known by a main thread that is where it was before the failure
// came, and stays there for the budget of a recovery; one that moves has heard of it, or will.
//
// Owner: SessionImpl. Thread: caller-synchronised. Pure: time is an argument.
class HungDevice {
 public:
  // This process has been told that its device hangs.
  void OnHangs(Instant now) {
    if (hangs_) return;
    hangs_ = true;
    since_ = now;
  }
  bool hangs() const { return hangs_; }

  // Where the main thread is: also while the device works, as others wait for this rank.
  void OnSeen(const Whereabouts& seen, Instant now) {
    // While native code holds the interpreter's lock the stack is the last one that was read.
    const std::string& place = seen.stack.empty() ? seen.main_thread : seen.stack;
    if (hangs_ && (place_.empty() || place != place_)) moved_ = true;
    place_ = place;
    if (hangs_) seen_ = now;
  }

  // The process is to be ended: the program will not hear of it.
  bool IsStuck(Duration budget) const { return hangs_ && !moved_ && seen_ - since_ >= budget; }

 private:
  bool hangs_ = false;
  bool moved_ = false;  // Since then; or where it was is not known.
  std::string place_;
  Instant since_{};
  Instant seen_{};
};

}  // namespace resilient::recovery
