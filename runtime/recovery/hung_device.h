#pragma once

#include <map>
#include <string>
#include <utility>

#include <resilient/clock.h>
#include <resilient/whereabouts.h>

namespace resilient::recovery {

// Whether a thread of a process whose device hangs waits for that device. Such a wait (a
// cudaStreamSynchronize) ends with the process alone, and raises nothing before: nobody can tell
// the program of the failure. It is known by a thread that submits operations, is where it was
// before the failure came, and stays there for the budget of a recovery; one that moves has heard
// of it, or will.
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

  // Where the program is: also while the device works, as others wait for this rank.
  void OnSeen(const Whereabouts& seen, Instant now) {
    std::map<int, Place> places;
    for (const ThreadStack& thread : seen.submitting) {
      const auto before = places_.find(thread.id);
      const bool known = before != places_.end() && !IsEmpty(before->second.at);
      const bool stays = known && !before->second.moved && IsSame(before->second.at, thread);
      places[thread.id] = {thread, hangs_ && !stays};
    }
    places_ = std::move(places);
    if (hangs_) seen_ = now;
  }

  // Where the process is to be ended, the thread that waits: the program will not hear of it.
  // Null: nothing is known to wait. Until the next OnSeen.
  const ThreadStack* StuckIn(Duration budget) const {
    if (!hangs_ || seen_ - since_ < budget) return nullptr;
    for (const auto& [id, place] : places_) {
      if (!place.moved) return &place.at;
    }
    return nullptr;
  }

 private:
  struct Place {
    ThreadStack at;
    bool moved = false;  // Since it hangs; or where it was is not known.
  };

  static bool IsEmpty(const ThreadStack& thread) {
    return thread.stack.empty() && thread.top.empty();
  }
  static bool IsSame(const ThreadStack& a, const ThreadStack& b) {
    return a.stack == b.stack && (!a.stack.empty() || a.top == b.top);
  }

  bool hangs_ = false;
  std::map<int, Place> places_;  // By the thread.
  Instant since_{};
  Instant seen_{};
};

}  // namespace resilient::recovery
