#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "runtime/comm/shm_segment.h"
#include "tests/unit/comm/trial.h"

namespace resilient::testing {

// One collective whose every step is to go wrong in turn. The sizes make several rounds of the
// least slots, and both plans of an all_reduce.
struct FaultCase {
  std::string name;
  Call call;
  std::size_t shm_limit = 0;  // 0: TCP.
  bool spans_hosts = false;   // The last rank is on a host of its own.
  bool hierarchical = false;

  int HostOf(int rank) const { return spans_hosts && rank == 2 ? 1 : 0; }
  friend void PrintTo(const FaultCase& one, std::ostream* out) { *out << one.name; }
};

inline constexpr int kFaultRanks = 3;

// The least shared memory that a group of `ranks` takes.
inline std::size_t LeastShmLimit(int ranks) {
  std::size_t limit = 1;
  while (!ShmGeometry::Within(limit, ranks)) limit += 4096;
  return limit;
}

// Waits until another thread has counted up to `least`.
inline bool ComesTo(const std::atomic<int>& counter, int least) {
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (counter.load() < least && std::chrono::steady_clock::now() < give_up)
    std::this_thread::yield();
  return counter.load() >= least;
}

inline std::vector<FaultCase> AllFaultCases() {
  const auto sized = [](const char* name, OpKind kind, std::size_t count) {
    Call call{.kind = kind, .dtype = DataType::kFloat32};
    if (Reduces(kind)) call.reduce = ReduceOp::kSum;
    if (HasRoot(kind)) call.root = 1;
    SetCounts(call, kFaultRanks, count);
    return FaultCase{.name = name, .call = call};
  };
  std::vector<FaultCase> cases;
  const auto add = [&](const char* transport, std::size_t shm_limit, bool spans_hosts) {
    const bool steps = shm_limit > 0 && !spans_hosts;
    for (FaultCase one :
         {sized("AllReduceSmall", OpKind::kAllReduce, 100),
          sized("AllReduceLarge", OpKind::kAllReduce, steps ? 10'000 : 200'000),
          sized("Broadcast", OpKind::kBroadcast, 10'000),
          sized("AllGather", OpKind::kAllGather, 10'000), sized("Barrier", OpKind::kBarrier, 0),
          sized("Reduce", OpKind::kReduce, 10'000), sized("Gather", OpKind::kGather, 10'000),
          sized("Scatter", OpKind::kScatter, 3'000),
          sized("ReduceScatter", OpKind::kReduceScatter, 3'000),
          sized("AllToAll", OpKind::kAllToAll, 3'000)}) {
      one.name += transport;
      one.shm_limit = shm_limit;
      one.spans_hosts = spans_hosts;
      cases.push_back(one);
    }
  };
  add("Tcp", 0, false);
  add("Shm", LeastShmLimit(kFaultRanks), false);
  add("Mixed", 2u << 20, true);  // Rings that no part of a large operation fits into.
  for (FaultCase one : std::vector(cases.end() - 10, cases.end())) {
    if (!Reduces(one.call.kind)) continue;
    one.name += "ByHosts";
    one.hierarchical = true;
    one.call.hosts = {{0, 1}, {2}};
    cases.push_back(one);
  }
  return cases;
}

}  // namespace resilient::testing
