#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <resilient/clock.h>
#include <resilient/group_ranks.h>

namespace resilient {

// An operation that waits is told to the membership service after this time, and again each time it
// has passed.
inline constexpr Duration kWaitTellAfter = std::chrono::seconds(1);
// What is not told again within this time is void: of a communicator to its session, and of a
// session to the membership service.
inline constexpr Duration kWaitingLife = Millis(2500);
// Of one group; the oldest are told.
inline constexpr std::size_t kWaitingOperationsMax = 64;

// An operation of this rank that has been in flight for kWaitTellAfter. Thread: value type.
struct WaitingOperation {
  std::uint64_t seq = 0;  // As Submit returned it.
  // Of a message on a device: its number among those from its sender to its receiver. 0: not known.
  std::uint64_t number = 0;
  bool point_to_point = false;  // Else a collective: the two count apart.
  std::string
      what;  // As Describe: "all_reduce(float32[4], sum)", "recv(float32[4], from 2, tag 7)"
  std::string call_site;  // Operation's; may be empty.
  Duration age{};         // Since it was submitted.
  // Ranks of the world that are not known to have entered it, ascending: of a recv its sender, of a
  // send that nobody takes its receiver; while the links are being made those that this rank has
  // none to yet. Empty: all have entered, data moves or should.
  std::vector<int> missing;
  // Of what runs on devices and this rank's device has begun: ranks of the world that have
  // submitted it and whose devices are not known to have begun it, ascending.
  std::vector<int> not_begun;
  // Where all have entered it and nothing has moved for kWaitTellAfter: ranks of the world whose
  // data, or whose room for ours, has not come, ascending. For the line of this rank; not sent.
  std::vector<int> silent;
  bool any = false;  // One of `missing` is enough: a recv from any rank.
  // A send, which waits for its receiver.
  bool sends = false;
  // A collective that no rank can end before every rank has entered it.
  bool needs_all = false;
  // Operations of this rank that run after this one, and are told of by it.
  std::size_t behind = 0;
};

// An operation that every rank has entered, each by its own account. Thread: value type.
struct EnteredCall {
  std::string group;
  bool point_to_point = false;
  std::uint64_t seq = 0;
};

// What comes of a question how far a rank has come in a group.
enum class ProgressAnswer : std::uint8_t {
  kComing,    // A GroupProgress.
  kNotBegun,  // No operation has been submitted there.
  kOver       // The group has been left, or has failed.
};

// What one rank of a group and this rank have sent each other, by this rank's own count. Thread:
// value type.
struct PeerProgress {
  int rank = -1;               // Of the world.
  std::uint64_t sent = 0;      // Messages to it that the program has begun, ever.
  std::uint64_t received = 0;  // Messages from it that this rank has seen begin, ever.
  // One of these waits in the process of its sender until the program begins a recv for it.
  bool unclaimed = false;
  // Of messages on a device, which go to the queue of the device before it begins them: sends that
  // it has begun; recvs that the program has begun, and of these the device.
  std::uint64_t sends_on_device = 0;
  std::uint64_t recvs_given = 0;
  std::uint64_t recvs_on_device = 0;
};

// What a rank says of the device on which the operations of a group run. Thread: value type.
struct DeviceProgress {
  std::string name;         // "GPU 0 (GPU-8f2c...)"
  std::uint64_t begun = 0;  // The latest collective of the group that it has begun. 0: none.
  // An operation of this process has begun on it and not ended: what waits may wait for that one,
  // and with it for another rank.
  bool runs = false;
  // For how long it has begun and finished nothing of this process, while an operation of the group
  // is in its queue. Zero: it has begun all.
  Duration still{};
  std::string last;     // What it finished last: "all_reduce(float32[4], sum) #7 of group 'w'".
  Duration last_ago{};  // When `last` is not empty.
};

// How far this rank has come in one group, by its own account: the proof, or the disproof, of what
// a peer believes of it. Thread: value type.
struct GroupProgress {
  std::string group;
  bool exists = true;  // False: the program has begun nothing in a group of that name.
  // The latest collective that it has entered: the one that runs, or the next one if that lacks
  // nothing but links. 0: none.
  std::uint64_t entered = 0;
  std::vector<PeerProgress> peers;  // By rank. A peer without messages is left out.
  // Where devices run its operations by themselves: `entered` says what they were given.
  std::optional<DeviceProgress> device = {};
};

// What this rank has made one group of, by its own account. Thread: value type.
struct GroupMade {
  std::string group;
  GroupRanks ranks;
  // An operation was submitted there: in this generation a group of that name has these ranks here,
  // also once it is closed.
  bool used = false;
};

}  // namespace resilient
