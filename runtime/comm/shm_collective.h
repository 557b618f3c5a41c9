#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <resilient/communicator.h>

#include "runtime/comm/shm_board.h"
#include "runtime/comm/wire.h"

namespace resilient {

// One collective of one rank on a board, cut into rounds of one step each: write what the others
// need to the own slot, publish, wait for all, take what is wanted from their slots. The first
// round carries what each rank has entered; all compare it before anybody reads a byte of data.
//
// Owner: the lane that runs it. Thread: one at a time. Nothing in it waits, and Advance does no
// more than half a round, so another thread may take over, or nobody, between two calls.
class ShmCollective {
 public:
  // What MakeShmCollective takes.
  ShmCollective(const Operation& op, std::uint64_t seq, const GroupSpec& spec, ShmBoard& board);
  virtual ~ShmCollective() = default;

  enum class Progress {
    kDone,
    kMoved,    // Call again.
    kWaiting,  // Until all have published the present step.
    kFailed    // failure() says why; all ranks find the same.
  };
  Progress Advance();
  const Status& failure() const { return failure_; }
  bool all_entered() const { return round_ > 0; }

 protected:
  // Rounds after which all data has moved, for the longest part that any rank sends another.
  virtual std::uint64_t RoundsFor(std::size_t longest_part) const = 0;
  // REQUIRES: `slot` is SlotData of the step to come.
  virtual void Write(std::uint64_t round, std::byte* slot) = 0;
  virtual void Read(std::uint64_t round) = 0;

  const Operation& op() const { return op_; }
  int rank() const { return board_.rank(); }
  int size() const { return board_.size(); }
  std::size_t element() const { return element_; }
  std::uint64_t step() const { return board_.step(); }

  // What a rank may write in one round, and where. A multiple of every element's size.
  std::size_t capacity() const { return capacity_; }
  std::byte* SlotData(int rank, std::uint64_t step) const {
    return board_.Slot(rank, step) + data_offset_;
  }
  // The capacity divided among the ranks.
  std::size_t region() const { return region_; }
  std::byte* Region(int rank, std::uint64_t step, int of) const {
    return SlotData(rank, step) + region_ * static_cast<std::size_t>(of);
  }

 private:
  void WriteHead(std::byte* slot) const;
  bool CompareHeads();
  bool ComparePairs();
  std::size_t LongestPart() const;

  const Operation& op_;
  const std::uint64_t seq_;
  const GroupSpec& spec_;
  ShmBoard& board_;
  const std::size_t element_;
  std::size_t data_offset_ = 0;
  std::size_t capacity_ = 0;
  std::size_t region_ = 0;
  std::uint64_t round_ = 0;
  std::uint64_t rounds_ = 1;
  bool published_ = false;
  Status failure_;
};

// REQUIRES: `op` is a valid collective. `op`, `spec` and `board` outlive the result.
std::unique_ptr<ShmCollective> MakeShmCollective(const Operation& op, std::uint64_t seq,
                                                 const GroupSpec& spec, ShmBoard& board);

}  // namespace resilient
