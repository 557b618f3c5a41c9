#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <resilient/torch.h>

#include "torch_plugin/csrc/snapshot.h"

namespace resilient::plugin {

// Finds replicated values of a State that differ between ranks, as statistics of BatchNorm do, and
// warns of them once: after a loss a rank may go on with the values of another one.
//
// At commits 2 and 3 each rank leaves checksums of its replicated part in the store, and rank 0
// compares those of a commit when it makes the next one: between two commits all ranks take part in
// something, so all have left theirs by then. It reads only what is there. Nothing of it is
// collective, and no rank waits for another. torch_resilient/_replicas.py is the same for Python.
//
// Owner: a State. Thread: the one that uses it.
class ReplicaCheck {
 public:
  using KeyOf = std::function<std::string(std::int64_t commit)>;

  // After commit `number` of `snapshot`. `key_of`: what the keys of a commit begin with. `own`:
  // data of tensors that are also in the per-rank part, which come back as those.
  void AfterCommit(const ProcessGroup& world, const KeyOf& key_of, std::int64_t number,
                   const Snapshot& snapshot, const StateValues& values,
                   const std::set<const void*>& own);
  // What is left in the store.
  void Drop(const ProcessGroup& world);

 private:
  void Compare(const ProcessGroup& world, const std::string& prefix, std::int64_t number);

  std::vector<std::string> left_;  // Keys of this rank.
  bool warned_ = false;
};

}  // namespace resilient::plugin
