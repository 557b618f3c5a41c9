#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/comm/nccl_api.h"

namespace resilient::testing {

// What goes wrong for one rank, in every communicator in which it has that rank.
struct NcclScript {
  NcclResult init_result = NcclResult::kInProgress;  // Of ncclCommInitRankConfig itself.
  bool hang_init = false;                            // Connecting stays in progress.
  NcclResult async_error = NcclResult::kSuccess;     // What the communicator says when it is asked.
  NcclResult launch_result = NcclResult::kInProgress;
  bool hang_launch = false;    // A launch stays in progress, its kernel does not get to the stream.
  bool hold_kernels = false;   // A kernel does not begin: it neither gives nor takes.
  bool hang_abort = false;     // ncclCommAbort does not return, though its kernels have ended.
  bool hang_destroy = false;   // ncclCommFinalize stays in progress.
  bool lose_device = false;    // Events of its device answer with an error that stays.
  bool refuse_events = false;  // cudaEventCreate fails.
};

// What is and what was. `misuse`: calls that NCCL or CUDA would punish at random.
struct NcclCounts {
  int communicators = 0;
  int events = 0;
  int aborts_begun = 0;
  int aborts_ended = 0;
  int destroyed = 0;
  int unique_ids = 0;
  std::map<int, int> kernels_begun;  // By rank.
  std::vector<std::string> misuse;
};

// NCCL and the CUDA runtime over host memory, in one process: a stream is a queue with a thread,
// an event is a flag behind it, a kernel of a collective waits on its stream for those of the other
// ranks and then does the sum. As in NCCL, an aborted kernel leaves its stream without a word, so
// that the event behind it fires; ranks that are in different collectives wait for ever.
//
// The tables hold plain functions, so one fake at a time. AllGather, ReduceScatter, Send and Recv
// are null: nobody calls them. Owner: the test. Thread: thread-safe. Lifetime: outlives what uses
// its tables; the destructor ends everything that hangs.
class FakeNccl {
 public:
  FakeNccl();
  ~FakeNccl();
  FakeNccl(const FakeNccl&) = delete;
  FakeNccl& operator=(const FakeNccl&) = delete;

  static NcclApi nccl();
  static CudaApi cuda();

  void Change(int rank, const std::function<void(NcclScript&)>& change);
  NcclCounts Counts();
  // False when it does not become true within half a minute.
  bool WaitFor(const std::function<bool(const NcclCounts&)>& condition);

 private:
  friend struct FakeNcclFunctions;
  using Lock = std::unique_lock<std::mutex>;
  enum class Kind { kAllReduce, kReduce, kBroadcast };
  struct Call {
    Kind kind = Kind::kAllReduce;
    const void* from = nullptr;
    void* to = nullptr;
    std::size_t count = 0;
    NcclDataType type = NcclDataType::kUInt8;
    NcclReduceOp op = NcclReduceOp::kSum;
    int root = 0;
    NcclCommHandle comm = nullptr;
    CudaStreamHandle stream = nullptr;
  };
  struct Meeting {  // One collective of one communicator.
    std::map<int, Call> calls;
    bool done = false;
    bool broken = false;  // It never will be.
  };
  struct World {  // One unique id.
    int ranks = 0;
    std::set<int> joined;
    std::map<std::uint64_t, Meeting> meetings;
  };

  // All with the lock held; those that take it give it back while they wait.
  NcclResult InitRank(NcclCommHandle* comm, int ranks, const NcclUniqueId& id, int rank,
                      const NcclConfig& config);
  NcclResult Poll(NcclCommHandle comm, NcclResult* error);
  NcclResult Launch(const std::vector<Call>& calls);
  void Abort(Lock& lock, NcclCommHandle comm);
  void Free(NcclCommHandle comm);
  void RunKernel(Lock& lock, const Call& call);
  void Compute(World& world, Meeting& meeting);
  CudaStreamHandle StreamOf(CudaStreamHandle stream);
  void Enqueue(CudaStreamHandle stream, std::function<void(Lock&)> item);
  CudaStreamHandle NewStream();
  void EndStream(Lock& lock, CudaStreamHandle stream);
  bool IsUsable(NcclCommHandle comm, const char* what);
  void Misuse(const std::string& what);
  NcclScript& ScriptOf(int rank) { return scripts_[rank]; }

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool over_ = false;
  NcclCounts counts_;
  std::map<int, NcclScript> scripts_;
  std::map<std::array<char, 128>, World> worlds_;
  std::map<NcclCommHandle, std::unique_ptr<NcclComm>> comms_;
  std::set<CudaStreamHandle> streams_;
  std::map<int, CudaStreamHandle> default_streams_;  // By device.
};

}  // namespace resilient::testing
