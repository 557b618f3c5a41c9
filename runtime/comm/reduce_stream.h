#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <span>
#include <vector>

#include "runtime/comm/collective.h"

namespace resilient {

// Combines the elements that several ranks give, always in the same order of ranks, while they
// come: through one bounded window a rank. Who is further ahead of the slowest one is read no more:
// memory stays bounded, and what is combined is still in the cache.
// Owner: a collective. Thread: loop-confined.
class ReduceStream {
 public:
  // A run of elements, behind each other in what a rank sends: one message from each rank.
  struct Piece {
    const std::byte* own = nullptr;  // What this rank gives; may be `out`.
    std::byte* out = nullptr;
    std::size_t count = 0;
  };
  struct Plan {
    std::vector<int> ranks;  // In the order in which their elements are combined.
    int own = -1;            // The one of them whose elements are here.
    std::size_t element_bytes = 1;
    std::size_t out_element_bytes = 1;
    std::vector<Piece> pieces;
    std::function<void(std::span<const std::byte* const>, std::size_t count, std::byte* out)>
        combine;
    // `out` of the piece that has this index is final, and all messages that it is made of have
    // come whole: it may be passed on. In order.
    std::function<void(std::size_t)> on_piece;
  };

  // The window of a rank that gives `bytes` in all.
  static std::size_t WindowBytes(std::size_t bytes);

  // REQUIRES: `windows` has these bytes for each of plan.ranks, aligned for every data type.
  ReduceStream(Plan plan, CollectiveHost& host, std::span<std::byte> windows);
  ReduceStream(const ReduceStream&) = delete;
  ReduceStream& operator=(const ReduceStream&) = delete;

  // Where elements from `rank` go. REQUIRES: one of plan.ranks and not the own one.
  PayloadSink* SinkOf(int rank);
  // One more message from `rank` has been received, and what came is what was sent.
  void OnMessage(int rank);
  // `count` more elements of this rank's are there. Nothing is combined before.
  void AddOwn(std::size_t count);

 private:
  // A ring over the bytes [combined_, combined_ + its size) of what one rank sends.
  class Window final : public PayloadSink {
   public:
    Window(ReduceStream& owner, std::span<std::byte> ring) : owner_(owner), ring_(ring) {}
    std::span<std::byte> Space() override;
    void Commit(std::size_t bytes) override;
    std::size_t received() const { return received_; }
    void OnMessage() { ++messages_; }
    std::size_t messages() const { return messages_; }
    const std::byte* At(std::size_t offset) const { return ring_.data() + offset % ring_.size(); }

   private:
    ReduceStream& owner_;
    std::span<std::byte> ring_;
    std::size_t received_ = 0;
    std::size_t messages_ = 0;  // That have come whole.
  };

  Window& WindowOf(int rank);
  // Combines what has come from everyone.
  void Advance();
  bool IsWhole(std::size_t piece) const;
  void CombineUpTo(std::size_t ready);

  const Plan plan_;
  CollectiveHost& host_;
  const std::size_t total_;  // Bytes of a rank.
  const std::size_t ring_bytes_;
  std::size_t own_ready_ = 0;  // Of which these are there.
  std::size_t combined_ = 0;   // And these are done.
  std::size_t piece_ = 0;      // The piece that combined_ is in, and where in it.
  std::size_t piece_done_ = 0;
  std::deque<Window> windows_;  // By index in plan_.ranks; they have addresses.
  std::vector<const std::byte*> inputs_;
};

}  // namespace resilient
