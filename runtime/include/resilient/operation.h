#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/clock.h>
#include <resilient/launch_mark.h>

namespace resilient {

enum class OpKind : std::uint8_t {
  kAllReduce = 1,
  kBroadcast = 2,
  kAllGather = 3,
  kBarrier = 4,
  kSend = 5,
  kRecv = 6,
  kReduce = 7,
  kGather = 8,
  kScatter = 9,
  kReduceScatter = 10,
  kAllToAll = 11
};
enum class DataType : std::uint8_t {
  kFloat32 = 1,
  kFloat64 = 2,
  kBFloat16 = 3,
  kInt64 = 4,
  kUInt8 = 5,
  kBool = 6,
  kInt32 = 7,  // DDP's bucket indices and unused-parameter maps.
  kFloat16 = 8,
  kInt8 = 9,
  kInt16 = 10,
  kUInt16 = 11,
  kUInt32 = 12,
  kUInt64 = 13,
  kComplex64 = 14,
  kComplex128 = 15,
  kFloat8E4M3 = 16,  // torch.float8_e4m3fn
  kFloat8E5M2 = 17
};
enum class ReduceOp : std::uint8_t {
  kNone = 0,
  kSum = 1,
  kAvg = 2,
  kMin = 3,
  kMax = 4,
  kProduct = 5,
  kBitAnd = 6,
  kBitOr = 7,
  kBitXor = 8,
  kPremulSum = 9  // The sum of what is left when each input is multiplied by Operation::factor.
};

std::string_view OpKindName(OpKind kind);      // "all_reduce"
std::string_view DataTypeName(DataType type);  // "float32"
std::string_view ReduceOpName(ReduceOp op);    // "sum"; "" for kNone
std::size_t SizeOf(DataType type);             // Bytes an element.
bool IsPointToPoint(OpKind kind);              // send, recv
bool HasRoot(OpKind kind);                     // broadcast, reduce, gather, scatter
bool Reduces(OpKind kind);                     // all_reduce, reduce, reduce_scatter
// Whether every rank gives the same `count`; else each pair of ranks agrees on a count of its own.
bool HasOneCount(OpKind kind);

// Operation::device of an operation on memory of the host.
inline constexpr int kHost = -1;

// Elements of one rank. Thread: value type.
struct Part {
  void* data = nullptr;
  std::size_t count = 0;
};

inline constexpr int kAnyPeer = -1;

// One operation as one rank submits it. Memory is borrowed: it stays valid and untouched by the
// caller until the completion has run with OK, or after a failure until the communicator is quiet:
// what `done` of Submit captures is destroyed only then, and may own it. Buffers are dense and
// contiguous; counts are in elements of `dtype`; n = size(). Counts a rank may differ from rank to
// rank where both ends agree on each.
//   all_reduce      data[count] is input and output. AVG divides the sum by n (integers: truncates)
//   reduce          as all_reduce, but only `root` gets the result; elsewhere data is only read
//   broadcast       data[count] is input on `root`, output elsewhere
//   all_gather      data[count] is the input; outputs[n], in group-rank order
//   gather          data[count] is the input; outputs[n] on `root`
//   scatter         inputs[n] on `root`; data[count] is the output
//   reduce_scatter  inputs[n]; data[count] is the output: inputs[rank] of all ranks, reduced
//   all_to_all      inputs[n], outputs[n]
//   barrier         no memory
//   send, recv      data[count] to or from group rank `peer` with `tag`; matched by (peer, tag) in
//                   order of submission. A recv may take kAnyPeer and is told who it was
// A rank's own part of an output may be the memory of its own input; no other memory overlaps.
// `one_block`: of all_gather the outputs, of reduce_scatter the inputs are equal parts of one
// block of memory, one behind the other in group-rank order. The same on all ranks: a transport may
// have another way for it, and ranks that go different ways never meet. The CPU's has not.
// Thread: value type.
struct Operation {
  OpKind kind = OpKind::kBarrier;
  DataType dtype = DataType::kUInt8;
  ReduceOp reduce = ReduceOp::kNone;
  int root = -1;  // Group rank.
  int peer = -1;  // Group rank.
  std::uint32_t tag = 0;
  double factor = 1.0;  // Of kPremulSum; the same on all ranks.
  void* data = nullptr;
  std::size_t count = 0;
  std::vector<Part> inputs;
  std::vector<Part> outputs;
  bool one_block = false;
  int* sender = nullptr;  // recv: where the sender's group rank is written. May be null.
  int device =
      kHost;  // CUDA's number of the device that has the memory. A barrier's: where it runs.
  // Of `device`, the caller's: the operation begins when what is in it by Submit has ended.
  ExecutionStream stream = nullptr;
  // Of an operation on a device; may be null. Its end is told before the completion runs.
  std::shared_ptr<LaunchMark> mark;
  // Its caller waits for its end on the host. While `stream` is captured in a graph that cannot be.
  bool ends_on_host = false;
  // How long it may take; zero: as long as its peers live. What takes longer fails with the whole
  // communicator, here and on all other ranks. They may differ from rank to rank.
  Duration timeout = Duration::zero();  // From Submit to its end: kCommFailed.
  Duration stall = Duration::zero();    // While nothing moves though all have entered it:
                                        // kCommStalled.
  std::string call_site;  // "train.py:301 step", shown on both sides of a mismatch; may be empty.
  // False: no program waits for its end, so a rank may leave before the others have ended it, and
  // it is never reported as one that waits.
  bool binding = true;
};

// What a message about `op` needs: none of its memory, lists and call site, which a copy would copy
// for nothing.
Operation OutlineOf(const Operation& op);

// What a communicator of `group` for memory of `device` is called in CommunicatorEvents, Session
// and texts: "world/cuda"; `group` itself for kHost. The two count their operations apart.
std::string CommunicatorName(const std::string& group, int device);

// "all_reduce(float32[1024], sum)"; the form used in every message.
std::string Describe(const Operation& op);

}  // namespace resilient
