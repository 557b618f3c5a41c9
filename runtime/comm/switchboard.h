#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "runtime/comm/wire.h"
#include "runtime/net/socket.h"

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
// those that came before their group was made here. Bounded by count: the oldest gives way, its
// peer connects again. Owner: the fabric. Thread: loop-confined.
class Switchboard {
 public:
  static constexpr std::size_t kMaxGreeting = 1024;  // Connections without a whole hello.
  static constexpr std::size_t kMaxParked = 4096;

  Switchboard(FileDescriptor listener, HelloRouter& router);

  // Appends what to wait for; OnReady takes the same entries back, in the same order.
  void AddInterest(std::vector<PollEntry>& entries) const;
  void OnReady(const PollEntry* entries);
  // Offers the parked connections again: groups were made, or newer generations are known.
  void Reroute();

  std::size_t parked() const { return parked_.size(); }

 private:
  struct Caller {
    FileDescriptor socket;
    std::string bytes;
    Hello hello;
  };

  void Accept();
  // True when the caller is done with here: handed over, parked or closed.
  bool ReadHello(Caller& caller);
  void Park(Caller& caller);

  HelloRouter& router_;
  FileDescriptor listener_;
  std::deque<Caller> greeting_;
  std::deque<Caller> parked_;
};

}  // namespace resilient
