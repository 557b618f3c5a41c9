#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <resilient/clock.h>
#include <resilient/rendezvous.h>

namespace resilient::store {

// How far the members of one world have come, each by its own account, and whether that bears out
// what another member believes of it.
//
// How it works: a rank that waits names the ranks that it has not heard from. That is a belief: a
// message may be on its way, or a link silent. The named rank knows which operations it has
// entered. So a belief counts as proved only where that rank itself has said, after it was asked,
// that it has not entered the operation; and it is refuted where the rank has said that it has.
// Entering cannot be undone, so a refutation holds for good; a proof is as old as the answer.
//
// Owner: the Diagnosis of a world. Thread: caller-synchronised. Pure.
class ProgressBook {
 public:
  enum class Standing : std::uint8_t {
    kUnknown,
    kNotEntered,  // The awaited rank has not done what the call needs.
    kNotBegun,    // It has, and its device has not begun it: what is missing is that one's.
    kEntered      // It has; what is missing is on the network, or should be.
  };

  // The account of `rank`.
  void Note(int rank, const std::vector<GroupProgress>& progress, Instant now);
  // `rank` waits in these, and so has entered them.
  void NoteCalls(int rank, const std::vector<WaitingCall>& calls);

  // A call that keeps `rank` waiting, since `begun` at the latest.
  struct Wait {
    int rank = -1;
    const WaitingCall& call;
    Instant begun{};
  };
  // Where `peer` stands in it; kNotEntered, and of a message kNotBegun, only by accounts that are
  // not older than `since`; a collective that was not begun then may have been since. Of a
  // recv kEntered says that some message of `peer` is on its way, which may have another tag.
  Standing Of(const Wait& wait, int peer, Instant since) const;

  // What `rank` has said of the device that runs the operations of `group`. Thread: value type.
  struct Device {
    const DeviceProgress* progress = nullptr;  // Null: nothing, or before `since`.
    Instant given{};
  };
  Device DeviceOf(int rank, const std::string& group, Instant since) const;

  void Forget(const std::set<int>& all_but);

 private:
  struct Account {
    GroupProgress progress;
    std::optional<Instant> given;  // nullopt: nothing but what its calls show.
    std::uint64_t entered = 0;     // The latest collective that it has shown to be in.
    std::uint64_t begun = 0;       // The latest that its device has begun.
  };
  const Account* Find(int rank, const std::string& group) const;
  static std::optional<Standing> OnDevice(const Account& account, const PeerProgress* with_waiter,
                                          const WaitingOperation& message);
  Standing OfMessages(const Wait& wait, int peer, Instant since) const;

  std::map<int, std::map<std::string, Account>> accounts_;  // By rank and group.
};

}  // namespace resilient::store
