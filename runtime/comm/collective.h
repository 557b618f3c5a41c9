#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <resilient/communicator.h>

#include "runtime/comm/message_link.h"
#include "runtime/comm/schedule.h"

namespace resilient {

// Working memory of a group's collectives, kept between them so that its pages stay mapped. Mapped
// for itself: what is given back goes to the system, and what cannot be had is an answer.
// Owner: a group. Thread: loop-confined.
class Scratch {
 public:
  // What Trim keeps: the windows of 256 ranks in rank order, or the partial results of buckets of
  // the usual tens of MiB. To map more anew each time costs little beside what is done with it.
  static constexpr std::size_t kKeptBytes = std::size_t{64} << 20;

  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { Release(); }

  // `bytes`, aligned for every data type, the content undefined; nullopt when the system has not as
  // much. What was got before is gone.
  std::optional<std::span<std::byte>> Get(std::size_t bytes);
  // What was got is no longer used: more than kKeptBytes is given back.
  void Trim() {
    if (size() > kKeptBytes) Release();
  }
  std::size_t size() const { return memory_.size(); }

 private:
  void Release();

  std::span<std::byte> memory_;
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
  // that rank would never hear of the sender otherwise. Messages are numbered below it, and from 0
  // again: they come in order.
  static constexpr std::uint8_t kNotePhase = 255;

  virtual ~Collective() = default;

  // The working memory that it takes.
  virtual std::size_t ScratchBytes() const { return 0; }
  // Queues the first messages. May complete a group of one at once. REQUIRES: `scratch` has
  // ScratchBytes(), is aligned for every data type and outlives this.
  virtual void Start(std::span<std::byte> scratch) = 0;

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
  // Whether this rank hears of `peer` when that one enters the operation.
  virtual bool HearsOf(int peer) const;

 protected:
  Collective(CollectiveHost& host, int rank, int size);

  void Expect(int peer, std::size_t messages);
  void Send(int peer, std::span<const std::byte> payload);
  CollectiveHost& host() { return host_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Of the message from `peer` that has `index`, from 0.
  virtual std::size_t BytesFrom(int peer, std::size_t index) const = 0;
  virtual PayloadSink* SinkFor(int peer, std::size_t index) = 0;
  virtual void OnPart(int /*peer*/, std::size_t /*index*/) {}

 private:
  struct PeerState {
    std::size_t received = 0;  // Messages from it.
    std::size_t expected = 0;  // Messages from it in all.
    std::size_t sent = 0;      // Messages to it, and those of them that are still queued.
    std::size_t unsent = 0;
  };
  CollectiveHost& host_;
  const int rank_;
  const int size_;
  std::vector<PeerState> peers_;
  std::size_t parts_due_ = 0;
  std::size_t sends_left_ = 0;
};

// `levels`: where not null, reductions are hierarchical over these hosts. REQUIRES: `op` is a valid
// collective. `op` and `levels` outlive the result.
std::unique_ptr<Collective> MakeCollective(const Operation& op, int rank, int size,
                                           CollectiveHost& host, const HostLayout* levels);
// Of those that move data as it is, and of those that reduce it.
std::unique_ptr<Collective> MakeExchange(const Operation& op, int rank, int size,
                                         CollectiveHost& host);
std::unique_ptr<Collective> MakeReduction(const Operation& op, int rank, int size,
                                          CollectiveHost& host);

// The reductions in two levels, for groups that span hosts
// (RESILIENT_REDUCTION_ORDER=hierarchical). Inside each host its ranks' elements are combined in
// rank order; these partial results are combined across hosts, in the order of each host's lowest
// rank. So the bits depend on nothing but the values and on which ranks share a host.
//
// Of partial results nothing is lost: floats of 16 and 8 bits stay float32 until the end, where
// they are rounded once, and an average is divided once, at the end (ReduceToPartial).
//
// Every element has a home, the rank that gets its result first, and in each host an owner: inside
// the home's host the home itself, elsewhere one of the host's ranks, shared out evenly. Owners
// take inputs from their host, send the home one partial result, and where all ranks want the
// result, take it from the home and spread it in their host. Of the B bytes of an all_reduce a host
// of m of the n ranks on h hosts sends to other hosts
//   in rank order   2 m B (n - m) / n
//   hierarchical    B (n - m) / n partial results, and m B (h - 1) / n results
// which with n / h ranks on each is 2 (n / h) B (h - 1) / h against 2 B (h - 1) / h. (Partial
// results of floats of less than 32 bits, and of averages of 8 and 16 bits, are wider.)
// REQUIRES: layout.HasLevels(). `layout` outlives the result.
std::unique_ptr<Collective> MakeHierarchicalReduction(const Operation& op, int rank,
                                                      const HostLayout& layout,
                                                      CollectiveHost& host);

}  // namespace resilient
