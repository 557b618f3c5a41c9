#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/status.h>

namespace resilient::recovery {

// How many completed collectives of one group keep their inputs, and how much of them.
struct ReplayLimits {
  std::size_t operations = 1024;
  std::size_t bytes = std::size_t{1} << 30;
};
// Of one member; what is longer is not run again.
inline constexpr std::size_t kReplaySummaryMax = std::size_t{1} << 20;

// Whether `cause` says that a generation ended with all its members alive, for no reason of an
// operation or of the program: a link broke, or could not be made in time.
bool IsLinkFailure(const Status& cause);

// The messages from or to one rank of a group with one tag. Thread: value type.
struct Stream {
  int peer = -1;  // Group rank.
  std::uint32_t tag = 0;
  friend auto operator<=>(const Stream&, const Stream&) = default;
};

// How far one member is in one group. What it has of a group that it has not made yet: the default.
// Of one that it has closed: the default of the next instance. Thread: value type.
struct GroupSummary {
  std::uint64_t instance = 1;            // How often a group of that name was made in this epoch.
  std::vector<int> ranks;                // Global ranks in group order; none: it is not made here.
  std::uint64_t next = 1;                // Number of the collective that it starts next.
  std::uint64_t first_pending = 1;       // The first one that it has no result of; `next`: none.
  std::uint64_t kept_from = 1;           // It has the inputs of those from here on.
  std::map<Stream, std::uint64_t> sent;  // How many messages have left its memory.
  std::map<Stream, std::uint64_t> received;  // How many are in its memory.
  friend bool operator==(const GroupSummary&, const GroupSummary&) = default;
};

// What a member knows when it meets the others in the next generation. Thread: value type.
struct ReplaySummary {
  std::uint64_t epoch = 0;  // Generation in which the numbers began; not equal: nothing in common.
  std::string veto;         // Why not, from this member's side; empty: it may be.
  std::map<std::string, GroupSummary> groups;
  friend bool operator==(const ReplaySummary&, const ReplaySummary&) = default;
};

std::string EncodeSummary(const ReplaySummary& summary);
// nullopt for what no member sends.
std::optional<ReplaySummary> DecodeSummary(std::string_view bytes);

// What all members do, each having the summaries of all. Thread: value type.
struct ReplayPlan {
  std::string refusal;                        // Why nothing is run again; empty: it is.
  std::map<std::string, std::uint64_t> from;  // By group: all its members run those from here on.
};

// A function of the summaries alone, `members` by global rank, so that every member comes to the
// same end. In each group all run again what one of them has no result of, and everything behind
// it; so every member must still have those inputs. A message is sent again unless it was received;
// so none may have left the sender's memory without that.
ReplayPlan PlanReplay(const std::vector<ReplaySummary>& members);

// How many messages of `sender`, a group rank, with that tag its receiver in group `name` has.
// REQUIRES: PlanReplay(members) does not refuse, `name` is one of its groups.
std::uint64_t ReceivedFrom(const std::vector<ReplaySummary>& members, const std::string& name,
                           int sender, const Stream& stream);

// Which collectives of one group, numbered from 1 in this epoch, have ended here and which inputs
// are kept, and how many messages have. Owner: the replay layer. Thread: caller-synchronised. Pure.
class ReplayLog {
 public:
  ReplayLog() = default;
  explicit ReplayLog(ReplayLimits limits) : limits_(limits) {}

  // Collective `number` was started with so much input. `synchronises`: it ends nowhere before all
  // members have started it.
  void Add(std::uint64_t number, std::size_t bytes, bool synchronises);
  // It has its result. Returns the numbers whose inputs are kept no more.
  std::vector<std::uint64_t> Complete(std::uint64_t number);

  void CompleteSend(const Stream& stream) { ++sent_[stream]; }
  void CompleteReceive(const Stream& stream) { ++received_[stream]; }

  std::uint64_t next() const { return next_; }
  // Without instance and ranks.
  GroupSummary Summary() const;

 private:
  struct Entry {
    std::size_t bytes = 0;
    bool synchronises = false;
    bool completed = false;
  };

  ReplayLimits limits_;
  std::uint64_t next_ = 1;
  std::map<std::uint64_t, Entry> entries_;
  // Of the entries that are completed.
  std::size_t kept_operations_ = 0;
  std::size_t kept_bytes_ = 0;
  // The last two synchronising ones that have completed. A member starts the last one behind the
  // end of the one before; until it has told its program so, that one may be unfinished there.
  std::uint64_t last_ = 0;
  std::uint64_t last_but_one_ = 0;
  std::map<Stream, std::uint64_t> sent_;
  std::map<Stream, std::uint64_t> received_;
};

}  // namespace resilient::recovery
