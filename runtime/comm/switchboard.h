#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/log_limit.h"
#include "runtime/comm/wire.h"
#include "runtime/net/socket.h"
#include "runtime/net/unproven.h"

namespace resilient {

// What becomes of a connection whose hello has been read.
enum class Routing {
  kTaken,  // The socket has been moved away.
  kPark,   // Nobody knows its group yet.
  kRefuse  // It is closed.
};

// Knows the groups. Called on the loop.
class HelloRouter {
 public:
  virtual ~HelloRouter() = default;
  virtual Routing Route(const Hello& hello, FileDescriptor& socket) = 0;
};

// The incoming side: accepts connections, reads their hello, hands them to their group, and keeps
// those that came before their group was made here: parked ones. What strangers open costs little.
// A hello has a deadline; of parked connections whose peer has gone only a few are kept, for their
// groups to learn of it, beside those from which a goodbye is still to be read; all are bounded,
// and one too many costs the address that has most of them its oldest. The peer of one that gives
// way connects again. While the process is out of descriptors nothing is accepted for kAcceptPause
// at a time.
//
// Owner: the fabric. Thread: loop-confined.
class Switchboard {
 public:
  // Each, or a quarter of the limit of open files; of the last a sixteenth.
  static constexpr std::size_t kMaxGreeting = 1024;  // Connections without a whole hello.
  static constexpr std::size_t kMaxParked = 4096;
  static constexpr std::size_t kMaxEnded = 64;  // Parked ones that have ended without a word.
  static constexpr Duration kHelloWithin = std::chrono::seconds(10);
  static constexpr Duration kAcceptPause = std::chrono::milliseconds(100);

  Switchboard(FileDescriptor listener, HelloRouter& router);

  // Appends what to wait for; OnReady takes the same entries back, in the same order.
  void AddInterest(Instant now, std::vector<PollEntry>& entries);
  void OnReady(Instant now, const PollEntry* entries);
  void OnTime(Instant now);
  Instant NextTime() const;
  // Offers the parked connections again: groups were made, or newer generations are known.
  void Reroute();

  std::size_t greeting() const { return greeting_.size(); }
  std::size_t parked() const { return parked_.size() + ended_.size(); }

 private:
  using Id = UnprovenConnections::Id;

  struct Caller {
    FileDescriptor socket;
    std::string address;
    Instant accepted;
    std::string bytes;
    Hello hello = {};
    bool gone = false;  // The peer of a parked one: nothing comes but what is there to be read.
  };

  void Accept(Instant now);
  // Reads on in one that is greeting: it stays, is handed over, parked or closed.
  void ReadHello(Id id, Instant now);
  // False when there is no more to read now, or never will be: then the caller is gone.
  bool ReadBytes(Id id, Caller& caller, Instant now);
  void Park(Id id);
  // Of a parked one: its peer has gone.
  void OnPeerGone(Id id);
  void Close(Id id);
  void Complain(Instant now, std::string_view text);

  HelloRouter& router_;
  FileDescriptor listener_;
  const std::size_t max_greeting_;
  const std::size_t max_parked_;
  const std::size_t max_ended_;
  Id next_ = 1;
  std::map<Id, Caller> callers_;  // Each is in one of these:
  UnprovenConnections greeting_;
  UnprovenConnections parked_;
  UnprovenConnections ended_;
  std::vector<Id> polled_;               // Of the last AddInterest.
  std::optional<Instant> paused_until_;  // The process is out of descriptors.
  LogLimit complaints_;
};

}  // namespace resilient
