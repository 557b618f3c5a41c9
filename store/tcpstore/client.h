#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/clock.h>
#include <resilient/status.h>

#include "store/core/server_core.h"
#include "store/tcpstore/query.h"

namespace resilient::store::tcpstore {

// The job whose keys all TCPStore clients of a store share; the protocol names none.
// `resilient-store keys --job tcpstore` lists them.
inline constexpr char kJob[] = "tcpstore";

// Of one answer (MULTI_GET, LIST_KEYS).
inline constexpr std::size_t kAnswerBytesMax = kQueryBytesMax;

// One step of the core: what is asked of it, when, and what follows. Thread: value type on the
// stack of a step.
struct Step {
  ServerCore& core;
  Instant now;
  Effects& effects;
};

// What the shell does for a client: bytes for its connection, as a reply without a number.
inline bool IsBytes(const Reply& reply) { return reply.seq == 0; }

// A client of torch's TCPStore, as a translator between its protocol and the core: a query becomes
// requests of an admin's session of the job "tcpstore", which leaves nothing behind when it ends,
// and their replies become the answer. Differences from torch's server are in docs/operations.md.
//
// Answers come in the order of the queries. A wait is answered when it ends: the shell hands each
// reply of the core to it (OnWaitEnded). A client waits for one thing at a time: another wait takes
// the place of the one before.
//
// A wait for one key may be the first half of a blocking queue_pop. So an item that is pushed wakes
// one such client, the one that has waited longest; when that asks for something else, or its
// connection ends, the next one has its turn. Owner: Connection. Thread: caller-synchronised. Pure.
class Client {
 public:
  explicit Client(ConnectionId connection) : connection_(connection) {}

  // As QueryParser.
  Status Feed(std::string_view bytes) { return parser_.Feed(bytes); }
  bool HasQuery() const { return parser_.HasQuery(); }
  // Bytes kept of a query that is not whole yet.
  std::size_t PartialBytes() const { return parser_.PartialBytes(); }
  const Status& status() const { return parser_.status(); }

  // Answers the next query; what is to be sent is in the effects. Not OK: it cannot be answered,
  // and the protocol has no errors, so the connection has to end; the text continues "the client
  // ...". REQUIRES: HasQuery().
  Status Answer(Step step);
  // A reply of the core that came with somebody else's step: the bytes that it makes, may be none.
  // Not OK as Answer.
  Result<std::string> OnWaitEnded(const Reply& reply, Step step);
  // To be asked in its name once its connection has ended. nullopt: nothing.
  std::optional<Request> LastRequest();

 private:
  struct Wait {
    std::uint64_t seq = 0;  // Of the request that waits.
    std::vector<std::string> keys;
    std::size_t had = 0;    // So many of them have been there.
    std::size_t asked = 0;  // So many behind these are waited for now.
    std::uint64_t scope = 0;
  };

  // The reply to a request; nullopt: it waits.
  std::optional<Reply> Ask(Op op, Step step, std::uint64_t scope = 0);
  std::optional<Reply> TakeReply(std::uint64_t seq, std::size_t begin, Effects& effects) const;
  // Likewise of a request that never waits.
  Reply Tell(Op op, Step step, std::uint64_t scope = 0);
  Status Execute(Query& query, Step step, std::string& answer);
  Status Greet(Step step);
  Status Set(Query& query, Step step);
  Status CompareSet(Query& query, Step step, std::string& answer);
  // GET and MULTI_GET.
  Status Get(const Query& query, Step step, std::string& answer);
  Status GetEach(const std::vector<std::string>& keys, QueryType type, Step step,
                 std::string& answer);
  static Status AppendValue(std::string_view value, QueryType type, std::string& answer);
  Status Add(const Query& query, Step step, std::string& answer);
  Status Check(const Query& query, Step step, std::string& answer);
  Status MultiSet(const Query& query, Step step);
  Status Pop(const Query& query, Step step, std::string& answer);
  Status ListKeys(Step step, std::string& answer);
  Status ArriveAtBarrier(const Query& query, Step step, std::string& answer);
  Status AnswerNumber(const Reply& reply, std::string& answer);
  Status BeginWait(std::vector<std::string> keys, std::uint64_t scope, Step step,
                   std::string& answer);
  Status GoOnWaiting(Step step, std::string& answer);
  void CancelWait(Step step);
  // The turn goes on to the next one unless the query takes the item.
  void UseTurn(const Query& query, Step step);
  static Request PassOn(const std::string& key);

  const ConnectionId connection_;
  QueryParser parser_;
  std::uint64_t last_seq_ = 0;
  std::optional<Wait> wait_;
  std::optional<std::string> turn_;  // The key of a wait that has ended, maybe by an item.
};

}  // namespace resilient::store::tcpstore
