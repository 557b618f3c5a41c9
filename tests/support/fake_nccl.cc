#include "tests/support/fake_nccl.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "tests/support/fake_nccl_config.h"
#include "tests/support/fake_nccl_reduce.h"
#include "tests/support/fake_nccl_state.h"

namespace resilient::testing {
namespace {

constexpr std::chrono::seconds kBound(30);

}  // namespace

NcclReach DefaultReach() {
  const char* reach = std::getenv("RESILIENT_FAKE_NCCL_REACH");
  const bool processes = reach != nullptr && std::string_view(reach) == "processes";
  return processes ? NcclReach::kProcesses : NcclReach::kThreads;
}

FakeNccl* FakeNccl::current = nullptr;

FakeNccl::FakeNccl(NcclReach reach) {
  RESILIENT_CHECK(current == nullptr);
  NcclMeetingHost host{.mutex = &mutex_,
                       .changed = &changed_,
                       .on_misuse = [this](const std::string& what) { Misuse(what); }};
  const bool here = reach == NcclReach::kThreads;
  meetings_ = here ? MakeLocalMeetings(std::move(host)) : MakeSocketMeetings(std::move(host));
  current = this;
}

FakeNccl::~FakeNccl() {
  Lock lock(mutex_);
  over_ = true;
  changed_.notify_all();
  while (!streams_.empty()) EndStream(*streams_.begin());
  JoinStreams(lock, [](CudaStreamHandle) { return true; });
  comms_.clear();
  lock.unlock();
  meetings_.reset();  // Joins a thread that takes the lock.
  current = nullptr;
}

void FakeNccl::Change(int rank, const std::function<void(NcclScript&)>& change) {
  std::lock_guard lock(mutex_);
  change(ScriptOf(rank));
  NoteLoss(rank);
  changed_.notify_all();
}

void FakeNccl::ChangeAll(const std::function<void(NcclScript&)>& change) {
  std::lock_guard lock(mutex_);
  change(script_of_others_);
  for (auto& [rank, script] : scripts_) {
    change(script);
    NoteLoss(rank);
  }
  changed_.notify_all();
}

void FakeNccl::NoteLoss(int device) {
  if (!ScriptOf(device).lose_device) {
    losses_.erase(device);
  } else {
    *LossOf(device) = true;
  }
}

NcclCounts FakeNccl::Counts() {
  std::lock_guard lock(mutex_);
  return counts_;
}

std::vector<std::string> FakeNccl::TakeMisuse() {
  std::lock_guard lock(mutex_);
  return std::exchange(counts_.misuse, {});
}

bool FakeNccl::WaitFor(const std::function<bool(const NcclCounts&)>& condition) {
  Lock lock(mutex_);
  return changed_.wait_for(lock, kBound, [&] { return condition(counts_); });
}

void FakeNccl::Misuse(const std::string& what) {
  counts_.misuse.push_back(what);
  changed_.notify_all();
}

bool FakeNccl::IsThere(NcclCommHandle comm, const char* what) {
  if (comms_.find(comm) != comms_.end()) return true;
  Misuse(StrCat(what, " on a communicator that is not there"));
  return false;
}

bool FakeNccl::IsUsable(NcclCommHandle comm, const char* what) {
  if (!IsThere(comm, what)) return false;
  if (comm->aborted) Misuse(StrCat(what, " while the communicator is aborted"));
  if (comm->thread != std::this_thread::get_id()) Misuse(StrCat(what, " on another thread"));
  return true;
}

NcclResult FakeNccl::InitRank(NcclCommHandle* comm, int ranks, const NcclUniqueId& id, int rank,
                              const NcclConfig& config) {
  const std::optional<std::string> read = ReadConfig(config);
  if (!read) Misuse("a configuration that is not one of a communicator that does not block");
  counts_.configs.push_back(read.value_or("none"));
  auto made = std::make_unique<NcclComm>();
  made->rank = rank;
  made->ranks = ranks;
  made->device = DeviceOfThread();
  made->meeting = meetings_->Join(id, ranks, rank);
  made->thread = std::this_thread::get_id();
  *comm = made.get();
  comms_[*comm] = std::move(made);
  ++counts_.communicators;
  changed_.notify_all();
  NcclScript& script = ScriptOf(rank);
  const NcclResult result = script.init_result;
  if (std::exchange(script.init_once, false)) script.init_result = NcclResult::kInProgress;
  return result;
}

NcclResult FakeNccl::Poll(NcclCommHandle comm, NcclResult* error) {
  if (!IsUsable(comm, "ncclCommGetAsyncError")) return NcclResult::kInvalidArgument;
  const NcclScript& script = ScriptOf(comm->rank);
  *error = script.async_error;
  if (*error == NcclResult::kSuccess && comm->meeting->IsLost()) *error = NcclResult::kRemoteError;
  if (*error != NcclResult::kSuccess) return NcclResult::kSuccess;
  const bool connecting = script.hang_init || !comm->meeting->IsComplete();
  const bool flushing =
      comm->finalizing && (script.hang_destroy || comm->kernels_over < comm->kernels_launched ||
                           comm->graphs > 0 || !comm->meeting->IsFlushed());
  const bool launching =
      comm->being_launched != nullptr && (script.hang_launch || comm->polls_left-- > 0);
  if (connecting || flushing || launching) {
    *error = NcclResult::kInProgress;
    return NcclResult::kSuccess;
  }
  if (const auto enqueue = std::exchange(comm->being_launched, nullptr)) enqueue();
  return NcclResult::kSuccess;
}

// NCCL looks an operator up when it is used: it may be gone when the kernel runs.
NcclResult FakeNccl::ResolveOperator(Call& call) {
  const bool is_float8 =
      call.type == NcclDataType::kFloat8E4M3 || call.type == NcclDataType::kFloat8E5M2;
  // As NCCL 2.28 does; for one rank it multiplies by a kernel of its own.
  if (call.comm->ranks == 1 && is_float8 && call.op >= NcclReduceOp::kAvg)
    return NcclResult::kInvalidArgument;
  if (call.op <= NcclReduceOp::kAvg) return NcclResult::kSuccess;
  const auto found = call.comm->operators.find(call.op);
  if (found == call.comm->operators.end()) {
    Misuse("a reduction by an operator that is not there");
    return NcclResult::kInvalidArgument;
  }
  if (found->second.type != call.type) {
    Misuse("a reduction of a type by an operator of another");
    return NcclResult::kInvalidArgument;
  }
  call.op = NcclReduceOp::kSum;
  call.factor = found->second.factor;
  return NcclResult::kSuccess;
}

// As NCCL's own checks of a group.
bool FakeNccl::FitTogether(const std::vector<Call>& calls) {
  const auto to_self = [&](Kind kind) {
    return std::count_if(calls.begin(), calls.end(), [&](const Call& call) {
      return call.kind == kind && call.peer == call.comm->rank;
    });
  };
  if (to_self(Kind::kSend) != to_self(Kind::kRecv)) {
    Misuse("a send to itself without its recv in the same group, or the other way round");
    return false;
  }
  const bool elsewhere = std::any_of(calls.begin(), calls.end(), [&](const Call& call) {
    return call.comm != calls.front().comm || call.stream != calls.front().stream;
  });
  if (elsewhere) Misuse("a group on several communicators or streams, which the fake has not");
  return !elsewhere;
}

NcclResult FakeNccl::Launch(std::vector<Call> calls) {
  if (!FitTogether(calls)) return NcclResult::kInvalidUsage;
  // Empty collectives are discarded, empty messages are not.
  std::erase_if(calls, [](const Call& call) { return call.kind < Kind::kSend && call.count == 0; });
  if (calls.empty()) return NcclResult::kSuccess;
  NcclCommHandle comm = calls.front().comm;
  if (comm->being_launched) Misuse("a launch while the last one is under way");
  const NcclResult result = ScriptOf(comm->rank).launch_result;
  if (result != NcclResult::kInProgress) return result;
  CudaStreamHandle stream = StreamOf(calls.front().stream);
  stream->last_launcher = comm;
  comm->polls_left = 1;
  ++counts_.launches;
  changed_.notify_all();
  comm->being_launched = [this, comm, stream, calls = std::move(calls)] {
    if (stream->graph != nullptr) comm->was_captured = true;
    if (stream->graph != nullptr && stream->graph->comms.insert(comm).second) ++comm->graphs;
    EnqueueEach(stream, [this, comm, calls]() -> StreamItem {
      if (!IsThere(comm, "a launch of a kernel")) return [](Lock&) {};
      return [this, comm, number = comm->kernels_launched++, calls](Lock& lock) {
        RunKernel(lock, comm, number, calls);
      };
    });
  };
  return NcclResult::kInProgress;
}

void FakeNccl::RunKernel(Lock& lock, NcclCommHandle comm, std::uint64_t number,
                         const std::vector<Call>& calls) {
  const auto stopped = [&] { return comm->aborted || over_; };
  changed_.wait(lock, [&] { return stopped() || comm->kernels_over == number; });
  comm->kernel_runs = true;
  ++counts_.kernels_begun[comm->rank];
  changed_.notify_all();
  changed_.wait(lock, [&] { return stopped() || !ScriptOf(comm->rank).hold_kernels; });
  std::vector<PostedCallPtr> posted;
  if (!stopped()) {
    for (const Call& call : calls) {
      CheckMemory(call);
      posted.push_back(comm->meeting->Post(call));
    }
    changed_.notify_all();
    const auto is_done = [](const PostedCallPtr& one) { return one->done; };
    changed_.wait(lock,
                  [&] { return stopped() || std::all_of(posted.begin(), posted.end(), is_done); });
  }
  for (const PostedCallPtr& one : posted) {
    CheckMemory(one->call);
    if (!one->done) comm->meeting->GiveUp(one);  // Its memory may be gone when the others come.
  }
  comm->kernel_runs = false;
  ++comm->kernels_over;
  changed_.notify_all();
}

NcclResult FakeNccl::MakePremulSum(NcclCommHandle comm, NcclReduceOp* op, const void* scalar,
                                   NcclDataType type) {
  if (!IsUsable(comm, "ncclRedOpCreatePreMulSum")) return NcclResult::kInvalidArgument;
  if (comm->being_launched) {
    Misuse("ncclRedOpCreatePreMulSum while a launch is under way");
    return NcclResult::kInvalidArgument;
  }
  *op = static_cast<NcclReduceOp>(static_cast<int>(NcclReduceOp::kAvg) + ++comm->operators_made);
  comm->operators[*op] = {.type = type, .factor = NumberAt(type, scalar)};
  ++counts_.reductions;
  return NcclResult::kSuccess;
}

NcclResult FakeNccl::DestroyOperator(NcclCommHandle comm, NcclReduceOp op) {
  if (!IsUsable(comm, "ncclRedOpDestroy")) return NcclResult::kInvalidArgument;
  if (comm->operators.erase(op) == 0) {
    Misuse("destroy of an operator that is not there");
    return NcclResult::kInvalidArgument;
  }
  --counts_.reductions;
  return NcclResult::kSuccess;
}

void FakeNccl::Abort(Lock& lock, NcclCommHandle comm) {
  if (!IsThere(comm, "ncclCommAbort")) return;
  comm->aborted = true;
  ++counts_.aborts_begun;
  changed_.notify_all();
  changed_.wait(lock, [&] {
    return over_ || (comm->kernels_over == comm->kernels_launched && comm->graphs == 0 &&
                     !ScriptOf(comm->rank).hang_abort);
  });
  ++counts_.aborts_ended;
  Free(comm);
}

void FakeNccl::Free(NcclCommHandle comm) {
  counts_.reductions -= static_cast<int>(comm->operators.size());
  comms_.erase(comm);
  --counts_.communicators;
  changed_.notify_all();
}

}  // namespace resilient::testing
