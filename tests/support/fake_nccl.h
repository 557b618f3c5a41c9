#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/comm/nccl_api.h"
#include "tests/support/fake_nccl_meeting.h"

namespace resilient::testing {

// What goes wrong for one rank, in every communicator in which it has that rank.
struct NcclScript {
  NcclResult init_result = NcclResult::kInProgress;  // Of ncclCommInitRankConfig itself.
  bool init_once = false;                            // init_result is that of one call alone.
  bool hang_init = false;                            // Connecting stays in progress.
  NcclResult async_error = NcclResult::kSuccess;     // What the communicator says when it is asked.
  NcclResult launch_result = NcclResult::kInProgress;
  bool hang_launch = false;   // A launch stays in progress, its kernel does not get to the stream.
  bool hold_kernels = false;  // A kernel does not begin: it neither gives nor takes.
  bool hang_abort = false;    // ncclCommAbort does not return, though its kernels have ended.
  bool hang_destroy = false;  // ncclCommFinalize stays in progress.
  // Whoever records or asks an event of its device gets an error, and what was to be copied there
  // by then never is.
  bool lose_device = false;
  bool refuse_events = false;  // cudaEventCreate fails.
  bool hang_memory = false;    // cudaMalloc, cudaFree and those of the host do not return.
  bool refuse_memory = false;  // cudaMalloc and cudaHostAlloc fail.
  bool hold_copies = false;    // What is to be copied on streams of its device waits.
};

// What is and what was. `misuse`: what NCCL or CUDA would punish at random, or by a hang: calls on
// what is gone or is another thread's, freed memory, ranks whose calls do not fit together.
struct NcclCounts {
  int communicators = 0;
  int events = 0;
  int allocations = 0;
  int frees = 0;
  int pinned = 0;       // Allocations by cudaHostAlloc.
  int pinned_most = 0;  // How many there were at once.
  int copies = 0;       // Begun on streams.
  int reductions = 0;   // Made by ncclRedOpCreatePreMulSum.
  int aborts_begun = 0;
  int aborts_ended = 0;
  int destroyed = 0;
  int unique_ids = 0;
  int graphs = 0;                    // Not destroyed, or still running.
  int user_objects = 0;              // Not destroyed.
  std::map<int, int> kernels_begun;  // By rank.
  int launches = 0;                  // Begun, of whole groups of calls.
  std::vector<std::string> configs;  // Of all communicators: "max_ctas=4 net_name=Socket".
  std::vector<int> priorities;       // Of all streams that were made with one.
  std::vector<std::string> misuse;
};

// Where the ranks of a fake are.
enum class NcclReach {
  kThreads,   // All in this process.
  kProcesses  // Others in other processes, each with a fake of this kind; see fake_nccl_meeting.h.
};

// kProcesses where the variable RESILIENT_FAKE_NCCL_REACH is "processes", so that all tests of the
// communicator can be run on that kind too; else kThreads.
NcclReach DefaultReach();

// NCCL and the CUDA runtime over host memory: a stream is a queue with a thread,
// an event is a flag behind it, a group of calls is one kernel on its stream. Kernels of one
// communicator run one after the other, whatever their streams. A kernel waits for what its calls
// need of the other ranks, for all at once, and moves and sums up the data: collectives meet by
// their number, a send from one rank to another meets the recv of the same number. As in NCCL, an
// aborted kernel leaves its stream without a word, so that the event behind it fires; calls that do
// not fit together wait for ever. What is captured in a graph runs by each launch of it, one node
// behind the other; a communicator's end waits for the graphs that hold kernels of it. Stricter
// than NCCL: a send always waits for its recv, also a small one. Other than in NCCL sums are in
// rank order and rounded once.
//
// The tables hold plain functions, so one fake at a time. Owner: the test. Thread: thread-safe.
// Lifetime: outlives what uses its tables; the destructor ends everything that hangs.
class FakeNccl {
 public:
  explicit FakeNccl(NcclReach reach = DefaultReach());
  ~FakeNccl();
  FakeNccl(const FakeNccl&) = delete;
  FakeNccl& operator=(const FakeNccl&) = delete;

  static NcclApi nccl();
  static CudaApi cuda();

  void Change(int rank, const std::function<void(NcclScript&)>& change);
  // For all ranks that this process has and will have.
  void ChangeAll(const std::function<void(NcclScript&)>& change);
  NcclCounts Counts();
  // What was misused since the last call.
  std::vector<std::string> TakeMisuse();
  // False when it does not become true within half a minute.
  bool WaitFor(const std::function<bool(const NcclCounts&)>& condition);

  // As cudaLaunchHostFunc, cudaStreamQuery, cudaStreamSynchronize and cudaDeviceSynchronize, which
  // the table has not.
  CudaResult LaunchHostFunction(CudaStreamHandle stream, std::function<void()> function);
  CudaResult QueryStream(CudaStreamHandle stream);
  CudaResult SynchronizeStream(CudaStreamHandle stream);
  CudaResult SynchronizeDevice();
  // As cudaStreamBeginCapture, cudaStreamEndCapture, cudaGraphLaunch and cudaGraphDestroy; a graph
  // is its own instance. `mode`: cudaStreamCaptureModeGlobal is 0.
  CudaResult BeginCapture(CudaStreamHandle stream, int mode = 0);
  CudaResult EndCapture(CudaStreamHandle stream, CudaGraphHandle* graph);
  // What calls does that are not allowed in the capture of `stream`: it gets no graph.
  void SpoilCapture(CudaStreamHandle stream);
  CudaResult LaunchGraph(CudaGraphHandle graph, CudaStreamHandle stream);
  CudaResult DestroyGraph(CudaGraphHandle graph);

 private:
  friend struct FakeNcclFunctions;
  friend struct FakeNcclTable;
  friend struct FakeCudaFunctions;
  friend struct FakeGraphFunctions;
  using Lock = std::unique_lock<std::mutex>;
  using Kind = NcclCallKind;
  using Call = NcclCall;
  struct Block {  // Of device memory. Freed ones are kept, so that their addresses stay theirs.
    std::vector<std::byte> bytes;
    bool of_nccl = false;
    bool freed = false;
  };

  // All with the lock held; those that take it give it back while they wait.
  NcclResult InitRank(NcclCommHandle* comm, int ranks, const NcclUniqueId& id, int rank,
                      const NcclConfig& config);
  NcclResult Poll(NcclCommHandle comm, NcclResult* error);
  NcclResult ResolveOperator(Call& call);
  NcclResult Launch(std::vector<Call> calls);
  bool FitTogether(const std::vector<Call>& calls);
  void Abort(Lock& lock, NcclCommHandle comm);
  void Free(NcclCommHandle comm);
  NcclResult MakePremulSum(NcclCommHandle comm, NcclReduceOp* op, const void* scalar,
                           NcclDataType type);
  NcclResult DestroyOperator(NcclCommHandle comm, NcclReduceOp op);
  void RunKernel(Lock& lock, NcclCommHandle comm, std::uint64_t number,
                 const std::vector<Call>& calls);
  CudaResult Allocate(Lock& lock, void** memory, std::size_t bytes, bool of_nccl);
  CudaResult Deallocate(Lock& lock, void* memory, bool of_nccl);
  CudaResult AllocatePinned(Lock& lock, void** memory, std::size_t bytes);
  CudaResult DeallocatePinned(Lock& lock, void* memory);
  CudaResult Copy(void* to, const void* from, std::size_t bytes, CudaCopy direction,
                  CudaStreamHandle stream);
  bool IsPinned(const void* memory, std::size_t bytes) const;
  void CheckMemory(const Call& call);
  CudaStreamHandle StreamOf(CudaStreamHandle stream);
  void Enqueue(CudaStreamHandle stream, std::function<void(Lock&)> item);
  // The same of what is another item in each launch of the graph in which it may be captured.
  void EnqueueEach(CudaStreamHandle stream, std::function<std::function<void(Lock&)>()> make);
  // In fake_cuda_graphs.cc.
  static void AddGraphs(CudaApi& api);
  CudaResult Record(CudaEventHandle event, CudaStreamHandle stream, unsigned int flags);
  // What fires it, once, for all who ask from now on.
  std::function<void(Lock&)> NextFiring(CudaEventHandle event);
  void RecordExternal(CudaEventHandle event, CudaStreamHandle stream);
  CudaResult WaitForCaptured(CudaStreamHandle stream, CudaEventHandle event);
  void Finish(Lock& lock, CudaGraphHandle graph);
  void CheckMode(const char* what);
  CudaStreamHandle NewStream();
  CudaResult MakeStream(CudaStreamHandle* stream);
  void AwaitIdle(Lock& lock, CudaStreamHandle stream);
  CudaResult EndStream(CudaStreamHandle stream);
  void JoinStreams(Lock& lock, const std::function<bool(CudaStreamHandle)>& which);
  bool IsThere(NcclCommHandle comm, const char* what);
  bool IsUsable(NcclCommHandle comm, const char* what);
  bool IsUsable(CudaEventHandle event, const char* what);
  void Misuse(const std::string& what);
  void NoteLoss(int device);
  // Of what has begun there by now. Device and rank are one number.
  std::shared_ptr<bool> LossOf(int device) {
    return losses_.try_emplace(device, std::make_shared<bool>(false)).first->second;
  }
  NcclScript& ScriptOf(int rank) {
    return scripts_.try_emplace(rank, script_of_others_).first->second;
  }

  static FakeNccl* current;  // The one that is alive.

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<NcclMeetings> meetings_;  // Its calls are guarded by mutex_.
  // Guarded by mutex_.
  bool over_ = false;
  NcclCounts counts_;
  std::map<int, NcclScript> scripts_;
  NcclScript script_of_others_;
  std::map<int, std::shared_ptr<bool>> losses_;  // By device: of its present life.
  std::map<NcclCommHandle, std::unique_ptr<NcclComm>> comms_;
  std::set<CudaStreamHandle> streams_;
  std::set<CudaStreamHandle> ended_streams_;  // Whose threads are to be joined.
  std::set<CudaEventHandle> events_;
  std::map<CudaGraphHandle, std::unique_ptr<CudaGraph>> graphs_;
  unsigned long long captures_ = 0;
  std::map<const std::byte*, Block> blocks_;                   // By their beginning.
  std::map<const std::byte*, std::vector<std::byte>> pinned_;  // By their beginning.
  std::map<int, CudaStreamHandle> default_streams_;            // By device.
};

}  // namespace resilient::testing
