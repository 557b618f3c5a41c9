#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/communicator.h>
#include <resilient/operation.h>
#include <resilient/status.h>

#include "runtime/comm/wire.h"

namespace resilient {

// Numbers that follow each other, from 1; `last` = 0: none. Thread: value type.
struct MessageSpan {
  std::uint64_t first = 0;
  std::uint64_t last = 0;

  // The next one.
  void Add(std::uint64_t number) {
    if (last == 0) first = number;
    last = number;
  }
  bool Meets(const MessageSpan& other) const {
    return last != 0 && other.last != 0 && first <= other.last && other.first <= last;
  }
};

// Which captured operations the replay of a graph is in: a collective by its number among the
// captured ones of the group, messages by those among the captured ones to, and from, their peer.
// Thread: value type.
struct ReplayPlace {
  struct Messages {
    MessageSpan sends;
    MessageSpan recvs;
  };
  std::uint64_t collective = 0;  // 0: in none.
  std::map<int, Messages> messages;
};

// Where one rank of a group stands, as it tells another one. Thread: value type.
struct NcclProgress {
  bool asks = false;              // It waits, and wants to know where the reader stands.
  std::uint64_t submitted = 0;    // Collectives that it has been given.
  std::uint64_t entered = 0;      // Of these the ones that its device has begun.
  std::uint64_t ended = 0;        // Of these the ones that are over.
  std::uint64_t sum = 0;          // Over what those are.
  std::uint64_t about = 0;        // The collective in which the reader said it waits; 0: in none.
  std::uint64_t about_sum = 0;    // Over those up to it; 0: not known, or not begun yet.
  std::uint64_t sends = 0;        // Messages to the reader that its device has begun.
  std::uint64_t recvs = 0;        // Messages from the reader likewise.
  std::uint64_t sends_given = 0;  // Those that it has been given.
  std::uint64_t recvs_given = 0;
  std::uint64_t replay = 0;          // The captured collective in which a graph is; 0: in none.
  ReplayPlace::Messages replay_of;   // Captured messages to and from the reader in which it is.
  std::uint64_t failed_attempt = 0;  // The latest in which it could not connect, from 1; 0: none.
  MessageHeader head;                // The collective in which it waits. seq = 0: in none.
};

// One length for all. Of a head that says where it was called only that fits.
inline constexpr std::size_t kProgressBytes = 312;
std::string EncodeProgress(const NcclProgress& progress);
// nullopt: it is none.
std::optional<NcclProgress> DecodeProgress(std::string_view bytes);

// Which ranks of a group have not entered an operation of a device, and which are in another one,
// by what they tell each other: NCCL says neither. `Entered` means begun by the device, so that no
// long queue is taken for a rank that does not come. A difference shows when two ranks wait for
// each other in it, or by the sum over all that both have run.
//
// Pure: no clock, no messages. Owner: NcclGroup. Thread: caller-synchronised.
class NcclWatch {
 public:
  // How far ranks may be apart for their sums to be compared.
  static constexpr std::size_t kSumsMax = 4096;

  // `spec` outlives it.
  explicit NcclWatch(const GroupSpec& spec);

  // `op` has been submitted, the next one.
  void OnSubmitted(const Operation& op, std::uint64_t seq);

  // The device has begun `op`, the next one. Returns its number among the messages to or from its
  // peer; of a collective its own.
  std::uint64_t OnEntered(const Operation& op, std::uint64_t seq);

  // The collective `seq` is over.
  void OnEnded(std::uint64_t seq) { ended_ = seq; }

  // What `peer` is told by a rank that waits in `head`, which it has entered, and in `replay`;
  // null: in none.
  NcclProgress Tell(int peer, const Operation* head, std::uint64_t seq,
                    const ReplayPlace* replay) const;
  // Not OK: kMismatch, with what `peer` is in. `head` as in Tell.
  Status Hear(int peer, NcclProgress progress, const Operation* head, std::uint64_t seq);
  // Looks again at those that were ahead when they told.
  Status Compare();

  // Group ranks that are not known to have come so far with it, ascending. `number`: of OnEntered.
  // Who has submitted it has done its part: its device is to begin it. Nothing can move before all
  // devices have.
  enum class Stage { kSubmitted, kBegun };
  std::vector<int> Missing(const Operation& op, std::uint64_t number, Stage stage) const;
  // Those that are known to have submitted it and not that their devices have begun it, ascending.
  std::vector<int> NotBegun(const Operation& op, std::uint64_t number) const;
  // A replay has come to a captured operation: what was told of replays was of others.
  void OnReplay();
  // Group ranks that take part in it and are not known to be in it, ascending.
  std::vector<int> NotInReplay(const ReplayPlace& place) const;
  // Whether `peer`, which tells nothing any more, has gone without its part in it.
  bool GoneBefore(int peer, const Operation& op, std::uint64_t number) const;
  // Whether `peer` is known to have ended the collectives that are over here, and to have begun to
  // receive all that was sent to it.
  bool HasAllOfOurs(int peer) const;
  // The latest collective that is over; 0: none.
  std::uint64_t ended() const { return ended_; }
  // What the program has submitted, of which `waiting` has been begun and is not over. NCCL knows
  // no tags: a message is for the next recv. Without the device's.
  GroupProgress Progress(const std::vector<const Operation*>& waiting) const;
  // The latest collective that the device has begun; 0: none.
  std::uint64_t begun() const { return entered_; }
  // Whether there is something that the next rank has not been told.
  bool HasNews() const { return ended_ > told_; }
  void NoteTold() { told_ = ended_; }

 private:
  struct Messages {
    std::uint64_t sends = 0;
    std::uint64_t recvs = 0;
    std::uint64_t sends_given = 0;
    std::uint64_t recvs_given = 0;
  };
  std::optional<std::uint64_t> SumAt(std::uint64_t collective) const;
  Status Different(int peer, std::uint64_t collective) const;
  Status CompareWith(int peer, NcclProgress& told) const;

  const GroupSpec& spec_;
  std::uint64_t submitted_ = 0;
  std::uint64_t entered_ = 0;
  std::uint64_t ended_ = 0;
  std::uint64_t told_ = 0;
  std::array<std::uint64_t, kSumsMax> sums_{};  // Of collective k at k % kSumsMax.
  std::map<int, Messages> messages_;            // By peer.
  std::map<int, NcclProgress> heard_;           // The latest, by peer.
};

}  // namespace resilient
