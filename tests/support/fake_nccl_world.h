#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "runtime/comm/nccl_api.h"

namespace resilient::testing {

enum class NcclCallKind : int {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kSend,
  kRecv
};

// One call of the fake's NCCL that communicates. Thread: value type.
struct NcclCall {
  NcclCallKind kind = NcclCallKind::kAllReduce;
  const void* from = nullptr;
  void* to = nullptr;
  std::size_t count = 0;
  NcclDataType type = NcclDataType::kUInt8;
  NcclReduceOp op = NcclReduceOp::kSum;
  int peer = 0;                                 // Or root.
  NcclCommHandle comm = nullptr;                // Null where the call came from another process.
  CudaStreamHandle stream = nullptr;            // As comm.
  std::optional<double> factor = std::nullopt;  // Of an operator that was made; `op` is kSum.
};

// How much of `from` is read and of `to` is written by the rank of `ranks`.
std::size_t BytesGiven(const NcclCall& call, int rank, int ranks);
std::size_t BytesTaken(const NcclCall& call, int rank, int ranks);

// A call whose kernel runs. Owner: shared, as the kernel may go before the others come.
struct PostedCall {
  int rank = 0;
  NcclCall call;
  bool done = false;
  bool broken = false;  // It never will be.
};
using PostedCallPtr = std::shared_ptr<PostedCall>;

// Where the calls of all ranks of one unique id meet: collectives by their number, a send from one
// rank to another and the recv of the same number. Moves and sums up what they have in memory.
// Thread: caller-synchronised. Pure: no I/O.
class NcclWorld {
 public:
  using OnMisuse = std::function<void(const std::string& what)>;

  explicit NcclWorld(OnMisuse on_misuse) : on_misuse_(std::move(on_misuse)) {}

  void Join(int ranks, int rank);
  bool complete() const { return joined_.size() >= static_cast<std::size_t>(ranks_); }
  int ranks() const { return ranks_; }
  // Done at once, or by the call that it waits for. The memory is used until then, unless it is
  // marked as broken before.
  PostedCallPtr Post(int rank, const NcclCall& call);

 private:
  struct Channel {  // From one rank to another; what is in it waits for its counterpart.
    std::deque<PostedCallPtr> sends;
    std::deque<PostedCallPtr> recvs;
  };
  using Meeting = std::map<int, PostedCallPtr>;  // By rank.

  void Match(Channel& channel);
  void Meet(const Meeting& meeting);
  bool AreAlike(const Meeting& meeting);

  const OnMisuse on_misuse_;
  int ranks_ = 0;
  std::set<int> joined_;
  std::map<int, std::uint64_t> collectives_;  // So far, by rank.
  std::map<std::uint64_t, Meeting> meetings_;
  std::map<std::pair<int, int>, Channel> channels_;
};

}  // namespace resilient::testing
