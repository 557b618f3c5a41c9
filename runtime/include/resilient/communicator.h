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
  // failed with `mismatch`; or they run with different settings, and the group fails at once.
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
};

// One member of a group. Thread: value type.
struct GroupMember {
  int global_rank = -1;
  std::string endpoint;  // Of its CommunicatorFactory, carried by the membership view.
  std::string host;
  std::int64_t pid = 0;
};

// Everything that identifies one communicator; equal on all its ranks but for `rank`.
struct GroupSpec {
  std::string name;              // Unique in a session and generation.
  std::uint64_t generation = 0;  // Peers of another generation are refused.
  std::uint64_t attempt = 0;
  std::string
      secret;  // Random per view, from the membership service; a connection without it is dropped.
  int rank = 0;  // Index of this process in `members`.
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

  // Aborts what is left with kCancelled, joins the threads. Within ~1 s, bounded by `deadline`.
  virtual void Close(Deadline deadline) = 0;
};

// Options of the CPU communicator.
struct CpuFabricOptions {
  // Address that the mesh listens on, numeric; told to the peers.
  std::string bind_address = "127.0.0.1";
  // "eth1,eth0": listens at an address of the first one that exists instead.
  std::string interfaces;
  std::string name = "res-comm";  // Thread name.
  // Bytes of shared memory that a group may take on one host; the same on all ranks. 0, or too
  // little for the group: TCP inside the host as well.
  std::size_t shm_limit = 256u << 20;
  // A checksum goes with all data that this rank sends. Receivers follow the sender: ranks may
  // differ. What has come damaged fails the communicator with kCommFailed.
  bool checksums = false;
  // Reductions of groups that span hosts: ranks of one host first, in rank order, then the hosts,
  // in the order of each one's lowest rank; each host sends a partial result in place of the data
  // of each rank. The bits then depend on which ranks share a host, and on nothing else but the
  // values. A host is what shares memory: without shared memory each rank is one. The same on all
  // ranks: a group where it differs fails with kMismatch.
  bool hierarchical = false;
  // TCP connections of one link to a rank on another host, 1 to kMaxSocketStreams; the same on all
  // ranks, as `hierarchical`.
  int streams = 1;
};

// Options of what serves memory of CUDA devices.
struct CudaFabricOptions {
  // Libraries to load; empty: the copy that the process has already, else what the linker finds.
  std::string nccl_library;
  std::string cuda_runtime;
  // What this rank says of a device; null: what NVML says. Without a uuid: ranks may share it.
  std::function<DeviceClaim(int device)> claim;
  SharedGpu shared_gpu = SharedGpu::kRefused;  // Else nothing is said of it.
  int eager_device = kHost;  // Groups are connected for it as they are made; kHost: for none.
  // From the ranks' arrival to the end of NCCL's own connecting, tried twice. Zero: no bound.
  Duration connect_timeout = std::chrono::seconds(60);
  // What Leave gives NCCL to let go once no peer awaits this rank.
  Duration flush_timeout = std::chrono::seconds(1);
  // How long an error of NCCL's, which names no rank, waits for the membership service to name one.
  Duration verdict_wait = std::chrono::seconds(3);
  std::string name = "res-nccl";  // Thread name.
};

// The CPU transport: one listener and one comm thread per session, links per group and pair, over
// TCP or inside a host through shared memory; shared memory for the collectives of groups inside
// one host.
// kUnreachable when the address cannot be bound, kSetting when no interface exists. `events`
// outlives the factory.
Result<std::unique_ptr<CommunicatorFactory>> MakeCpuFabric(CpuFabricOptions options,
                                                           const Clock& clock,
                                                           CommunicatorEvents& events);

// The same, and with it memory of CUDA devices through NCCL: a communicator routes each operation
// by its device. NCCL is loaded and connected at the first operation on a device, over a group of
// the CPU transport by which the ranks compare what they are before NCCL meets itself: a group of
// which two ranks share a GPU (kDuplicateDevice), or have other versions, settings or options of
// NCCL (kSetting), fails with that on all ranks. By the same way they notice what NCCL does not: a
// rank that is late, or in another operation. Operation::stall and OnWaiting are as on the CPU; a
// mismatch that does not block is noticed behind the fact.
//
// What differs from the CPU, as NCCL sends no headers of ours (docs/decisions/0012):
//   order      operations on a device run one after the other in the order of their submission, on
//              a stream of the communicator's: one that waits for a rank holds up all behind it.
//              Those of a batch run together
//   messages   tags are not sent: messages from one rank to another are received in the order in
//              which they were sent. kAnyPeer is refused
//   numbers    what is reduced is not reduced in rank order, and is rounded to its type at each
//              step: averages of integers of 8 bits overflow where their sums do. Whether a NaN
//              wins MIN and MAX is NCCL's choice
// Refused with kUnimplemented, before anything is submitted: reductions of 16-bit integers, of bits
// but for bools, products of complex numbers; of float8 and kPremulSum where the library or the
// device has none, and of both together in a group of one rank. kSetting where there is no NCCL or
// no CUDA.
//
// With SharedGpu::kThroughHost devices are served by the CPU transport on pinned memory instead
// (docs/decisions/0021): numbers are as there, nothing but kAnyPeer is refused, a LaunchMark is
// launched when the peers' part is there, and a rank that goes another way is kSetting on all.
Result<std::unique_ptr<CommunicatorFactory>> MakeCudaFabric(CpuFabricOptions cpu,
                                                            CudaFabricOptions cuda,
                                                            const Clock& clock,
                                                            CommunicatorEvents& events);

}  // namespace resilient
