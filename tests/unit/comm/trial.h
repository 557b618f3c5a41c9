#pragma once

#include <cstddef>
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
  // The memory of one rank. What is one piece for all ranks is in `data`.
  struct Memory {
    Bytes data;
    std::vector<Bytes> inputs;
    std::vector<Bytes> outputs;
  };

  // Returns what `rank` gives for each of the ranks.
  std::vector<Bytes> MakeMemory(int rank, Random& random);
  bool HasInputs(int rank) const;
  bool HasOutputs(int rank) const;
  bool DataIsOutput(int rank) const;
  std::vector<const Bytes*> Outputs(int rank) const;

  const Call call_;
  std::vector<Memory> before_;
  std::vector<Memory> now_;
  std::vector<std::vector<Bytes>> expected_;
};

}  // namespace resilient::testing
