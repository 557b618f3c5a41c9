#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <resilient/clock.h>
#include <resilient/device.h>
#include <resilient/status.h>
#include <resilient/waiting.h>
#include <resilient/whereabouts.h>

namespace resilient {

// One seat of a view and the process that holds it. Thread: value type.
struct Member {
  int rank = -1;            // Seat = rank in the world.
  std::string incarnation;  // Of the process: random, new for each process.
  std::string host;
  std::int64_t pid = 0;
  std::string endpoint;  // JoinRequest::endpoint of that member.
};

// The server's answer to a join: who is in the world at this generation. Thread: value type.
struct View {
  std::uint64_t life = 0;        // Anew when a join finds no member alive.
  std::uint64_t round = 0;       // Each init of a life; scope of the keys that the groups use.
  std::uint64_t generation = 0;  // Strictly grows in a job, over lives and rounds.
  std::uint64_t attempt = 0;     // Try to build the communicators of this generation.
  std::string secret;            // Random per view: lets members recognise each other.
  // Random per round, the same in all its views: by it members recognise what one of them has put
  // where others may write, also when the one that reads it has come later.
  std::string world_secret;
  std::vector<Member> members;  // members[i].rank == i.
  // For writers to something outside (a store of checkpoints), which refuses a lower one than the
  // highest it has seen. Grows with each generation of the job, over lives, and over stores that
  // begin anew; below 2^63.
  std::uint64_t fence_token = 0;
};

// The end of a generation. Thread: value type.
struct Fence {
  std::uint64_t generation = 0;  // The generation that ended.
  Status cause;                  // First cause; the same on every member.
};

// JoinRequest::rank of a process that waits for a seat to become free.
inline constexpr int kSpareRank = -2;

// What a rank asks for when it wants into a world.
struct JoinRequest {
  int rank = -1;
  int world_size = 0;
  std::string endpoint;
  Duration join_timeout{};  // For peers that nobody has heard of, from the first join of the round.
  Duration seat_wait{};     // How long a lost seat may stay empty before the join is refused.
  std::uint64_t generation = 0;  // Last generation this session was in; 0 for the first join.
  // When lost seats stay empty for `seat_wait` the world may go on without them, with so many ranks
  // at least; 0: it may not. Each such rank must want it. In a first join, of ranks whose world ran
  // at another store: when seats stay empty for `join_timeout`.
  int min_world = 0;
  // Counts the joins of a session: a refusal says which one it answers.
  std::uint64_t number = 0;
  // Where a living process holds the seat: wait as a spare, instead of being refused.
  bool spare_if_taken = false;
  std::optional<DeviceClaim>
      device;  // The GPU that is for this rank alone; nullopt: none is known.
};

enum class ReportKind : std::uint8_t {
  kLinkLost = 1,  // The link to `accused_rank` broke; the server decides.
  kMismatch = 2,  // Two operations differ; fences with `status`.
  kCommFailed =
      3,  // The communicators of this generation could not be built or broke; same members.
  kProcessDied = 4,  // The process of `accused_rank` has come to its end: seen on its own host.
  kRoom =
      5,  // This member has made commit `commit`, and would go on from it with `max_world` ranks.
  // An operation of this member, which `status` names, needs `accused_rank` (-1: any other), whose
  // link has ended; fences with kLeft once that rank has left the world.
  kNeedsLeaver = 6,
  // The process of the sender comes to its end by `status`, whatever it was in: its seat is lost.
  kEnding = 7,
  // No link to `accused_rank` can be made yet; fences with kLeft if that rank has left the world.
  kUnreached = 8,
  // The program asks for a membership without a member that has left; fences with kLeft, and is
  // answered with it, if there is one.
  kRebuild = 9,
};

// What a member says, most of it an accusation. The server judges; a report of a past generation is
// ignored, unless it is of a death, which holds for whatever the process was in.
struct Report {
  ReportKind kind = ReportKind::kLinkLost;
  std::uint64_t generation = 0;
  int accused_rank = -1;
  Status status;
  // Of kProcessDied: Member::incarnation of the accused, and how it ended, as of waitpid; -1: not
  // known.
  std::string accused_incarnation = {};
  int wait_status = -1;
  // Of kRoom. Once all members have said so of one commit the generation is fenced with GROWTH, if
  // spares wait, and they take part in the next one.
  int max_world = 0;
  std::uint64_t commit = 0;
};

// One operation that waits. Thread: value type.
struct WaitingCall {
  std::string group;
  WaitingOperation operation;
  bool blocked = false;  // A thread of the program is blocked until it ends, or may be.
  bool more = false;     // Of the service: further ranks are missing than are kept here.
};

// What a member waits for: told each second while there is anything, and void when it is not told
// again. With `generation` 0 it waits for its join. Thread: value type.
struct WaitingReport {
  std::uint64_t generation = 0;
  std::vector<WaitingCall> calls;
  bool blocked = false;     // No thread of the program may act before one of `calls` has ended.
  bool tell = false;        // OnLate is wanted: who is waited for, and where they are.
  Duration stall{};         // How long who is waited for may make no progress.
  Duration device_stall{};  // How long its device may finish nothing that is in its queue.
  // Of a join: ranks whose processes live on this host and have not come to their init, and those
  // of which that only seems so, as nobody there could tell whose processes they are.
  std::vector<int> present;
  std::vector<int> unverified = {};
  // Of the groups that OnAskProgress has named. A group that does not exist here has entered
  // nothing; one that this rank has closed is left out.
  std::vector<GroupProgress> progress;
  // Of the groups of `calls`, and of those that OnAskProgress has named: what they are made of
  // here. One that was never made here is left out.
  std::vector<GroupMade> made = {};
  // The same in two reports: no thread that sleeps until another one wakes it has run in between.
  std::uint64_t threads = 0;
};

// A rank that others wait for, and what is known of it. Thread: value type.
struct LateRank {
  int rank = -1;
  std::string text;  // "rank 0 (host a, pid 7): alive, last beat 0.4 s ago, main thread in ..."
  // It says itself that it is in the operation, or it has left: the network is silent.
  bool of_network = false;
};

// The answer to WaitingReport::tell. With nothing but `elsewhere` it comes unasked. Thread: value
// type.
struct LateNotice {
  std::uint64_t generation = 0;  // Of the report; 0: about a join.
  int ready = 0;                 // Of a join: ranks that have joined,
  int world_size = 0;            // of so many. 0: this one waits as a spare, for nobody.
  std::vector<LateRank> ranks;   // The lowest ones.
  int more = 0;                  // So many beyond them.
  // Of a join: where the missing ones may be, in another job. A sentence; may be empty.
  std::string elsewhere;
};

// What the membership service tells a session. All calls come on the control thread, in order, and
// must not block.
class RendezvousEvents {
 public:
  virtual ~RendezvousEvents() = default;
  virtual void OnView(const View& view) = 0;             // The join is complete: build.
  virtual void OnRunning(std::uint64_t generation) = 0;  // All members are ready.
  virtual void OnFence(const Fence& fence) = 0;          // The generation is over.
  // Duplicate, world size, timeout, lost seat. `join`: JoinRequest::number.
  virtual void OnJoinRefused(std::uint64_t join, const Status& why) = 0;
  virtual void OnSessionLost(
      const Status& why) = 0;  // kStaleGeneration or kStoreLost: this process is out.
  // Some member of the job has been announced to be silent, until then at the latest; replaces what
  // was told before. A time that has come: nobody is any more.
  virtual void OnHeld(Instant until) = 0;
  // Somebody waits for this rank: answered with Rendezvous::Tell(ask, ...) when it is known.
  virtual void OnWhere(std::uint64_t ask) { static_cast<void>(ask); }
  virtual void OnLate(const LateNotice& notice) { static_cast<void>(notice); }
  // A verdict about those who wait for this rank hangs on how far it has come in `groups`: answered
  // with a WaitingReport that has their progress, also where this rank waits for nothing.
  virtual void OnAskProgress(std::uint64_t generation, const std::vector<std::string>& groups) {
    static_cast<void>(generation + groups.size());
  }
  // What keeps these operations of this rank waiting is the network, or a device.
  virtual void OnAllEntered(std::uint64_t generation, const std::vector<EnteredCall>& calls) {
    static_cast<void>(generation + calls.size());
  }
  // About once a heartbeat, also while the store is out of reach; it was last heard at `contact`.
  // When this stays out for half of `lease` the process was not run for so long.
  virtual void OnBeat(Instant now, Instant contact, Duration lease) {
    static_cast<void>(now - contact - lease);
  }
  // This process was not run for half a lease: whether it still has its seat is not known, until
  // OnConfirmed (or OnFence, OnSessionLost) says so.
  virtual void OnPaused() {}
  virtual void OnConfirmed() {}
};

// A session's line to the membership service: lease, join, ready, reports. runtime/ owns this
// interface, store/ implements it, the plugin or main wires both.
//
// Owner: Session. Thread: thread-safe; none of the methods below blocks but Start and Close. All of
// them may be called before the connection is up: what they ask is sent, and sent again after a
// lost connection, until acknowledged.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;

  // Starts the control thread and connects. kRefused, kUnreachable, kResolve, kProtocol (see
  // semantics row 15) when the store was not reached by `deadline`. Events arrive from now on.
  // REQUIRES: called once.
  virtual Status Start(RendezvousEvents& events, Deadline deadline) = 0;

  // How long this process may be silent, as the service grants it; zero before Start has returned
  // OK, and where it is not known.
  virtual Duration lease() const { return Duration::zero(); }

  // The address of the service, as it was tried last; for texts. On the control thread.
  virtual std::string service() const { return "the address that was given"; }

  virtual void Join(const JoinRequest& request) = 0;
  virtual void Ready(
      std::uint64_t generation) = 0;  // The communicators of that generation are built here.
  // The program has gone on to that generation, which runs: it acts in no older one any more.
  virtual void Acknowledge(std::uint64_t generation) = 0;
  // Reaches the service in the order of the calls, and before the leave of a later Close.
  virtual void Send(const Report& report) = 0;
  // As Send. `answered` runs once on the control thread with what the service says to it, after the
  // events that were sent before; never after Close, nor after OnSessionLost.
  virtual void Ask(const Report& report, std::function<void(const Status& answer)> answered) = 0;
  // Told once, and dropped while there is no connection: what matters is told again. On the control
  // thread.
  virtual void Tell(const WaitingReport& report) = 0;
  virtual void Tell(std::uint64_t ask, const Whereabouts& whereabouts) = 0;

  // Runs `task` on the control thread, after the events already received. False after Close:
  // dropped.
  virtual bool Post(std::function<void()> task) = 0;

  // Says goodbye (leave and lease release; at most until `deadline` for the acknowledgement), then
  // joins the thread. Idempotent. After it returns no event is delivered.
  virtual void Close(Deadline deadline) = 0;

  // In a forked child: forget the connection without a word on it. The object is dead afterwards.
  virtual void AbandonInChild() = 0;
};

}  // namespace resilient
