#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <resilient/abort.h>
#include <resilient/clock.h>
#include <resilient/device.h>
#include <resilient/nccl_options.h>
#include <resilient/operation.h>
#include <resilient/status.h>
#include <resilient/waiting.h>

namespace resilient {

// Runs exactly once for an operation that was accepted: with OK when this rank's part is complete
// (its output is final and its input may be reused), or with the first cause. Runs on a thread of
// the communicator, never inline in Submit and never under a lock; it must not block.
using Completion = std::function<void(const Status&)>;

// The collectives of one group in one generation. Every rank of the group submits the same
// collectives in the same order; they start in that order and each group progresses independently
// of every other. Point-to-point operations are ordered among themselves by (peer, tag) and not
// against collectives. Each message carries (group, seq, op, dtype, count, root, reduce op) and is
// compared by the receiver: a difference fails the operation with kMismatch and is told to
// CommunicatorEvents; it never yields a wrong result. Every element is reduced in group-rank order
// 0..n-1 (or by hosts: CpuFabricOptions::hierarchical), so results are bit-equal on all ranks and
// from run to run. What of this does not hold for memory of a device MakeCudaFabric says.
//
// Owner: Session, through Group. Thread: thread-safe. Lifetime: the destructor completes what is
// left with kCancelled; call Abort first to give the cause.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;  // Group rank.
  virtual int size() const = 0;

  // Queues `op` and returns its sequence number (from 1; collectives and point-to-point count
  // separately). kInvalidArgument for an operation that cannot be (bad peer, null memory); after an
  // abort, the abort's cause. `done` runs if and only if the result is OK.
  virtual Result<std::uint64_t> Submit(Operation op, Completion done) = 0;

  // As Submit for each in turn, with nothing of another caller between them. None of a batch waits
  // for another of it: two ranks that each send and receive may do so in any order, on every
  // transport. Sends and receives on one device and stream only. When one is refused, all are.
  // Messages match as if each was submitted by itself: two ranks' batches need not be alike.
  struct Submission {
    Operation op;
    Completion done;
  };
  virtual Result<std::vector<std::uint64_t>> SubmitBatch(std::vector<Submission> batch) = 0;

  // As Submit, for a caller that waits for the end at once: the operation may run on the calling
  // thread, before this returns. When it has ended within the call, its outcome is returned and
  // `done` never runs. Otherwise it goes on by itself, as after Submit. `keep_waiting` is asked at
  // least every 100 ms; once it says no, the call returns.
  struct Ran {
    std::uint64_t seq = 0;
    std::optional<Status> outcome;
  };
  using KeepWaiting = std::function<bool()>;
  virtual Result<Ran> Run(Operation op, Completion done, const KeepWaiting& keep_waiting) = 0;

  // Ends everything in flight and to come with `cause`. Returns at once; idempotent, first cause
  // wins. What may block in a driver is done by another thread, see IsQuiet.
  virtual void Abort(const Status& cause) = 0;

  // True once nothing of this communicator touches user memory: no completion is left.
  virtual bool IsQuiet() const = 0;

  // Asks how far this rank has come on `transport`: the name of this communicator, or of one of
  // those that it is made of, in CommunicatorEvents. Returns at once.
  virtual ProgressAnswer AskProgress(const std::string& transport) = 0;
  // Every rank has entered `call`, by its own account: a standstill counts from now on
  // (Operation::stall). `call.group`: a transport. Idempotent; no effect on what has ended.
  virtual void NoteAllEntered(const EnteredCall& call) = 0;

  // Says goodbye: peers that still need this rank fail with kLeft instead of waiting for a verdict.
  // Operations of this rank still in flight complete with kCancelled, but for those on devices,
  // ahead of which a program goes on: they end first, however late a peer is. Returns at once;
  // bytes already written still reach the peers.
  virtual void Leave() = 0;
  // After Leave: there are some, or peers have not taken all of them. Close or Abort ends that.
  virtual bool HoldsDevice() const { return false; }
};

// What a communicator notices and cannot judge. Called on a communicator thread, or on that of who
// submits an operation; must not block.
class CommunicatorEvents {
 public:
  virtual ~CommunicatorEvents() = default;
  // All links to the peers are up; operations queued before now start moving.
  virtual void OnConnected(const std::string& group, std::uint64_t generation) = 0;
  // The link to `global_rank` broke without a goodbye. Operations stay pending until the fence.
  virtual void OnLinkLost(const std::string& group, std::uint64_t generation, int global_rank,
                          const Status& why) = 0;
  // A link to `global_rank` cannot be made yet; it is tried again, and this is called again about
  // each second. Only whether that process lives is in doubt.
  virtual void OnUnreached(const std::string& group, std::uint64_t generation, int global_rank,
                           const Status& why) = 0;
  // Two ranks are in different operations at one sequence number, and the local operation has
  // failed with `mismatch`; or settings or members of the group differ, and it fails at once.
  virtual void OnMismatch(const std::string& group, std::uint64_t generation,
                          const Status& mismatch) = 0;
  // The communicator has failed for a reason of its own: an operation has exceeded a bound of its
  // Operation, here or on a peer, a link carries what no rank sends or cannot be made, or the
  // device fails. kDeviceLost: so will every call on it in this process.
  virtual void OnStalled(const std::string& group, std::uint64_t generation, const Status& why) = 0;
  // The operations that have waited for kWaitTellAfter: the collective that runs first, then
  // point-to-point; the oldest kWaitingOperationsMax. Each call replaces the one before and comes
  // again every kWaitTellAfter; what it leaves out is over. A process that was stopped reads first.
  virtual void OnWaiting(const std::string& group, std::uint64_t generation,
                         std::vector<WaitingOperation> waiting) = 0;
  // The answer to Communicator::AskProgress: a snapshot that is not older than the question.
  virtual void OnProgress(std::uint64_t generation, GroupProgress progress) = 0;
  // What CommunicatorFactory::Knock has found of `global_rank`. OK: its process has answered.
  // kUnreachable, kRefused: it has not, and what came in place of an answer.
  virtual void OnKnocked(std::uint64_t generation, int global_rank, const Status& found) {
    static_cast<void>(found.ok() && generation + static_cast<std::uint64_t>(global_rank) > 0);
  }
};

// One member of a group. Thread: value type.
struct GroupMember {
  int global_rank = -1;
  std::string endpoint;  // Of its CommunicatorFactory, carried by the membership view.
  std::string host;
  std::int64_t pid = 0;
};

// Identifies one communicator: equal on all ranks but for `rank`. Other `members` are kMismatch.
struct GroupSpec {
  std::string name;              // Unique in a session and generation.
  std::uint64_t generation = 0;  // Peers of another generation are refused.
  std::uint64_t attempt = 0;
  // Random per view, from the membership service: the same for all groups of a generation and
  // attempt. Members prove to each other that they know it; it is never sent.
  std::string secret;
  int rank = 0;         // Index of this process in `members`.
  std::string made_at;  // Where in the program, for texts; may be empty and may differ.
  std::vector<GroupMember> members;
  NcclOptions nccl = {};  // Where it serves devices.
};

// Makes the communicators of one session. One implementation per transport (CPU, NCCL, fakes).
// Owner: Session. Thread: thread-safe. Lifetime: outlives its communicators; events outlive it.
class CommunicatorFactory {
 public:
  virtual ~CommunicatorFactory() = default;

  // How peers reach this process; opaque bytes for JoinRequest::endpoint. Constant for the
  // factory's life.
  virtual std::string endpoint() const = 0;

  // Returns at once; connecting goes on in the background and OnConnected reports its end.
  // Operations may be submitted before. `abort` ends the communicator when it is set (in addition
  // to Abort).
  virtual std::shared_ptr<Communicator> Create(GroupSpec spec,
                                               std::shared_ptr<AbortCell> abort) = 0;

  // A rank may stand still until then, announced: what does not move meanwhile is no standstill
  // (Operation::stall), and counts from then. Replaces an earlier one; a time that has come ends
  // it.
  virtual void Hold(Instant until) = 0;

  // Asks the processes of these group ranks of `world` for a word, each on a connection beside the
  // links; CommunicatorEvents::OnKnocked says of each whether it came within `patience`. Replaces
  // the round before. A factory without connections of its own finds nothing.
  virtual void Knock(const GroupSpec& world, const std::vector<int>& ranks, Duration patience) {
    static_cast<void>(world.generation + ranks.size() +
                      static_cast<std::uint64_t>(patience.count()));
  }

  // Aborts what is left with kCancelled, joins the threads. Within ~1 s, bounded by `deadline`.
  virtual void Close(Deadline deadline) = 0;
};

}  // namespace resilient
