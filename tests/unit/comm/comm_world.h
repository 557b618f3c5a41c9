#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <resilient/transports.h>

#include "runtime/base/random.h"
#include "runtime/comm/eager_limit.h"
#include "runtime/comm/endpoint.h"
#include "runtime/comm/wire.h"
#include "tests/support/sanitizers.h"

namespace resilient::testing {

inline constexpr char kSecret[] = "sesame";  // Of each view of a World.

// The bytes of a hello, different each time.
inline std::string SayHello(Hello hello, std::string_view secret) {
  hello.nonce = RandomBytes(kHelloNonceBytes);
  return EncodeHello(hello, secret);
}

// A bound for what must happen; far above what it takes, as sanitizers and a busy machine are slow.
inline constexpr std::chrono::seconds kBound(30);

inline bool Eventually(const std::function<bool()>& condition) {
  const auto until = std::chrono::steady_clock::now() + kBound;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::yield();
  }
  return true;
}

// Collects what a communicator tells. Thread: thread-safe.
class EventLog final : public CommunicatorEvents {
 public:
  void OnConnected(const std::string& group, std::uint64_t generation) override {
    Add([&] { connected[{group, generation}]++; });
  }
  void OnLinkLost(const std::string& group, std::uint64_t, int global_rank,
                  const Status& why) override {
    Add([&] {
      lost[global_rank]++;
      lost_in[{group, global_rank}]++;
      last_lost = why;
    });
  }
  void OnUnreached(const std::string&, std::uint64_t, int global_rank, const Status& why) override {
    Add([&] {
      unreached[global_rank]++;
      last_unreached = why;
    });
  }
  void OnMismatch(const std::string&, std::uint64_t, const Status& mismatch) override {
    Add([&] { mismatches.push_back(mismatch); });
  }
  void OnStalled(const std::string&, std::uint64_t, const Status& why) override {
    Add([&] { stalls.push_back(why); });
  }
  void OnWaiting(const std::string& group, std::uint64_t,
                 std::vector<WaitingOperation> told) override {
    Add([&] { waiting[group].push_back(std::move(told)); });
  }
  void OnProgress(std::uint64_t, GroupProgress told) override {
    Add([&] { progress[told.group].push_back(told); });
  }

  bool WaitFor(const std::function<bool(EventLog&)>& condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kBound, [&] { return condition(*this); });
  }
  std::size_t MismatchCount() {
    std::lock_guard lock(mutex_);
    return mismatches.size();
  }
  std::size_t WaitingCount(const std::string& group) {
    std::lock_guard lock(mutex_);
    return waiting[group].size();
  }
  int LostCount(int rank) {
    std::lock_guard lock(mutex_);
    return lost[rank];
  }
  int LostCountIn(const std::string& group, int rank) {
    std::lock_guard lock(mutex_);
    return lost_in[{group, rank}];
  }

  // Read them in a WaitFor condition.
  std::map<std::pair<std::string, std::uint64_t>, int> connected;
  std::map<int, int> lost;
  std::map<std::pair<std::string, int>, int> lost_in;
  Status last_lost;
  std::map<int, int> unreached;
  Status last_unreached;
  std::vector<Status> mismatches;
  std::vector<Status> stalls;
  std::map<std::string, std::vector<std::vector<WaitingOperation>>> waiting;  // By group.
  std::map<std::string, std::vector<GroupProgress>> progress;                 // By group.

 private:
  template <typename Change>
  void Add(Change change) {
    std::lock_guard lock(mutex_);
    change();
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
};

// One submitted operation. Copies share its outcome.
class Pending {
 public:
  // Fails the test when the operation is not accepted.
  static Pending Of(Communicator& communicator, Operation op) {
    Pending pending = Try(communicator, std::move(op));
    EXPECT_NE(pending.seq, 0u) << pending.Wait().ToString();
    return pending;
  }
  // A refusal is the outcome.
  static Pending Try(Communicator& communicator, Operation op) {
    Pending pending;
    Result<std::uint64_t> seq = communicator.Submit(std::move(op), pending.Expect());
    if (seq.ok()) {
      pending.seq = *seq;
    } else {
      pending.state_->status = seq.status();
    }
    return pending;
  }

  // Fails the test when they are not accepted.
  static std::vector<Pending> OfBatch(Communicator& communicator, std::vector<Operation> ops) {
    std::vector<Pending> pending = TryBatch(communicator, std::move(ops));
    for (const Pending& one : pending) EXPECT_NE(one.seq, 0u) << one.Wait().ToString();
    return pending;
  }
  // A refusal is the outcome of each.
  static std::vector<Pending> TryBatch(Communicator& communicator, std::vector<Operation> ops) {
    std::vector<Pending> pending(ops.size());
    std::vector<Communicator::Submission> batch;
    for (std::size_t i = 0; i < ops.size(); ++i)
      batch.push_back({.op = std::move(ops[i]), .done = pending[i].Expect()});
    const auto seqs = communicator.SubmitBatch(std::move(batch));
    for (std::size_t i = 0; i < pending.size(); ++i) {
      if (seqs.ok()) {
        pending[i].seq = seqs->at(i);
      } else {
        pending[i].state_->status = seqs.status();
      }
    }
    return pending;
  }

  // The outcome; a test failure and kInternal when it does not come within the bound.
  Status Wait() const {
    std::unique_lock lock(state_->mutex);
    if (!state_->changed.wait_for(lock, kBound, [&] { return state_->status.has_value(); })) {
      ADD_FAILURE() << "an operation did not complete";
      return Status(StatusCode::kInternal, "did not complete");
    }
    return *state_->status;
  }
  bool IsDone() const {
    std::lock_guard lock(state_->mutex);
    return state_->status.has_value();
  }

  std::uint64_t seq = 0;

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<Status> status;
  };
  Completion Expect() const {
    return [state = state_](const Status& status) {
      std::lock_guard lock(state->mutex);
      EXPECT_FALSE(state->status) << "completed twice";
      state->status = status;
      state->changed.notify_all();
    };
  }
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

using FabricMaker =
    std::function<Result<std::unique_ptr<CommunicatorFactory>>(const Clock&, CommunicatorEvents&)>;

// What the fabrics of one world share, where they stand on something that a test puts in place of a
// device. Thread: thread-safe.
class Environment {
 public:
  virtual ~Environment() = default;
  virtual Result<std::unique_ptr<CommunicatorFactory>> Make(const Clock& clock,
                                                            CommunicatorEvents& events) = 0;
  // For the operations of one rank in one group.
  virtual ExecutionStream NewStream() = 0;
};

// One transport under test.
struct Transport {
  std::string name;
  FabricMaker make;  // Or:
  std::function<std::shared_ptr<Environment>()> environment = nullptr;
  // The number of the host that a rank believes to be on; null: all are on one.
  std::function<int(int rank)> host_of = nullptr;
  // Whether a rank that needs nothing of another may end an operation before that one has entered
  // it: the root of a broadcast, all but the root of a gather.
  bool roots_run_ahead = true;
  bool hierarchical = false;  // Reductions go by these hosts.
  // Whether messages are told apart by their tags and may come from any rank, and whether they and
  // collectives do not wait for each other.
  bool has_tags = true;
  // Of what every communicator accepts; null: all. And whether a NaN wins MIN and MAX.
  std::function<bool(const Operation& op, int ranks)> supports = nullptr;
  bool nan_wins = true;

  bool Supports(const Operation& op, int ranks) const {
    return supports == nullptr || supports(op, ranks);
  }

  friend void PrintTo(const Transport& transport, std::ostream* out) { *out << transport.name; }
};

// Every suite runs on all of these.
inline std::vector<Transport> AllTransports() {
  const auto with = [](std::size_t shm_limit) {
    return [shm_limit](const Clock& clock, CommunicatorEvents& events) {
      CpuFabricOptions options;
      options.shm_limit = shm_limit;
      return MakeCpuFabric(std::move(options), clock, events);
    };
  };
  return {{.name = "tcp", .make = with(0)},
          {.name = "shm", .make = with(CpuFabricOptions().shm_limit), .roots_run_ahead = false},
          {.name = "mixed", .make = with(CpuFabricOptions().shm_limit), .host_of = [](int rank) {
             return rank % 2;
           }}};
}

// Mappings of shared memory in this process.
inline std::size_t MappedSegments() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);)
    count += line.find("/memfd:resilient") != std::string::npos ? 1 : 0;
  return count;
}

// Ranks on two hosts that reduce host by host. Below three ranks that is rank order.
inline Transport HierarchicalTransport() {
  return {.name = "hierarchical",
          .make =
              [](const Clock& clock, CommunicatorEvents& events) {
                CpuFabricOptions options;
                options.hierarchical = true;
                return MakeCpuFabric(std::move(options), clock, events);
              },
          .host_of = [](int rank) { return rank % 2; },
          .hierarchical = true};
}
inline std::vector<Transport> AllTransportsAndOrders() {
  std::vector<Transport> all = AllTransports();
  all.push_back(HierarchicalTransport());
  return all;
}

// An endpoint of this host as if it were on another one, unless `host` is 0.
inline std::string OnHost(const std::string& endpoint, int host) {
  return host == 0 ? endpoint : endpoint + "#" + std::to_string(host);
}

// With checksums; for a part of the suites.
inline std::vector<Transport> ChecksummedTransports() {
  std::vector<Transport> transports;
  for (const bool shared : {false, true}) {
    const auto make = [shared](const Clock& clock, CommunicatorEvents& events) {
      CpuFabricOptions options;
      if (!shared) options.shm_limit = 0;
      options.checksums = true;
      return MakeCpuFabric(std::move(options), clock, events);
    };
    transports.push_back({.name = shared ? "shmChecksummed" : "tcpChecksummed",
                          .make = make,
                          .roots_run_ahead = !shared});
  }
  return transports;
}

// Links of several sockets, as between hosts.
inline Transport StripedTransport(int streams) {
  const auto make = [streams](const Clock& clock, CommunicatorEvents& events) {
    CpuFabricOptions options;
    options.shm_limit = 0;
    options.streams = streams;
    return MakeCpuFabric(std::move(options), clock, events);
  };
  return {.name = "striped" + std::to_string(streams), .make = make};
}

// With links that are encrypted: alone, and where nothing slows a program down of several sockets,
// and beside shared memory.
inline std::vector<Transport> EncryptedTransports() {
  const auto with = [](std::size_t shm_limit, int streams) {
    return [shm_limit, streams](const Clock& clock, CommunicatorEvents& events) {
      CpuFabricOptions options;
      options.shm_limit = shm_limit;
      options.streams = streams;
      options.encrypted = true;
      return MakeCpuFabric(std::move(options), clock, events);
    };
  };
  std::vector<Transport> transports = {{.name = "tcpEncrypted", .make = with(0, 1)}};
  if (kSanitized) return transports;
  transports.push_back({.name = "stripedEncrypted", .make = with(0, 3)});
  transports.push_back({.name = "mixedEncrypted",
                        .make = with(CpuFabricOptions().shm_limit, 1),
                        .host_of = [](int rank) { return rank % 2; }});
  return transports;
}

// With eager limits so small that most messages are announced, or all.
inline std::vector<Transport> AnnouncingTransports() {
  struct Variant {
    const char* name;
    bool shared;
    std::size_t eager_limit;
    int streams;
    bool checksums;
  };
  constexpr Variant kVariants[] = {{"tcpNoneEager", false, 0, 1, false},
                                   {"shmNoneEager", true, 0, 1, false},
                                   {"tcpFewEager", false, 10'000, 1, false},
                                   {"shmFewEager", true, 10'000, 1, true},
                                   {"stripedFewEager", false, 10'000, 3, true}};
  std::vector<Transport> transports;
  for (const Variant& variant : kVariants) {
    const auto make = [variant](const Clock& clock, CommunicatorEvents& events) {
      CpuFabricOptions options;
      if (!variant.shared) options.shm_limit = 0;
      options.streams = variant.streams;
      options.checksums = variant.checksums;
      return MakeCpuFabricWithEagerLimit(std::move(options), clock, events, variant.eager_limit);
    };
    transports.push_back({.name = variant.name, .make = make, .roots_run_ahead = !variant.shared});
  }
  return transports;
}

// Operations over a vector, which the caller keeps.
template <typename T>
Operation MakeOp(OpKind kind, DataType type, std::vector<T>& data) {
  Operation op;
  op.kind = kind;
  op.dtype = type;
  op.data = data.data();
  op.count = data.size();
  return op;
}
inline Operation AllReduceOp(std::vector<float>& data, ReduceOp reduce = ReduceOp::kSum) {
  Operation op = MakeOp(OpKind::kAllReduce, DataType::kFloat32, data);
  op.reduce = reduce;
  return op;
}
inline Operation BroadcastOp(std::vector<float>& data, int root) {
  Operation op = MakeOp(OpKind::kBroadcast, DataType::kFloat32, data);
  op.root = root;
  return op;
}
inline Operation AllGatherOp(std::vector<float>& data, std::vector<std::vector<float>>& outputs) {
  Operation op = MakeOp(OpKind::kAllGather, DataType::kFloat32, data);
  for (std::vector<float>& output : outputs)
    op.outputs.push_back({.data = output.data(), .count = output.size()});
  return op;
}
inline Operation BarrierOp() { return {}; }
inline Operation Bounded(Operation op, Duration timeout, Duration stall) {
  op.timeout = timeout;
  op.stall = stall;
  return op;
}
inline Operation SendOp(std::vector<float>& data, int to, std::uint32_t tag) {
  Operation op = MakeOp(OpKind::kSend, DataType::kFloat32, data);
  op.peer = to;
  op.tag = tag;
  return op;
}
inline Operation RecvOp(std::vector<float>& data, int from, std::uint32_t tag) {
  Operation op = SendOp(data, from, tag);
  op.kind = OpKind::kRecv;
  return op;
}

// N ranks in this process, each with a fabric of its own.
class World {
 public:
  World(const Transport& transport, int size)
      : environment_(transport.environment ? transport.environment() : nullptr),
        host_of_(transport.host_of) {
    for (int rank = 0; rank < size; ++rank) {
      events.push_back(std::make_unique<EventLog>());
      auto fabric = environment_ ? environment_->Make(clock, *events.back())
                                 : transport.make(clock, *events.back());
      EXPECT_TRUE(fabric.ok()) << fabric.status().ToString();
      fabrics.push_back(std::move(*fabric));
      Endpoint unreachable = DecodeEndpoint(fabrics.back()->endpoint());
      unreachable.address = "127.0.0.1:1";
      unreachable.host_id.clear();
      unreachable_.push_back(EncodeEndpoint(unreachable));
    }
    group = CreateAll("world");
  }
  ~World() {
    // Side by side, as in real life: one after the other each would wait for the next one's answer.
    std::vector<std::thread> closers;
    for (auto& fabric : fabrics) {
      if (fabric != nullptr)
        closers.emplace_back([&] { fabric->Close(Deadline::After(clock.Now(), Millis(2000))); });
    }
    for (std::thread& closer : closers) closer.join();
  }

  int size() const { return static_cast<int>(fabrics.size()); }

  GroupSpec Spec(const std::string& name, int rank, std::uint64_t generation = 1) const {
    GroupSpec spec;
    spec.name = name;
    spec.generation = generation;
    spec.secret = kSecret;
    spec.rank = rank;
    for (int r = 0; r < size(); ++r) {
      spec.members.push_back({.global_rank = r,
                              .endpoint = endpoint(r),
                              .host = "node" + std::to_string(r),
                              .pid = 1000 + r});
    }
    return spec;
  }
  std::string endpoint(int rank) const {
    const auto at = static_cast<std::size_t>(rank);
    if (fabrics[at] == nullptr) return unreachable_[at];
    return OnHost(fabrics[at]->endpoint(), host_of_ ? host_of_(rank) : 0);
  }
  std::shared_ptr<Communicator> Create(int rank, GroupSpec spec,
                                       std::shared_ptr<AbortCell> abort = nullptr) {
    return fabrics[static_cast<std::size_t>(rank)]->Create(std::move(spec), std::move(abort));
  }
  std::vector<std::shared_ptr<Communicator>> CreateAll(const std::string& name,
                                                       std::uint64_t generation = 1,
                                                       std::shared_ptr<AbortCell> abort = nullptr) {
    std::vector<std::shared_ptr<Communicator>> all;
    for (int rank = 0; rank < size(); ++rank)
      all.push_back(Create(rank, Spec(name, rank, generation), abort));
    return all;
  }
  Communicator& at(int rank) { return *group[static_cast<std::size_t>(rank)]; }
  EventLog& log(int rank) { return *events[static_cast<std::size_t>(rank)]; }

  // Each rank submits what `make(rank)` gives; returns all outcomes.
  std::vector<Status> RunAll(const std::function<Operation(int)>& make) {
    std::vector<Pending> pending;
    for (int rank = 0; rank < size(); ++rank) pending.push_back(Pending::Try(at(rank), make(rank)));
    std::vector<Status> outcomes;
    for (const Pending& one : pending) outcomes.push_back(one.Wait());
    return outcomes;
  }

  // Null where operations have none.
  ExecutionStream NewStream() { return environment_ ? environment_->NewStream() : nullptr; }

  SystemClock clock;

 private:
  const std::shared_ptr<Environment> environment_;  // Outlives the fabrics.

 public:
  std::vector<std::unique_ptr<EventLog>> events;
  std::vector<std::unique_ptr<CommunicatorFactory>> fabrics;
  std::vector<std::shared_ptr<Communicator>> group;  // The group "world", by rank.

 private:
  const std::function<int(int)> host_of_;
  std::vector<std::string> unreachable_;  // By rank, once its fabric is gone.
};

// Waits until `after` by the clock of the communicators: for an operation of a group that the other
// ranks never make.
inline void Elapse(World& world, Duration after) {
  const auto alone = world.Create(0, world.Spec("alone", 0));
  const Status status = Pending::Of(*alone, Bounded(BarrierOp(), after, {})).Wait();
  EXPECT_EQ(status.code(), StatusCode::kCommFailed);
  EXPECT_NE(status.message().find("rank 1 (node1, pid 1001)"), std::string::npos);
}

inline void ExpectAllOk(const std::vector<Status>& outcomes) {
  for (const Status& status : outcomes) EXPECT_TRUE(status.ok()) << status.ToString();
}

}  // namespace resilient::testing
