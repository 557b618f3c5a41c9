#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <resilient/abort.h>
#include <resilient/clock.h>
#include <resilient/communicator.h>
#include <resilient/device.h>
#include <resilient/nccl_options.h>
#include <resilient/rendezvous.h>
#include <resilient/status.h>
#include <resilient/whereabouts.h>

namespace resilient {

// Where a session stands; the edges are in runtime/recovery/state_machine.h.
enum class SessionState : std::uint8_t {
  kInit = 0,
  kJoining,   // Asked for a view.
  kBuilding,  // Has a view, links are being made.
  kReady,  // Built at a generation that this rank has not acknowledged yet: closed to operations.
  kRunning,
  kAborting,  // A fence was seen; operations are being ended.
  kFenced,    // Recovery stopped (seat not filled, refused); left only by Rebuild or Close.
  kFailed,    // Recovery is exhausted; every call returns the first cause.
  kClosed,
};
std::string_view SessionStateName(SessionState state);

// Fixed for the life of a session, but for rank and size, with which it begins. Thread: value type.
struct SessionOptions {
  // kSpareRank: Init waits until a seat of the world becomes free, without limit as long as the job
  // has a world, and the session takes its rank. kLeft when the world has ended without need of it.
  int rank = -1;
  int world_size = 0;
  Duration init_timeout = std::chrono::minutes(30);  // For peers that nobody has heard of.
  Duration budget = std::chrono::seconds(20);        // Machine time of one recovery.
  Duration seat_wait = Duration::zero();             // Waiting for a lost seat to be filled.
  int min_world = 0;  // Of a world whose store was lost: so many go on after init_timeout; 0: all.
  // Where a living process holds the rank already: as kSpareRank, instead of DUPLICATE_RANK.
  bool spare_if_taken = false;
  std::optional<DeviceClaim> device;  // No other rank may use it; nullopt: not known.
  NcclOptions nccl;                   // Of the world's group.
  // See the end of other ranks of this host at once, and let them see ours.
  bool host_watch = true;
  InterruptCheck interrupt;                      // Polled by every wait on a caller's thread.
  Duration wait_log = std::chrono::seconds(30);  // Interval of the line about who is waited for.
  Duration stall = std::chrono::hours(1);        // How long an awaited rank may make no progress.
  Duration device_stall = std::chrono::minutes(10);  // How long its device may finish nothing.
  // What the caller gives its operations as Operation::stall; for the line at the start.
  Duration op_deadline = std::chrono::seconds(120);
  // What a broken link has ended is run again, unseen (decision 0018); devices are refused with it.
  bool replay = false;
  std::shared_ptr<Observer> observer;  // Says where this process is; null: not known.
  // PresenceNames of this host's processes before their init (net/presence.h); no job: none.
  std::string presence_job, presence_init;
};

// A snapshot for users. Thread: value type.
struct Membership {
  SessionState state = SessionState::kInit;
  std::uint64_t life = 0;
  std::uint64_t round = 0;
  std::uint64_t generation = 0;
  int rank = -1;
  std::vector<Member> members;
  // Of the generation that ran here last: who acknowledges no failure comes by no newer one.
  std::uint64_t fence_token = 0;
  std::string world_secret;  // View::world_secret: not for others.
};

// When the phases of the last recovery ended, for the time line of the demo and for incident logs.
// An unset phase has not happened in that incident. Thread: value type.
struct Incident {
  std::uint64_t generation = 0;  // The generation that ended.
  Status cause;
  double known_unix_s = 0;  // The fence reached this process.
  double aborted_unix_s = 0;
  double joined_unix_s = 0;
  double rebuilt_unix_s = 0;  // READY at the next generation.
  double running_unix_s = 0;  // Acknowledged.
};

// What happens to a session, for those who look on. Thread: value type.
struct SessionEvent {
  enum class Kind : std::uint8_t {
    kFenced = 0,  // `generation` is over, by `cause`.
    kRebuilt,     // After that: `generation` is built here (READY).
    kRunning,     // `generation` is open to operations.
    kRefused,     // Recovery stopped, by `cause`: FENCED.
    kFailed,      // Recovery is exhausted; `cause` is the first one.
    kClosed,      // The last event.
  };
  Kind kind = Kind::kFenced;
  std::uint64_t number = 0;  // From 1.
  std::uint64_t missed = 0;  // How many between `after` and this one are kept no more.
  std::uint64_t generation = 0;
  Status cause;
  double unix_s = 0;
};

// What a caller of Session::Rebuild wants. Thread: value type.
struct RebuildOptions {
  Deadline deadline = Deadline::Never();
  // When lost seats stay empty the world may go on without them, with so many ranks at least, if
  // all that are left want that; 0: it may not. Ranks are then numbered anew, in their order.
  int min_world = 0;
  // How long a lost seat may stay empty; nullopt: SessionOptions::seat_wait.
  std::optional<Duration> seat_wait = std::nullopt;
  bool again = true;  // A join that was refused before the call is tried again.
};

class Session;

// One process group of a session, over all its generations: the object that a c10d Backend holds.
// Owner: the Backend, by shared_ptr; keeps its Session alive. Thread: thread-safe.
class Group {
 public:
  virtual ~Group() = default;
  virtual const std::string& name() const = 0;
  virtual int rank() const = 0;  // Group rank.
  // Both may change for the world's group when the world has been resized. Another group that was
  // made before that takes no operation any more: kFailedPrecondition.
  virtual int size() const = 0;

  // kFailedPrecondition for one that takes no operation any more, whatever is rebuilt: closed, or
  // made before the world was resized.
  virtual Status Usable() const = 0;

  // As Communicator::Submit, at the present generation. While a fence is not acknowledged: its
  // first cause. kForked in a child of the process that opened the session. kFailedPrecondition
  // after Close.
  virtual Result<std::uint64_t> Submit(Operation op, Completion done) = 0;

  // As Communicator::SubmitBatch, with the refusals of Submit; none with SessionOptions::replay.
  virtual Result<std::vector<std::uint64_t>> SubmitBatch(
      std::vector<Communicator::Submission> batch) = 0;

  // As Communicator::Run, with the refusals of Submit.
  virtual Result<Communicator::Ran> Run(Operation op, Completion done,
                                        const Communicator::KeepWaiting& keep_waiting) = 0;

  // Destroys the group on this rank: goodbye to its peers; later calls fail.
  virtual void Close() = 0;

  // Ends this generation of the whole session with kCommFailed (c10d's abort()).
  virtual void Abort(const std::string& why) = 0;

  virtual Session& session() = 0;
};

// One world and its groups in one process: joins it, runs its operations, and when the membership
// service fences the generation, poisons every call, aborts, joins and builds the next generation
// by itself; Rebuild acknowledges. The rule of the fence: every operation of the fenced generation
// fails whenever it is waited for, and every new one, on any thread and any group, returns the same
// first cause until Rebuild.
//
// Owner: the plugin or a C++ program, by shared_ptr; several per process. Thread: thread-safe; the
// blocking calls say so and poll options.interrupt. Lifetime: Close joins all threads; the
// destructor closes.
class Session {
 public:
  virtual ~Session() = default;

  // Blocks until the world runs its first generation here. SETTING for options that contradict each
  // other or the store's leases (recovery/deadlines.h); at level info one line tells all deadlines.
  // JOIN_TIMEOUT, WORLD_SIZE, DUPLICATE_RANK, connect errors, or the cause of a fence that hit
  // before the world first ran and could not be healed within the init timeout. A session that
  // joined a running life as a newcomer is RUNNING as well: it has nothing to acknowledge.
  virtual Status Init() = 0;

  // `ranks` are global ranks in group order and contain this rank. The group is usable at once; its
  // links are made when its peers create it too, of the same ranks in the same order: otherwise
  // kMismatch. `made_at`: where in the program, for texts. `name` is unique among the session's
  // open groups of a generation. The world's own group is created by passing kWorldGroup as name;
  // it has the options of the session in place of `nccl`. kSetting for options that cannot be.
  virtual Result<std::shared_ptr<Group>> CreateGroup(std::string name, std::vector<int> ranks,
                                                     NcclOptions nccl = {},
                                                     std::string made_at = {}) = 0;

  virtual Membership membership() const = 0;
  // The same of the generation that ran here last, as it was when it began: what the program knows,
  // until Rebuild returns.
  virtual Membership acknowledged() const = 0;

  // The generation of Init or the last Rebuild, whatever healed since: the same on all ranks.
  virtual std::uint64_t epoch() const = 0;

  // OK while no fence waits for an acknowledgement; else the sticky first cause.
  virtual Status failure() const = 0;
  // failure(), waiting until `deadline` for a fence that another line of this process has heard of
  // already: two connections deliver in no order.
  virtual Status AwaitFailure(Deadline deadline) const = 0;

  // The program is being told `told`, with which a wait of its own ended, though failure() says
  // nothing of it (SessionOptions::replay): then all members are to meet a failure, for what this
  // one does next is not what it would have done. True: it will be sticky soon. False: there is
  // nothing that is kept from the program.
  virtual bool Object(const Status& told) = 0;

  // The latest incident, if any.
  virtual std::optional<Incident> last_incident() const = 0;
  // The first event behind number `after` (0: the first of all). kTimeout when none has come by
  // `deadline`; kFailedPrecondition behind the last.
  virtual Result<SessionEvent> AwaitEvent(std::uint64_t after, Deadline deadline) const = 0;

  // Acknowledges the fence. Blocks until the next generation is built (at once when it is); returns
  // OK in RUNNING. Otherwise waits for lost seats, then goes on without them if that is wanted
  // (see RebuildOptions), or returns the first cause. kTimeout after the deadline. OK at once when
  // nothing is to be acknowledged. What was wanted last counts until the gate is open.
  virtual Status Rebuild(const RebuildOptions& options) = 0;

  // Says that this rank has made `commit` (they count from 1) and would go on from it in a world of
  // up to `max_world` ranks. Once all ranks have said so of the same commit, and spares wait, the
  // generation ends with kGrowth, as by any fence, and the next one has the spares as its last
  // ranks. Returns at once. kInvalidArgument for numbers below 1.
  virtual Status OfferRoom(int max_world, std::uint64_t commit) = 0;

  // Polled by callers that wait for completions.
  virtual const InterruptCheck& interrupt() const = 0;
  // The calling thread is blocked until operation `seq` of `group` has ended (0: the collective
  // that runs), until it says otherwise: ranks that wait for each other are found by it. For waits
  // that have lasted for some time already, as it takes a lock.
  virtual void BeginBlocked(const std::string& group, bool point_to_point, std::uint64_t seq) = 0;
  virtual void EndBlocked() = 0;
  // The process ends, by `why`: a loss to the others, now. kFailed by `deadline`, no goodbye.
  virtual void AnnounceEnd(const std::string& why, Deadline deadline) = 0;
  // Local, ~1 s: cancels what is in flight or being built, says goodbye, joins threads. Idempotent.
  virtual void Close() = 0;
  // True in a child forked from the process that opened the session.
  virtual bool InForkedChild() const = 0;
};

inline constexpr char kWorldGroup[] = "world";

// Makes the factory for the session's communicators once its event sink exists.
using FactoryMaker =
    std::function<Result<std::unique_ptr<CommunicatorFactory>>(CommunicatorEvents& events)>;

// Nothing is sent before Init. kInvalidArgument for a rank outside the world; the maker's error.
Result<std::shared_ptr<Session>> OpenSession(SessionOptions options,
                                             std::unique_ptr<Rendezvous> rendezvous,
                                             const FactoryMaker& make_factory, const Clock& clock);

}  // namespace resilient
