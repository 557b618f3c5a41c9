#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/base/random.h"
#include "runtime/net/socket.h"
#include "store/core/messages.h"

namespace resilient::store {

// Clients that do their worst to a store, each act chosen by a seed: any message, with numbers,
// ranks, sizes and texts up to the limits and beyond, by several connections and sessions of few
// jobs of theirs; parts of frames, bytes that are no frame, ends at any moment, and answers that
// nobody reads. What they hear of worlds and generations they use. Sockets do not block: what the
// kernel does not take is not sent, and so a frame ends anywhere. Owner: a test. Thread:
// caller-synchronised.
class HostilePeers {
 public:
  explicit HostilePeers(std::uint64_t seed) : random_(seed) {}

  // Of a store that has begun again, maybe; nobody is connected.
  void Meet(const HostPort& store);
  // One act of one of them.
  void Act();
  std::uint64_t acts() const { return acts_; }

 private:
  static constexpr std::size_t kPeers = 48;
  struct Peer {
    FileDescriptor socket;
    std::uint64_t next = 1;    // The number of its next request, mostly.
    std::size_t withheld = 0;  // Bytes of a request that it has begun and will not end.
  };

  // Messages. Each number may be any, and is mostly one that means something.
  Hello AnyHello();
  Request AnyRequest(Peer& peer);
  Op AnyOp();
  Op AnyKeyOp(std::uint64_t which);
  Op AnyMembershipOp(std::uint64_t which);
  JoinRequest AnyJoin();
  Report AnyReport();
  WaitingReport AnyWaiting();
  ProcessIdentity AnyProcess();
  std::string AnyKey();
  std::vector<std::string> AnyKeys();
  std::string AnyValue();
  std::string AnyText();
  std::int64_t AnyNumber();
  int AnyRank() { return static_cast<int>(AnyNumber()); }
  bool Rarely(std::uint64_t one_in) { return random_.Below(one_in) == 0; }

  void Connect(Peer& peer, Hello hello);
  // How much of it has gone.
  std::size_t Send(Peer& peer, const std::string& bytes);
  void ConnectAlone(Peer& peer);
  void Withhold(Peer& peer);
  void AskForLarge(Peer& peer);
  void SendOn(Peer& peer);
  void Read(Peer& peer);

  // What they do most, in one life of the store.
  enum class Favourite : std::uint8_t { kNone, kWithhold, kLargeAnswers };
  static constexpr unsigned kFavourites = 3;

  Random random_;
  Favourite favourite_ = Favourite::kNone;
  HostPort store_;
  std::array<Peer, kPeers> peers_;
  std::uint64_t acts_ = 0;
  std::uint64_t generation_ = 0;  // The latest that any of them has heard of,
  std::uint64_t round_ = 0;       // and its world's.
};

}  // namespace resilient::store
