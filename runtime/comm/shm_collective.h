#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <resilient/communicator.h>

#include "runtime/comm/shm_board.h"
#include "runtime/comm/wire.h"

namespace resilient {

// One collective of one rank on a board, cut into rounds of one step each: write what the others
// need to the own slot, publish, wait for all, take what is wanted from their slots. The first
// round carries what each rank has entered; all compare it before anybody reads a byte of data.
// A rank that has checksums puts one beside each piece that it writes; who reads the piece follows.
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
    kFailed    // failure() says why: all ranks find the same, or this one has read damaged data.
  };
  Progress Advance();
  const Status& failure() const { return failure_; }
  bool all_entered() const { return round_ > 0; }

 protected:
  // Rounds after which all data has moved, for the longest part that any rank sends another.
  virtual std::uint64_t RoundsFor(std::size_t longest_part) const = 0;
  // To the own slot of the step to come.
  virtual void Write(std::uint64_t round) = 0;
  virtual void Read(std::uint64_t round) = 0;

  const Operation& op() const { return op_; }
  int rank() const { return board_.rank(); }
  int size() const { return board_.size(); }
  std::size_t element() const { return element_; }
  std::uint64_t step() const { return board_.step(); }

  // What a rank may write in one round, to region 0 alone; a multiple of every element's size. Or
  // divided among the ranks, to a region for each.
  std::size_t capacity() const { return capacity_; }
  std::size_t region() const { return region_; }
  // Copies `bytes` to a region of the own slot of `step`.
  void Put(std::uint64_t step, int region, const std::byte* from, std::size_t bytes);
  // What `rank` has put to a region of its slot of `step`. Damaged: failure() is set.
  // REQUIRES: `bytes` as it was put.
  const std::byte* Get(int rank, std::uint64_t step, int region, std::size_t bytes);

 private:
  void WriteHead(std::byte* slot) const;
  bool CompareHeads();
  bool ComparePairs();
  std::size_t LongestPart() const;
  std::byte* Region(int rank, std::uint64_t step, int of) const {
    return board_.Slot(rank, step) + data_offset_ + region_ * static_cast<std::size_t>(of);
  }
  // The checksum of a region.
  std::uint64_t& SumOf(int rank, std::uint64_t step, int region) const {
    return reinterpret_cast<std::uint64_t*>(board_.Slot(rank, step) + sums_offset_)[region];
  }
  void OnDamage(int rank, std::size_t bytes);

  const Operation& op_;
  const std::uint64_t seq_;
  const GroupSpec& spec_;
  ShmBoard& board_;
  const std::size_t element_;
  std::size_t sums_offset_ = 0;
  std::size_t data_offset_ = 0;
  std::size_t capacity_ = 0;
  std::size_t region_ = 0;
  std::uint64_t round_ = 0;
  std::uint64_t rounds_ = 1;
  bool published_ = false;
  std::vector<std::string> call_sites_;  // By rank, where one has checksums.
  Status failure_;
};

// REQUIRES: `op` is a valid collective. `op`, `spec` and `board` outlive the result.
std::unique_ptr<ShmCollective> MakeShmCollective(const Operation& op, std::uint64_t seq,
                                                 const GroupSpec& spec, ShmBoard& board);

}  // namespace resilient
