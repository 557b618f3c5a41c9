#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <resilient/operation.h>

#include "runtime/base/random.h"
#include "tests/unit/comm/serial_reference.h"

namespace resilient::testing {

// Counts of `call.kind` for a group of `size`, none above `limit`, some of them zero.
void SetRandomCounts(Call& call, int size, std::size_t limit, Random& random);
// The same count everywhere.
void SetCounts(Call& call, int size, std::size_t count);
// Any collective that a communicator accepts.
Call RandomCall(int size, std::size_t limit, Random& random);

// One collective on all ranks with its memory: random inputs, and what must come out. Thread:
// caller-synchronised; after construction the ranks may use theirs at the same time. Lifetime:
// outlives the operations that it gave.
class Trial {
 public:
  Trial(const Call& call, Random& random);
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  const Call& call() const { return call_; }
  // What `rank` submits.
  Operation At(int rank);
  // After it: "" when the outputs are right and all other memory is as it was, else what is wrong.
  std::string WhatIsWrong(int rank) const;
  // After a failure that this rank has seen: "" when what must only be read was only read.
  std::string WhatWasWritten(int rank) const;

 private:
  // What a rank has for each of the ranks: pieces of their own, where what is written beyond the
  // end of one is found, or one block.
  class Pieces {
   public:
    void Add(const Bytes& piece, bool to_block);
    std::size_t size() const { return places_.size(); }
    std::span<std::byte> At(std::size_t piece);
    std::span<const std::byte> At(std::size_t piece) const;

   private:
    struct Place {
      std::size_t in;  // memory_
      std::size_t offset;
      std::size_t size;
    };
    std::vector<Bytes> memory_;
    std::vector<Place> places_;
  };
  // The memory of one rank. What is one piece for all ranks is in `data`.
  struct Memory {
    Bytes data;
    Pieces inputs;
    Pieces outputs;
  };

  // Returns what `rank` gives for each of the ranks.
  std::vector<Bytes> MakeMemory(int rank, Random& random);
  bool HasInputs(int rank) const;
  bool HasOutputs(int rank) const;
  bool DataIsOutput(int rank) const;
  std::vector<std::span<const std::byte>> Outputs(int rank) const;

  const Call call_;
  std::vector<Memory> before_;
  std::vector<Memory> now_;
  std::vector<std::vector<Bytes>> expected_;
};

}  // namespace resilient::testing
