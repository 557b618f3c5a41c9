#include "tests/support/fake_nccl.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <thread>

#include "runtime/base/check.h"
#include "runtime/base/log.h"

namespace resilient {

struct NcclComm {
  int rank = 0;
  int device = 0;
  void* world = nullptr;
  std::thread::id thread;
  bool aborted = false;
  bool finalizing = false;
  int polls_left = 0;  // Of the launch in progress.
  std::vector<std::function<void()>> being_launched;
  std::vector<CudaStreamHandle> launch_streams;
  int kernels_queued = 0;
  std::uint64_t collectives = 0;
};

struct CudaStream {
  std::deque<std::function<void(std::unique_lock<std::mutex>&)>> items;
  bool ended = false;
  std::thread worker;
};

struct CudaEvent {
  struct State {
    bool done = true;
    std::uint64_t version = 0;
    int device = 0;
  };
  std::shared_ptr<State> state = std::make_shared<State>();
  bool recorded = false;
};

namespace testing {
namespace {

constexpr std::chrono::seconds kBound(30);

FakeNccl* current = nullptr;
thread_local int device_of_thread = 0;
thread_local int group_depth = 0;

template <typename T>
T Combine(NcclReduceOp op, T a, T b) {
  switch (op) {
    case NcclReduceOp::kSum:
    case NcclReduceOp::kAvg:
      return static_cast<T>(a + b);
    case NcclReduceOp::kProduct:
      return static_cast<T>(a * b);
    case NcclReduceOp::kMax:
      return std::max(a, b);
    case NcclReduceOp::kMin:
      return std::min(a, b);
  }
  return a;
}

template <typename T>
std::vector<std::byte> ReduceAs(const std::vector<const void*>& inputs, std::size_t count,
                                NcclReduceOp op) {
  std::vector<std::byte> bytes(count * sizeof(T));
  for (std::size_t i = 0; i < count; ++i) {
    T result = static_cast<const T*>(inputs.front())[i];
    for (std::size_t rank = 1; rank < inputs.size(); ++rank)
      result = Combine(op, result, static_cast<const T*>(inputs[rank])[i]);
    if (op == NcclReduceOp::kAvg) result = static_cast<T>(result / static_cast<T>(inputs.size()));
    std::memcpy(bytes.data() + i * sizeof(T), &result, sizeof(T));
  }
  return bytes;
}

std::vector<std::byte> ReduceBytes(NcclDataType type, const std::vector<const void*>& inputs,
                                   std::size_t count, NcclReduceOp op) {
  switch (type) {
    case NcclDataType::kFloat32:
      return ReduceAs<float>(inputs, count, op);
    case NcclDataType::kFloat64:
      return ReduceAs<double>(inputs, count, op);
    case NcclDataType::kInt32:
      return ReduceAs<std::int32_t>(inputs, count, op);
    case NcclDataType::kInt64:
      return ReduceAs<std::int64_t>(inputs, count, op);
    case NcclDataType::kUInt8:
      return ReduceAs<std::uint8_t>(inputs, count, op);
    case NcclDataType::kInt8:
    case NcclDataType::kUInt32:
    case NcclDataType::kUInt64:
    case NcclDataType::kFloat16:
    case NcclDataType::kBFloat16:
      break;
  }
  RESILIENT_CHECK(false);  // No test reduces these.
}

const char* ErrorText(NcclResult result) {
  switch (result) {
    case NcclResult::kSuccess:
      return "no error";
    case NcclResult::kUnhandledCudaError:
      return "unhandled cuda error";
    case NcclResult::kSystemError:
      return "unhandled system error";
    case NcclResult::kInternalError:
      return "internal error";
    case NcclResult::kInvalidArgument:
      return "invalid argument";
    case NcclResult::kInvalidUsage:
      return "invalid usage";
    case NcclResult::kRemoteError:
      return "remote process exited or there was a network error";
    case NcclResult::kInProgress:
      return "NCCL operation in progress";
  }
  return "unknown result";
}

}  // namespace

FakeNccl::FakeNccl() {
  RESILIENT_CHECK(current == nullptr);
  current = this;
}

FakeNccl::~FakeNccl() {
  Lock lock(mutex_);
  over_ = true;
  changed_.notify_all();
  while (!streams_.empty()) EndStream(lock, *streams_.begin());
  current = nullptr;
}

void FakeNccl::Change(int rank, const std::function<void(NcclScript&)>& change) {
  std::lock_guard lock(mutex_);
  change(ScriptOf(rank));
  changed_.notify_all();
}

NcclCounts FakeNccl::Counts() {
  std::lock_guard lock(mutex_);
  return counts_;
}

bool FakeNccl::WaitFor(const std::function<bool(const NcclCounts&)>& condition) {
  Lock lock(mutex_);
  return changed_.wait_for(lock, kBound, [&] { return condition(counts_); });
}

void FakeNccl::Misuse(const std::string& what) { counts_.misuse.push_back(what); }

bool FakeNccl::IsUsable(NcclCommHandle comm, const char* what) {
  if (comms_.find(comm) == comms_.end()) {
    Misuse(StrCat(what, " on a communicator that is not there"));
    return false;
  }
  if (comm->aborted) Misuse(StrCat(what, " while the communicator is aborted"));
  if (comm->thread != std::this_thread::get_id()) Misuse(StrCat(what, " on another thread"));
  return true;
}

NcclResult FakeNccl::InitRank(NcclCommHandle* comm, int ranks, const NcclUniqueId& id, int rank,
                              const NcclConfig& config) {
  if (config.size != sizeof(NcclConfig) || config.magic != 0xcafebeef || config.blocking != 0)
    Misuse("a configuration that is not one of a communicator that does not block");
  World& world = worlds_[id.bytes];
  if (world.ranks == 0) world.ranks = ranks;
  if (world.ranks != ranks || !world.joined.insert(rank).second)
    Misuse("two different groups by one unique id");
  auto made = std::make_unique<NcclComm>();
  made->rank = rank;
  made->device = device_of_thread;
  made->world = &world;
  made->thread = std::this_thread::get_id();
  *comm = made.get();
  comms_[*comm] = std::move(made);
  ++counts_.communicators;
  changed_.notify_all();
  return ScriptOf(rank).init_result;
}

NcclResult FakeNccl::Poll(NcclCommHandle comm, NcclResult* error) {
  if (!IsUsable(comm, "ncclCommGetAsyncError")) return NcclResult::kInvalidArgument;
  const NcclScript& script = ScriptOf(comm->rank);
  const auto& world = *static_cast<World*>(comm->world);
  *error = script.async_error;
  if (*error != NcclResult::kSuccess) return NcclResult::kSuccess;
  const bool connecting =
      script.hang_init || world.joined.size() < static_cast<std::size_t>(world.ranks);
  const bool flushing = comm->finalizing && (script.hang_destroy || comm->kernels_queued > 0);
  const bool launching =
      !comm->being_launched.empty() && (script.hang_launch || comm->polls_left-- > 0);
  if (connecting || flushing || launching) {
    *error = NcclResult::kInProgress;
    return NcclResult::kSuccess;
  }
  for (const auto& enqueue : std::exchange(comm->being_launched, {})) enqueue();
  comm->launch_streams.clear();
  return NcclResult::kSuccess;
}

NcclResult FakeNccl::Launch(const std::vector<Call>& calls) {
  for (const Call& call : calls) {
    NcclCommHandle comm = call.comm;
    if (!IsUsable(comm, "a collective")) return NcclResult::kInvalidArgument;
    if (&call == &calls.front() && !comm->being_launched.empty())
      Misuse("a collective while the last one is being launched");
    const NcclResult result = ScriptOf(comm->rank).launch_result;
    if (result != NcclResult::kInProgress) return result;
    CudaStreamHandle stream = StreamOf(call.stream);
    comm->launch_streams.push_back(stream);
    comm->polls_left = 1;
    comm->being_launched.push_back([this, call, stream] {
      ++call.comm->kernels_queued;
      Enqueue(stream, [this, call](Lock& lock) { RunKernel(lock, call); });
    });
  }
  return NcclResult::kInProgress;
}

void FakeNccl::RunKernel(Lock& lock, const Call& call) {
  NcclComm& comm = *call.comm;
  World& world = *static_cast<World*>(comm.world);
  const std::uint64_t index = comm.collectives++;
  ++counts_.kernels_begun[comm.rank];
  changed_.notify_all();
  const auto stopped = [&] { return comm.aborted || over_; };
  changed_.wait(lock, [&] { return stopped() || !ScriptOf(comm.rank).hold_kernels; });
  Meeting& meeting = world.meetings[index];
  if (!stopped()) {
    meeting.calls[comm.rank] = call;
    if (meeting.calls.size() == static_cast<std::size_t>(world.ranks)) Compute(world, meeting);
    changed_.notify_all();
    changed_.wait(lock, [&] { return stopped() || meeting.done; });
  }
  // Its memory may be gone when the others come.
  if (!meeting.done) meeting.broken = true;
  --comm.kernels_queued;
  changed_.notify_all();
}

void FakeNccl::Compute(World& world, Meeting& meeting) {
  const Call& first = meeting.calls.begin()->second;
  for (const auto& [rank, call] : meeting.calls) {
    const bool same = call.kind == first.kind && call.count == first.count &&
                      call.type == first.type && call.op == first.op && call.root == first.root;
    if (!same) meeting.broken = true;
  }
  if (meeting.broken) return;
  std::vector<const void*> inputs;
  for (int rank = 0; rank < world.ranks; ++rank) inputs.push_back(meeting.calls[rank].from);
  std::vector<std::byte> result;
  if (first.kind == Kind::kBroadcast) {
    RESILIENT_CHECK(first.type == NcclDataType::kUInt8);
    const auto* from = static_cast<const std::byte*>(inputs[static_cast<std::size_t>(first.root)]);
    result.assign(from, from + first.count);
  } else {
    result = ReduceBytes(first.type, inputs, first.count, first.op);
  }
  for (const auto& [rank, call] : meeting.calls) {
    if (call.kind == Kind::kReduce && rank != call.root) continue;
    if (!result.empty()) std::memcpy(call.to, result.data(), result.size());
  }
  meeting.done = true;
}

void FakeNccl::Abort(Lock& lock, NcclCommHandle comm) {
  if (comms_.find(comm) == comms_.end()) return Misuse("abort of a communicator that is not there");
  comm->aborted = true;
  ++counts_.aborts_begun;
  changed_.notify_all();
  changed_.wait(lock, [&] {
    return over_ || (comm->kernels_queued == 0 && !ScriptOf(comm->rank).hang_abort);
  });
  ++counts_.aborts_ended;
  Free(comm);
}

void FakeNccl::Free(NcclCommHandle comm) {
  comms_.erase(comm);
  --counts_.communicators;
  changed_.notify_all();
}

CudaStreamHandle FakeNccl::NewStream() {
  auto* stream = new CudaStream;
  streams_.insert(stream);
  stream->worker = std::thread([this, stream] {
    Lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !stream->items.empty() || stream->ended; });
      if (stream->items.empty()) return;
      const auto item = std::move(stream->items.front());
      stream->items.pop_front();
      item(lock);
    }
  });
  return stream;
}

void FakeNccl::EndStream(Lock& lock, CudaStreamHandle stream) {
  streams_.erase(stream);
  stream->ended = true;
  changed_.notify_all();
  lock.unlock();
  stream->worker.join();
  delete stream;
  lock.lock();
}

CudaStreamHandle FakeNccl::StreamOf(CudaStreamHandle stream) {
  if (stream != nullptr) return stream;
  CudaStreamHandle& own = default_streams_[device_of_thread];
  if (own == nullptr) own = NewStream();
  return own;
}

void FakeNccl::Enqueue(CudaStreamHandle stream, std::function<void(Lock&)> item) {
  stream->items.push_back(std::move(item));
  changed_.notify_all();
}

// The functions of the tables: each takes the lock of the fake that is alive.
struct FakeNcclFunctions {
  using Lock = FakeNccl::Lock;
  using Call = FakeNccl::Call;
  using Kind = FakeNccl::Kind;

  static NcclResult Collective(const Call& call) {
    if (group_depth > 0) {
      Group().push_back(call);
      return NcclResult::kSuccess;
    }
    Lock lock(current->mutex_);
    return current->Launch({call});
  }
  static std::vector<Call>& Group() {
    thread_local std::vector<Call> group;
    return group;
  }
  static NcclResult GetUniqueId(NcclUniqueId* id) {
    Lock lock(current->mutex_);
    const int number = ++current->counts_.unique_ids;
    std::memcpy(id->bytes.data(), &number, sizeof(number));
    return NcclResult::kSuccess;
  }
  static NcclResult InitRank(NcclCommHandle* comm, int ranks, NcclUniqueId id, int rank,
                             NcclConfig* config) {
    Lock lock(current->mutex_);
    return current->InitRank(comm, ranks, id, rank, *config);
  }
  static NcclResult Finalize(NcclCommHandle comm) {
    Lock lock(current->mutex_);
    if (!current->IsUsable(comm, "ncclCommFinalize")) return NcclResult::kInvalidArgument;
    comm->finalizing = true;
    return NcclResult::kInProgress;
  }
  static NcclResult Destroy(NcclCommHandle comm) {
    Lock lock(current->mutex_);
    if (!comm->finalizing) current->Misuse("destroy of a communicator that was not finalized");
    ++current->counts_.destroyed;
    current->Free(comm);
    return NcclResult::kSuccess;
  }
  static NcclResult GroupEnd() {
    if (--group_depth > 0) return NcclResult::kSuccess;
    Lock lock(current->mutex_);
    return current->Launch(std::exchange(Group(), {}));
  }
  static CudaResult EventCreate(CudaEventHandle* event, unsigned int flags) {
    Lock lock(current->mutex_);
    if (flags != kCudaEventDisableTiming) current->Misuse("an event that measures time");
    // Device and rank are one number in the tests.
    if (current->ScriptOf(device_of_thread).refuse_events) return CudaResult::kInvalidValue;
    *event = new CudaEvent;
    (*event)->state->device = device_of_thread;
    ++current->counts_.events;
    current->changed_.notify_all();
    return CudaResult::kSuccess;
  }
  static CudaResult EventRecord(CudaEventHandle event, CudaStreamHandle stream) {
    Lock lock(current->mutex_);
    stream = current->StreamOf(stream);
    for (const auto& [comm, owned] : current->comms_) {
      const auto& launching = comm->launch_streams;
      if (!comm->aborted &&
          std::find(launching.begin(), launching.end(), stream) != launching.end())
        current->Misuse("an event on a stream where a collective is being launched");
    }
    event->recorded = true;
    event->state->done = false;
    const std::uint64_t version = ++event->state->version;
    current->Enqueue(stream, [state = event->state, version, fake = current](Lock&) {
      if (state->version == version) state->done = true;
      fake->changed_.notify_all();
    });
    return CudaResult::kSuccess;
  }
  static CudaResult EventQuery(CudaEventHandle event) {
    Lock lock(current->mutex_);
    if (!event->recorded) current->Misuse("query of an event that nobody recorded");
    if (current->ScriptOf(event->state->device).lose_device) return CudaResult::kLaunchFailure;
    return event->state->done ? CudaResult::kSuccess : CudaResult::kNotReady;
  }
  static CudaResult EventSynchronize(CudaEventHandle event) {
    Lock lock(current->mutex_);
    const auto& state = *event->state;
    current->changed_.wait(lock, [&] {
      return current->over_ || state.done || current->ScriptOf(state.device).lose_device;
    });
    return state.done ? CudaResult::kSuccess : CudaResult::kLaunchFailure;
  }
  static CudaResult EventDestroy(CudaEventHandle event) {
    Lock lock(current->mutex_);
    delete event;
    --current->counts_.events;
    current->changed_.notify_all();
    return CudaResult::kSuccess;
  }
  static CudaResult StreamWaitEvent(CudaStreamHandle stream, CudaEventHandle event, unsigned int) {
    Lock lock(current->mutex_);
    current->Enqueue(current->StreamOf(stream), [state = event->state, fake = current](Lock& held) {
      fake->changed_.wait(held, [&] { return fake->over_ || state->done; });
    });
    return CudaResult::kSuccess;
  }
};

NcclApi FakeNccl::nccl() {
  using F = FakeNcclFunctions;
  NcclApi api;
  api.GetVersion = [](int* version) {
    *version = 23007;
    return NcclResult::kSuccess;
  };
  api.GetErrorString = [](NcclResult result) { return ErrorText(result); };
  api.GetLastError = [](NcclCommHandle) { return "the fake was told to"; };
  api.GetUniqueId = &F::GetUniqueId;
  api.CommInitRankConfig = &F::InitRank;
  api.CommGetAsyncError = [](NcclCommHandle comm, NcclResult* error) {
    Lock lock(current->mutex_);
    return current->Poll(comm, error);
  };
  api.CommFinalize = &F::Finalize;
  api.CommDestroy = &F::Destroy;
  api.CommAbort = [](NcclCommHandle comm) {
    Lock lock(current->mutex_);
    current->Abort(lock, comm);
    return NcclResult::kSuccess;
  };
  api.GroupStart = [] {
    ++group_depth;
    return NcclResult::kSuccess;
  };
  api.GroupEnd = &F::GroupEnd;
  api.AllReduce = [](const void* from, void* to, std::size_t count, NcclDataType type,
                     NcclReduceOp op, NcclCommHandle comm, CudaStreamHandle stream) {
    return F::Collective({Kind::kAllReduce, from, to, count, type, op, 0, comm, stream});
  };
  api.Reduce = [](const void* from, void* to, std::size_t count, NcclDataType type, NcclReduceOp op,
                  int root, NcclCommHandle comm, CudaStreamHandle stream) {
    return F::Collective({Kind::kReduce, from, to, count, type, op, root, comm, stream});
  };
  api.Broadcast = [](const void* from, void* to, std::size_t count, NcclDataType type, int root,
                     NcclCommHandle comm, CudaStreamHandle stream) {
    return F::Collective(
        {Kind::kBroadcast, from, to, count, type, NcclReduceOp::kSum, root, comm, stream});
  };
  return api;
}

CudaApi FakeNccl::cuda() {
  using F = FakeNcclFunctions;
  CudaApi api;
  api.GetErrorName = [](CudaResult error) {
    return error == CudaResult::kLaunchFailure ? "cudaErrorLaunchFailure" : "cudaErrorInvalidValue";
  };
  api.GetErrorString = [](CudaResult) { return "the fake was told to"; };
  api.SetDevice = [](int device) {
    device_of_thread = device;
    return CudaResult::kSuccess;
  };
  api.StreamCreateWithFlags = [](CudaStreamHandle* stream, unsigned int) {
    Lock lock(current->mutex_);
    *stream = current->NewStream();
    return CudaResult::kSuccess;
  };
  api.StreamDestroy = [](CudaStreamHandle stream) {
    Lock lock(current->mutex_);
    current->EndStream(lock, stream);
    return CudaResult::kSuccess;
  };
  api.StreamWaitEvent = &F::StreamWaitEvent;
  api.EventCreateWithFlags = &F::EventCreate;
  api.EventRecord = &F::EventRecord;
  api.EventQuery = &F::EventQuery;
  api.EventSynchronize = &F::EventSynchronize;
  api.EventDestroy = &F::EventDestroy;
  return api;
}

}  // namespace testing
}  // namespace resilient
