#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <resilient/communicator.h>

#include "runtime/comm/message_link.h"

namespace resilient {

// Working memory of a group's collectives, kept between them so that its pages stay mapped.
// Owner: a group. Thread: loop-confined.
class Scratch {
 public:
  // At least `bytes`, aligned for every data type; the content is undefined.
  std::span<std::byte> Get(std::size_t bytes);

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::size_t size_ = 0;
};

// What a collective asks of its group. Called on the loop.
class CollectiveHost {
 public:
  virtual ~CollectiveHost() = default;
  // Queues one message of the running collective; Collective::OnSent(peer) follows later.
  virtual void SendPart(int peer, std::uint8_t phase, std::span<const std::byte> payload) = 0;
  // Queues a message without payload that nobody waits for.
  virtual void SendNote(int peer) = 0;
  // The sink that `peer` fills has room again.
  virtual void SpaceFreed(int peer) = 0;
};

// One collective of one rank as a state machine: it says what to send, what must come from whom,
// and where that goes. Headers have been compared before anything reaches it. Owner: a group.
// Thread: loop-confined.
class Collective {
 public:
  // The phase of a note: a header that only says which operation its sender has entered. Sent where
  // that rank would never hear of the sender otherwise.
  static constexpr std::uint8_t kNotePhase = 255;

  virtual ~Collective() = default;

  // Queues the first messages. May complete a group of one at once.
  virtual void Start() = 0;

  // The message that must come next from `peer`; nullopt when nothing more is due.
  struct Due {
    std::uint8_t phase = 0;
    std::size_t bytes = 0;
  };
  std::optional<Due> NextFrom(int peer) const;
  // REQUIRES: NextFrom(peer). The message begins: where it goes (null: it has no payload).
  PayloadSink* Accept(int peer);
  // The message that Accept began is complete.
  void OnMessage(int peer);
  void OnSent(int peer);

  bool Done() const { return parts_due_ == 0 && sends_left_ == 0; }
  // Whether this rank still waits for `peer`, to receive or to be read.
  bool Needs(int peer) const;

 protected:
  Collective(CollectiveHost& host, int rank, int size);

  void Expect(int peer, std::uint8_t messages);
  void Send(int peer, std::uint8_t phase, std::span<const std::byte> payload);
  CollectiveHost& host() { return host_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  virtual std::size_t BytesFrom(int peer, std::uint8_t phase) const = 0;
  virtual PayloadSink* SinkFor(int peer, std::uint8_t phase) = 0;
  virtual void OnPart(int /*peer*/, std::uint8_t /*phase*/) {}

 private:
  struct PeerState {
    std::uint8_t phase = 0;     // Of the next message from it.
    std::uint8_t expected = 0;  // Messages in all.
    std::uint8_t unsent = 0;    // Messages to it that are still queued.
  };
  CollectiveHost& host_;
  const int rank_;
  const int size_;
  std::vector<PeerState> peers_;
  int parts_due_ = 0;
  int sends_left_ = 0;
};

// REQUIRES: `op` is a valid collective. `op` and `scratch` outlive the result.
std::unique_ptr<Collective> MakeCollective(const Operation& op, int rank, int size,
                                           CollectiveHost& host, Scratch& scratch);
// Of those that move data as it is, and of those that reduce it.
std::unique_ptr<Collective> MakeExchange(const Operation& op, int rank, int size,
                                         CollectiveHost& host);
std::unique_ptr<Collective> MakeReduction(const Operation& op, int rank, int size,
                                          CollectiveHost& host, Scratch& scratch);

}  // namespace resilient
