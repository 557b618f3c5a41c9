#include "runtime/comm/nccl_launch.h"

#include <algorithm>
#include <cstddef>

#include "runtime/base/check.h"
#include "runtime/comm/nccl_scratch.h"

namespace resilient {
namespace {

constexpr NcclDataType kBytes = NcclDataType::kUInt8;

// Makes the calls of one group, which share a launch and wait for nothing of each other. After one
// has failed the others are not made; the group is closed in any case.
class GroupOfCalls {
 public:
  GroupOfCalls(const NcclLaunch& launch, const Operation& op)
      : launch_(launch), element_(SizeOf(op.dtype)), stream_(launch.stream) {
    result_ = launch_.nccl.GroupStart();
    open_ = result_ == NcclResult::kSuccess;
  }

  bool IsOwn(std::size_t rank) const { return static_cast<int>(rank) == launch_.rank; }
  template <typename Call>
  void Add(Call&& call) {
    if (result_ == NcclResult::kSuccess || result_ == NcclResult::kInProgress) result_ = call();
  }
  // Bytes, as nothing is calculated.
  void Send(const Part& part, int to) {
    Add([&] {
      return launch_.nccl.Send(part.data, part.count * element_, kBytes, to, launch_.comm, stream_);
    });
  }
  void Recv(const Part& part, int from) {
    Add([&] {
      return launch_.nccl.Recv(part.data, part.count * element_, kBytes, from, launch_.comm,
                               stream_);
    });
  }
  NcclResult End() {
    if (!open_) return result_;
    const NcclResult ended = launch_.nccl.GroupEnd();
    const bool failed = result_ != NcclResult::kSuccess && result_ != NcclResult::kInProgress;
    return failed ? result_ : ended;
  }

 private:
  const NcclLaunch& launch_;
  const std::size_t element_;
  const CudaStreamHandle stream_;
  NcclResult result_;
  bool open_;
};

// ncclAllGather takes one block of equal parts. Whether the outputs are one is known to this rank
// alone, unless the caller says it for all: else one broadcast a rank.
NcclResult AllGather(const NcclLaunch& launch, const Operation& op) {
  const std::size_t element = SizeOf(op.dtype);
  if (op.one_block) {
    return launch.nccl.AllGather(op.data, op.outputs.front().data, op.count * element, kBytes,
                                 launch.comm, launch.stream);
  }
  GroupOfCalls calls(launch, op);
  for (std::size_t root = 0; root < op.outputs.size(); ++root) {
    const Part& out = op.outputs[root];
    const void* from = calls.IsOwn(root) ? op.data : out.data;
    calls.Add([&] {
      return launch.nccl.Broadcast(from, out.data, out.count * element, kBytes,
                                   static_cast<int>(root), launch.comm, launch.stream);
    });
  }
  return calls.End();
}

NcclReduction ReductionOf(const NcclLaunch& launch, const Operation& op) {
  NcclReduction reduction = ReductionOf(op, launch.ranks);
  if (op.reduce == ReduceOp::kPremulSum) reduction.op = launch.premul_sum;
  return reduction;
}

// One reduction a rank, unless the inputs are one block; see AllGather.
NcclResult ReduceScatter(const NcclLaunch& launch, const Operation& op) {
  const NcclReduction reduction = ReductionOf(launch, op);
  if (op.one_block) {
    return launch.nccl.ReduceScatter(op.inputs.front().data, op.data, op.count * reduction.numbers,
                                     reduction.type, reduction.op, launch.comm, launch.stream);
  }
  GroupOfCalls calls(launch, op);
  for (std::size_t root = 0; root < op.inputs.size(); ++root) {
    const Part& in = op.inputs[root];
    void* to = calls.IsOwn(root) ? op.data : in.data;  // Written on the root alone.
    calls.Add([&] {
      return launch.nccl.Reduce(in.data, to, in.count * reduction.numbers, reduction.type,
                                reduction.op, static_cast<int>(root), launch.comm, launch.stream);
    });
  }
  return calls.End();
}

// The part for or from `peer`; what a rank has none for is empty.
Part PartOf(const std::vector<Part>& parts, std::size_t peer) {
  return peer < parts.size() ? parts[peer] : Part{};
}

// `only` for or from `peer`, nothing for the others.
std::vector<Part> OnlyFor(int peer, const Part& only) {
  std::vector<Part> parts(static_cast<std::size_t>(peer) + 1);
  parts.back() = only;
  return parts;
}

// gather, scatter, all_to_all: from[r] goes to rank r, to[r] comes from it. Both ends of a message
// know its size alike, so what is empty is left out on both. So is what a rank sends itself where
// that is in its place already.
NcclResult Exchange(const NcclLaunch& launch, const Operation& op, const std::vector<Part>& from,
                    const std::vector<Part>& to) {
  GroupOfCalls calls(launch, op);
  for (std::size_t peer = 0; peer < std::max(from.size(), to.size()); ++peer) {
    const Part out = PartOf(from, peer);
    const Part in = PartOf(to, peer);
    if (calls.IsOwn(peer) && out.data == in.data) continue;
    if (out.count > 0) calls.Send(out, static_cast<int>(peer));
    if (in.count > 0) calls.Recv(in, static_cast<int>(peer));
  }
  return calls.End();
}

NcclResult Gather(const NcclLaunch& launch, const Operation& op) {
  // Only the root has outputs.
  return Exchange(launch, op, OnlyFor(op.root, {.data = op.data, .count = op.count}), op.outputs);
}

NcclResult Scatter(const NcclLaunch& launch, const Operation& op) {
  return Exchange(launch, op, op.inputs, OnlyFor(op.root, {.data = op.data, .count = op.count}));
}

NcclResult Reduce(const NcclLaunch& launch, const Operation& op) {
  const NcclReduction reduction = ReductionOf(launch, op);
  const std::size_t count = op.count * reduction.numbers;
  if (op.kind == OpKind::kAllReduce) {
    return launch.nccl.AllReduce(op.data, op.data, count, reduction.type, reduction.op, launch.comm,
                                 launch.stream);
  }
  return launch.nccl.Reduce(op.data, op.data, count, reduction.type, reduction.op, op.root,
                            launch.comm, launch.stream);
}

// An empty message is one too: its recv waits for its send.
NcclResult Message(const NcclLaunch& launch, const Operation& op) {
  const std::size_t bytes = op.count * SizeOf(op.dtype);
  if (op.kind == OpKind::kSend)
    return launch.nccl.Send(op.data, bytes, kBytes, op.peer, launch.comm, launch.stream);
  return launch.nccl.Recv(op.data, bytes, kBytes, op.peer, launch.comm, launch.stream);
}

}  // namespace

Status CheckNcclSupports(const Operation& op, int ranks, const NcclAbilities& abilities) {
  if (op.kind == OpKind::kRecv && op.peer == kAnyPeer)
    return NcclCannot(op, "NCCL receives only from a rank that is named");
  return Reduces(op.kind) ? CheckNcclReduction(op, ranks, abilities) : Status::Ok();
}

NcclResult LaunchNccl(const NcclLaunch& launch, const Operation& op) {
  switch (op.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
      return Reduce(launch, op);
    case OpKind::kBroadcast:
      return launch.nccl.Broadcast(op.data, op.data, op.count * SizeOf(op.dtype), kBytes, op.root,
                                   launch.comm, launch.stream);
    case OpKind::kAllGather:
      return AllGather(launch, op);
    case OpKind::kReduceScatter:
      return ReduceScatter(launch, op);
    case OpKind::kGather:
      return Gather(launch, op);
    case OpKind::kScatter:
      return Scatter(launch, op);
    case OpKind::kAllToAll:
      return Exchange(launch, op, op.inputs, op.outputs);
    case OpKind::kBarrier:
      // Nobody has the sum before all have come. What is summed up is nothing to anybody.
      return launch.nccl.AllReduce(launch.scratch, launch.scratch, NcclScratch::kBytes, kBytes,
                                   NcclReduceOp::kSum, launch.comm, launch.stream);
    case OpKind::kSend:
    case OpKind::kRecv:
      return Message(launch, op);
  }
  RESILIENT_CHECK(false);
}

NcclResult LaunchNcclBatch(const NcclLaunch& launch, const std::vector<const Operation*>& ops) {
  GroupOfCalls calls(launch, *ops.front());
  for (const Operation* op : ops) calls.Add([&] { return Message(launch, *op); });
  return calls.End();
}

}  // namespace resilient
