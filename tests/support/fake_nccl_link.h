#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "runtime/net/socket.h"
#include "tests/support/fake_nccl_world.h"

namespace resilient::testing {

// What goes between a rank and the hub of its world, ahead of as many bytes as `payload`. Both ends
// are of one build, so it goes as it is in memory. Thread: value type.
struct NcclMessage {
  enum class Type : int {
    kJoin,      // To the hub: rank, ranks, world, of_hub.
    kCall,      // To the hub: ticket, the call; payload: what it gives.
    kGiveUp,    // To the hub: ticket.
    kLeave,     // To the hub: an end without this is the end of its process.
    kComplete,  // From the hub: all ranks have joined.
    kDone,      // From the hub: ticket; payload: what the call takes.
    kLost,      // From the hub: a process ended.
    kHubLeft    // From the hub: its process has no rank there any more, and may end.
  };
  Type type = Type::kJoin;
  int rank = 0;
  int ranks = 0;
  bool of_hub = false;  // The rank is in the hub's process.
  std::uint64_t world = 0;
  std::uint64_t ticket = 0;
  NcclCallKind kind = NcclCallKind::kAllReduce;
  NcclDataType data_type = NcclDataType::kUInt8;
  NcclReduceOp op = NcclReduceOp::kSum;
  int peer = 0;
  bool multiplies = false;
  double factor = 0;
  std::uint64_t count = 0;
  std::uint64_t payload = 0;
};

// One end of a connection. Writes what the socket takes at once and keeps the rest: nobody waits
// for a peer that stands still. Owner: hub or network. Thread: caller-synchronised.
class NcclLink {
 public:
  explicit NcclLink(FileDescriptor socket) : socket_(std::move(socket)) {}

  // `payload`: message.payload bytes.
  void Send(const NcclMessage& message, const void* payload = nullptr);
  // Writes what can be written. Closes when the peer is gone.
  void Flush();
  // Hands out what has come, `payload` until the return. Closes at the end of the stream.
  void Receive(const std::function<void(const NcclMessage&, const std::byte* payload)>& each);
  void Close();

  bool is_open() const { return socket_.valid(); }
  bool is_flushed() const { return unsent_.empty(); }
  PollEntry entry() const;

 private:
  FileDescriptor socket_;
  std::deque<std::string> unsent_;
  std::size_t sent_ = 0;  // Of the first of them.
  std::string received_;
};

}  // namespace resilient::testing
