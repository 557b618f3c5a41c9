#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <resilient/communicator.h>
#include <resilient/operation.h>

namespace resilient::recovery {

// Memory of an operation that is run again. Thread: as its owner.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t size) : size_(size), bytes_(new std::byte[size]) {}
  // A copy of `size` bytes from there.
  Buffer(const void* from, std::size_t size);

  void* data() const { return bytes_.get(); }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_ = 0;
  std::unique_ptr<std::byte[]> bytes_;  // Not initialised: most of it is written at once.
};

// One operation of the user's with what it takes to run it again: a copy of its input, made before
// it starts, because the program may write there once it has ended here, and it may itself write
// there. What is sent to one peer stays where it is: it is run again while it is in flight alone.
// Owner: the replay layer and the completions. Thread: caller-synchronised.
class KeptOperation {
 public:
  // `rank`: of this process in the group.
  KeptOperation(Operation operation, Completion done, int rank);

  const Operation& operation() const { return operation_; }
  // Bytes of the copies.
  std::size_t bytes() const;
  // It ends nowhere before all members have started it.
  bool Synchronises() const;

  // As it was submitted, the input as it was then.
  // REQUIRES: its memory is still this operation's, and nothing of it is in flight.
  Operation Again() const;
  // The same contribution, the result into memory of its own, which is put into `scratch`.
  Operation IntoScratch(std::vector<Buffer>* scratch) const;

  // Its completion, for the one who runs it; null from the second time on.
  Completion TakeDone();
  bool ended() const { return ended_; }
  bool in_flight = false;  // The communicator has it.

  // Of a collective, in this epoch; 0: not known yet. `inner`: at its communicator.
  std::uint64_t number = 0;
  std::uint64_t inner = 0;
  int sender = -1;  // recv: as the communicator tells it.

 private:
  bool HasInput() const;
  bool HasInputs() const;

  Operation operation_;
  Completion done_;
  const int rank_;
  bool ended_ = false;
  Buffer input_;
  std::vector<Buffer> inputs_;
};

}  // namespace resilient::recovery
