#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <resilient/clock.h>

#include "store/core/server_core.h"
#include "store/core/storage.h"

namespace resilient::store::fuzz {

inline constexpr Duration kTtl = std::chrono::seconds(1);
inline constexpr Duration kMemory = std::chrono::seconds(5);
inline constexpr Duration kPatience =
    std::chrono::seconds(4);  // What a script may ask to wait for.
inline constexpr char kCounter[] = "counter";

// Says what is broken and aborts, unless it holds.
void Require(bool holds, const std::string& what);

// The input as numbers; zeros when it is used up. Thread: caller-synchronised.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}
  bool Done() const { return at_ == end_; }
  std::uint8_t Next() { return Done() ? std::uint8_t{0} : *at_++; }
  std::uint64_t Below(std::uint64_t end) { return Next() % end; }
  std::string Text(std::size_t size);

 private:
  const std::uint8_t* at_;
  const std::uint8_t* const end_;
};

// A script of what clients, the network, time and crashes do to one durable ServerCore, and what
// must hold whatever they do:
// - it speaks only to connections that it has, and answers each request at most once each time that
//   it was asked;
// - a number of a session is answered alike each time, or with OUTCOME_UNKNOWN once acknowledged;
// an
//   add is applied once;
// - revisions, generations and epochs only grow; a generation has one view;
// - what the steps wrote is what a new store needs, and a store made of it is the same one;
// - nobody is lost for silence before his lease ended;
// - a wait that is given up when its deadline has passed is answered at once;
// - once all are gone, no lease, wait or session is left behind.
// A breach aborts. Owner: the fuzz target. Thread: caller-synchronised.
class Script {
 public:
  explicit Script(Bytes bytes);
  void Run();

 private:
  static constexpr std::size_t kSlots = 6;
  // Of a message of the core: all that its limits allow in so small worlds. A long text is longer.
  static constexpr std::size_t kMessageBytesMax = 1u << 18;
  static constexpr std::size_t kLongText = kMessageBytesMax + 1;
  using LineName = std::tuple<std::string, std::string, Role>;  // Job, session, role.

  // What a client's line remembers; outlives connections and restarts.
  struct Line {
    std::uint64_t next = 1;
    std::map<std::uint64_t, Request> sent;         // By seq, as it was sent first.
    std::map<std::uint64_t, std::string> answers;  // Encoded: of what must be answered alike.
    std::uint64_t acknowledged = 0;                // The highest that was, honestly or not.
    bool confused = false;  // Something else was sent under a number: answers may differ.
  };
  // One connection, seen from the client.
  struct Peer {
    ConnectionId id = 0;
    bool greeted = false;
    Hello hello;
    Line* line = nullptr;                    // None of admins, and before Hello.
    std::map<std::uint64_t, int> due;        // Answers by seq that may still come.
    std::map<std::uint64_t, Instant> waits;  // Asked and not answered, by seq: until when.
  };

  void Step();
  // The steps.
  void Connect(Peer& peer);
  void SayHello(Peer& peer);
  void AskKeys(Peer& peer);
  void AskMembership(Peer& peer);
  void AskAdmin(Peer& peer);
  void Repeat(Peer& peer);
  void Cut(Peer& peer);
  void PassTime();
  void Restart();
  void ExitProcess();
  void SendRaw(Peer& peer);

  Peer& AnyPeer() { return peers_[bytes_.Below(kSlots)]; }
  std::string AnyKey();
  std::vector<std::string> Keys();
  Op KeyOp(bool* counted);
  Op MembershipOp(const Peer& peer);
  static bool IsSilent(const Op& op);  // It has no answer.
  std::string Words();
  WaitingReport WaitingOf(std::uint64_t generation);
  // The next number mostly.
  void Ask(Peer& peer, Op op);
  void Send(Peer& peer, const Request& request);
  void GiveUp(Peer& peer, std::uint64_t seq);
  // `unread`: at each tick all have sent what was not handed in.
  void Advance(Duration duration, Duration tick, bool drained, bool unread = false);

  // The peer has sent a frame.
  void Hear(const Peer& peer);
  void Start();
  void Take(Effects effects);
  void Keep(const std::vector<Write>& writes);
  void TakeReply(Peer& peer, const Reply& reply);
  void TakeAnswer(Peer& peer, const Reply& reply);
  void TakeEvent(Peer& peer, const Event& event);
  void TakeLog(const LogRecord& record);
  Peer* FindPeer(ConnectionId id);
  void CheckRows();
  void CheckEnd();
  std::uint64_t StatusNumber(const char* name) const;

  Bytes bytes_;
  CoreOptions options_;
  Instant now_{std::chrono::hours(1)};
  Instant started_{};
  std::unique_ptr<ServerCore> core_;
  Rows rows_;
  std::uint64_t steps_ = 0;
  ConnectionId last_connection_ = 0;
  std::vector<Peer> peers_{kSlots};
  std::map<LineName, Line> lines_;

  std::uint64_t epoch_ = 0;
  std::uint64_t revision_ = 0;
  std::map<std::string, std::int64_t> adds_;  // Asked for, by job.
  bool counters_clean_ = true;                // Nothing else was done to the counters.
  std::map<std::string, View> views_;         // The last one, by job.
  std::map<std::pair<std::string, std::uint64_t>, std::string> secrets_;  // By job and generation.
  // By job and incarnation, then by session: the last frame on a control connection.
  std::map<std::pair<std::string, std::string>, std::map<std::string, Instant>> heard_;
};

}  // namespace resilient::store::fuzz
