#include "tests/support/fake_nccl.h"
#include "tests/support/fake_nccl_state.h"

// The table of the fake's NCCL.
namespace resilient::testing {
namespace {

thread_local int group_depth = 0;

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

// Each takes the lock of the fake that is alive.
struct FakeNcclFunctions {
  using Lock = FakeNccl::Lock;
  using Call = FakeNccl::Call;
  using Kind = FakeNccl::Kind;

  static FakeNccl& fake() { return *FakeNccl::current; }
  static NcclResult Communicate(Call call) {
    Lock lock(fake().mutex_);
    if (!fake().IsUsable(call.comm, "a call that communicates"))
      return NcclResult::kInvalidArgument;
    const NcclResult result = fake().ResolveOperator(call);
    if (result != NcclResult::kSuccess) return result;
    if (group_depth == 0) return fake().Launch({call});
    Group().push_back(call);
    return NcclResult::kSuccess;
  }
  // What nothing is calculated with.
  static NcclResult Move(Kind kind, const void* from, void* to, std::size_t count,
                         NcclDataType type, int peer, NcclCommHandle comm,
                         CudaStreamHandle stream) {
    return Communicate({.kind = kind,
                        .from = from,
                        .to = to,
                        .count = count,
                        .type = type,
                        .peer = peer,
                        .comm = comm,
                        .stream = stream});
  }
  static NcclResult Reduce(Kind kind, const void* from, void* to, std::size_t count,
                           NcclDataType type, NcclReduceOp op, int root, NcclCommHandle comm,
                           CudaStreamHandle stream) {
    return Communicate({.kind = kind,
                        .from = from,
                        .to = to,
                        .count = count,
                        .type = type,
                        .op = op,
                        .peer = root,
                        .comm = comm,
                        .stream = stream});
  }
  static std::vector<Call>& Group() {
    thread_local std::vector<Call> group;
    return group;
  }
  static NcclResult GetUniqueId(NcclUniqueId* id) {
    Lock lock(fake().mutex_);
    ++fake().counts_.unique_ids;
    *id = fake().meetings_->NewId();
    return NcclResult::kSuccess;
  }
  static NcclResult InitRank(NcclCommHandle* comm, int ranks, NcclUniqueId id, int rank,
                             NcclConfig* config) {
    Lock lock(fake().mutex_);
    return fake().InitRank(comm, ranks, id, rank, *config);
  }
  static NcclResult Finalize(NcclCommHandle comm) {
    Lock lock(fake().mutex_);
    if (!fake().IsUsable(comm, "ncclCommFinalize")) return NcclResult::kInvalidArgument;
    comm->finalizing = true;
    return NcclResult::kInProgress;
  }
  static NcclResult Destroy(NcclCommHandle comm) {
    Lock lock(fake().mutex_);
    if (!fake().IsThere(comm, "ncclCommDestroy")) return NcclResult::kInvalidArgument;
    if (!comm->finalizing && !comm->was_captured)
      fake().Misuse("destroy of a communicator that was not finalized");
    fake().changed_.wait(lock, [&] { return fake().over_ || comm->graphs == 0; });
    ++fake().counts_.destroyed;
    fake().Free(comm);
    return NcclResult::kSuccess;
  }
  static NcclResult GroupEnd() {
    if (--group_depth > 0) return NcclResult::kSuccess;
    Lock lock(fake().mutex_);
    return fake().Launch(std::exchange(Group(), {}));
  }
};

struct FakeNcclTable {
  using F = FakeNcclFunctions;
  using Kind = FakeNccl::Kind;

  static void AddMemory(NcclApi& api) {
    api.MemAlloc = [](void** memory, std::size_t bytes) {
      Lock lock(F::fake().mutex_);
      const CudaResult made = F::fake().Allocate(lock, memory, bytes, true);
      return made == CudaResult::kSuccess ? NcclResult::kSuccess : NcclResult::kUnhandledCudaError;
    };
    api.MemFree = [](void* memory) {
      Lock lock(F::fake().mutex_);
      const CudaResult freed = F::fake().Deallocate(lock, memory, true);
      return freed == CudaResult::kSuccess ? NcclResult::kSuccess : NcclResult::kInvalidArgument;
    };
  }
  static void AddReductions(NcclApi& api) {
    api.AllReduce = [](const void* from, void* to, std::size_t count, NcclDataType type,
                       NcclReduceOp op, NcclCommHandle comm, CudaStreamHandle stream) {
      return F::Reduce(Kind::kAllReduce, from, to, count, type, op, 0, comm, stream);
    };
    api.Reduce = [](const void* from, void* to, std::size_t count, NcclDataType type,
                    NcclReduceOp op, int root, NcclCommHandle comm, CudaStreamHandle stream) {
      return F::Reduce(Kind::kReduce, from, to, count, type, op, root, comm, stream);
    };
    api.ReduceScatter = [](const void* from, void* to, std::size_t count, NcclDataType type,
                           NcclReduceOp op, NcclCommHandle comm, CudaStreamHandle stream) {
      return F::Reduce(Kind::kReduceScatter, from, to, count, type, op, 0, comm, stream);
    };
    api.RedOpCreatePreMulSum = [](NcclReduceOp* op, void* scalar, NcclDataType type,
                                  NcclScalarResidence residence, NcclCommHandle comm) {
      Lock lock(F::fake().mutex_);
      if (residence != NcclScalarResidence::kHostImmediate) F::fake().Misuse("a factor elsewhere");
      return F::fake().MakePremulSum(comm, op, scalar, type);
    };
    api.RedOpDestroy = [](NcclReduceOp op, NcclCommHandle comm) {
      Lock lock(F::fake().mutex_);
      return F::fake().DestroyOperator(comm, op);
    };
  }
  static void AddMoves(NcclApi& api) {
    api.Broadcast = [](const void* from, void* to, std::size_t count, NcclDataType type, int root,
                       NcclCommHandle comm, CudaStreamHandle stream) {
      return F::Move(Kind::kBroadcast, from, to, count, type, root, comm, stream);
    };
    api.AllGather = [](const void* from, void* to, std::size_t count, NcclDataType type,
                       NcclCommHandle comm, CudaStreamHandle stream) {
      return F::Move(Kind::kAllGather, from, to, count, type, 0, comm, stream);
    };
    api.Send = [](const void* from, std::size_t count, NcclDataType type, int peer,
                  NcclCommHandle comm, CudaStreamHandle stream) {
      return F::Move(Kind::kSend, from, nullptr, count, type, peer, comm, stream);
    };
    api.Recv = [](void* to, std::size_t count, NcclDataType type, int peer, NcclCommHandle comm,
                  CudaStreamHandle stream) {
      return F::Move(Kind::kRecv, nullptr, to, count, type, peer, comm, stream);
    };
  }

 private:
  using Lock = FakeNccl::Lock;
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
    Lock lock(F::fake().mutex_);
    return F::fake().Poll(comm, error);
  };
  api.CommFinalize = &F::Finalize;
  api.CommDestroy = &F::Destroy;
  api.CommAbort = [](NcclCommHandle comm) {
    Lock lock(F::fake().mutex_);
    F::fake().Abort(lock, comm);
    return NcclResult::kSuccess;
  };
  api.GroupStart = [] {
    ++group_depth;
    return NcclResult::kSuccess;
  };
  api.GroupEnd = &F::GroupEnd;
  FakeNcclTable::AddMemory(api);
  FakeNcclTable::AddReductions(api);
  FakeNcclTable::AddMoves(api);
  return api;
}

}  // namespace resilient::testing
