#include "tests/support/fake_nccl.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "tests/support/fake_nccl_reduce.h"
#include "tests/support/fake_nccl_state.h"

namespace resilient::testing {
namespace {

constexpr std::chrono::seconds kBound(30);

}  // namespace

FakeNccl* FakeNccl::current = nullptr;

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

std::vector<std::string> FakeNccl::TakeMisuse() {
  std::lock_guard lock(mutex_);
  return std::exchange(counts_.misuse, {});
}

bool FakeNccl::WaitFor(const std::function<bool(const NcclCounts&)>& condition) {
  Lock lock(mutex_);
  return changed_.wait_for(lock, kBound, [&] { return condition(counts_); });
}

void FakeNccl::Misuse(const std::string& what) { counts_.misuse.push_back(what); }

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
  if (config.size != sizeof(NcclConfig) || config.magic != 0xcafebeef || config.blocking != 0)
    Misuse("a configuration that is not one of a communicator that does not block");
  World& world = worlds_[id.bytes];
  if (world.ranks == 0) world.ranks = ranks;
  if (world.ranks != ranks || !world.joined.insert(rank).second)
    Misuse("two different groups by one unique id");
  auto made = std::make_unique<NcclComm>();
  made->rank = rank;
  made->device = DeviceOfThread();
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
  const bool flushing =
      comm->finalizing && (script.hang_destroy || comm->kernels_over < comm->kernels_launched);
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
  comm->being_launched = [this, comm, stream, calls = std::move(calls)] {
    Enqueue(stream, [this, comm, number = comm->kernels_launched++, calls](Lock& lock) {
      RunKernel(lock, comm, number, calls);
    });
  };
  return NcclResult::kInProgress;
}

void FakeNccl::RunKernel(Lock& lock, NcclCommHandle comm, std::uint64_t number,
                         const std::vector<Call>& calls) {
  World& world = *static_cast<World*>(comm->world);
  const auto stopped = [&] { return comm->aborted || over_; };
  changed_.wait(lock, [&] { return stopped() || comm->kernels_over == number; });
  comm->kernel_runs = true;
  ++counts_.kernels_begun[comm->rank];
  changed_.notify_all();
  changed_.wait(lock, [&] { return stopped() || !ScriptOf(comm->rank).hold_kernels; });
  std::vector<PostedPtr> posted;
  if (!stopped()) {
    for (const Call& call : calls) posted.push_back(Post(world, call));
    changed_.notify_all();
    const auto is_done = [](const PostedPtr& one) { return one->done; };
    changed_.wait(lock,
                  [&] { return stopped() || std::all_of(posted.begin(), posted.end(), is_done); });
  }
  for (const PostedPtr& one : posted) {
    CheckMemory(one->call);
    if (!one->done) one->broken = true;  // Its memory may be gone when the others come.
  }
  comm->kernel_runs = false;
  ++comm->kernels_over;
  changed_.notify_all();
}

FakeNccl::PostedPtr FakeNccl::Post(World& world, const Call& call) {
  CheckMemory(call);
  auto posted = std::make_shared<Posted>(Posted{.call = call});
  const int rank = call.comm->rank;
  if (call.kind == Kind::kSend) {
    Channel& channel = world.channels[{rank, call.peer}];
    channel.sends.push_back(posted);
    Match(channel);
  } else if (call.kind == Kind::kRecv) {
    Channel& channel = world.channels[{call.peer, rank}];
    channel.recvs.push_back(posted);
    Match(channel);
  } else {
    std::map<int, PostedPtr>& meeting = world.meetings[call.comm->collectives++];
    meeting[rank] = posted;
    if (meeting.size() == static_cast<std::size_t>(world.ranks)) Meet(meeting);
  }
  return posted;
}

void FakeNccl::Match(Channel& channel) {
  while (!channel.sends.empty() && !channel.recvs.empty()) {
    Posted& send = *channel.sends.front();
    Posted& recv = *channel.recvs.front();
    if (send.broken || recv.broken) return;
    const std::size_t bytes = send.call.count * SizeOf(send.call.type);
    const std::size_t room = recv.call.count * SizeOf(recv.call.type);
    if (bytes != room) {
      Misuse(StrCat("rank ", send.call.comm->rank, " sends ", bytes, " bytes to rank ",
                    send.call.peer, ", which receives ", room));
      send.broken = recv.broken = true;
      return;
    }
    if (bytes > 0) std::memmove(recv.call.to, send.call.from, bytes);
    send.done = recv.done = true;
    channel.sends.pop_front();
    channel.recvs.pop_front();
  }
}

bool FakeNccl::AreAlike(const std::map<int, PostedPtr>& meeting) {
  const Call& first = meeting.begin()->second->call;
  for (const auto& [rank, posted] : meeting) {
    const Call& call = posted->call;
    if (posted->broken) return false;  // Its rank has been told already.
    if (call.kind == first.kind && call.count == first.count && call.type == first.type &&
        call.op == first.op && call.factor == first.factor && call.peer == first.peer)
      continue;
    Misuse(StrCat("rank ", rank, " is in another collective than rank ", meeting.begin()->first,
                  ": of ", call.count, " elements and of ", first.count));
    return false;
  }
  return true;
}

void FakeNccl::Meet(const std::map<int, PostedPtr>& meeting) {
  if (!AreAlike(meeting)) {
    for (const auto& [rank, posted] : meeting) posted->broken = true;
    return;
  }
  const Call& first = meeting.begin()->second->call;
  const std::size_t bytes = first.count * SizeOf(first.type);
  std::vector<const std::byte*> inputs;
  inputs.reserve(meeting.size());
  for (const auto& [rank, posted] : meeting)
    inputs.push_back(static_cast<const std::byte*>(posted->call.from));
  const auto reduced = [&] {
    return ReduceAsNccl(first.type, first.op, first.factor, inputs, first.count);
  };
  std::vector<std::byte> everything;  // One for all ranks, or one behind the other.
  if (first.kind == Kind::kBroadcast) {
    const std::byte* from = inputs[static_cast<std::size_t>(first.peer)];
    everything.assign(from, from + bytes);
  } else if (first.kind == Kind::kAllGather) {
    for (const std::byte* from : inputs) everything.insert(everything.end(), from, from + bytes);
  } else if (first.kind == Kind::kReduceScatter) {
    for (std::size_t rank = 0; rank < meeting.size(); ++rank) {
      const std::vector<std::byte> part = reduced();
      everything.insert(everything.end(), part.begin(), part.end());
      for (const std::byte*& from : inputs) from += bytes;
    }
  } else {
    everything = reduced();
  }
  for (const auto& [rank, posted] : meeting) {
    posted->done = true;
    if (first.kind == Kind::kReduce && rank != first.peer) continue;
    const bool parts = first.kind == Kind::kReduceScatter;
    const std::size_t at = parts ? static_cast<std::size_t>(rank) * bytes : 0;
    std::memcpy(posted->call.to, everything.data() + at, parts ? bytes : everything.size());
  }
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
    return over_ ||
           (comm->kernels_over == comm->kernels_launched && !ScriptOf(comm->rank).hang_abort);
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
