// Goal: whatever goes wrong in a world on devices, and whatever else goes wrong meanwhile, all
// operations end, what ends well has the result of its own generation, all ranks see the same
// failure, and the program gets to its end with nothing left behind.
// Method: faults from a seed (errors and hangs of NCCL and the device, other sizes, aborts, broken
// links, killed ranks), each at a step of a program of random operations, before them, while they
// are in flight, or while the world recovers from another; real sessions over the fake NCCL, and
// through memory of the host. To run one seed again: RESILIENT_TEST_SEED=...

#include <atomic>
#include <cstdlib>
#include <map>
#include <optional>

#include "runtime/base/random.h"
#include "tests/unit/recovery/cuda_world.h"

namespace resilient::recovery {
namespace {

constexpr int kSeeds = 40;
constexpr int kSteps = 10;
constexpr int kMostFaults = 6;
constexpr int kMostOperations = 5;
// Between two looks at whether the others are done while a rank waits for a rebuild.
constexpr Duration kLook = Millis(200);
// Operation::stall: what ends an operation that hangs on a device while all ranks live.
constexpr Duration kStall = std::chrono::seconds(1);

// What NCCL or the device does from then on.
enum class Trouble {
  kNone,
  kAsyncError,
  kLaunchError,
  kHangLaunch,
  kHoldKernels,
  kHangAbort,
  kHangDestroy,
  kInitError,
  kHangInit,
  kLoseDevice,
  kRefuseEvents,
  kHangMemory,
  kRefuseMemory,
  kHoldCopies,
  kCount
};
// What somebody does.
enum class Act { kNone, kAbort, kCutLink, kKill, kOtherSize, kCount };
enum class Moment { kBefore, kInFlight, kRecovering, kCount };

template <typename Enum>
Enum AnyOf(Random& random) {
  return static_cast<Enum>(random.Below(static_cast<std::uint64_t>(Enum::kCount)));
}

struct Fault {
  int step = 0;  // Of the rank that does it: then or later.
  Moment moment = Moment::kBefore;
  Trouble trouble = Trouble::kNone;
  Act act = Act::kNone;
  int target = 0;  // Who is killed.
  bool done = false;

  std::string ToString() const {
    constexpr const char* kTroubles[] = {
        "none",          "async_error",  "launch_error",  "hang_launch", "hold_kernels",
        "hang_abort",    "hang_destroy", "init_error",    "hang_init",   "lose_device",
        "refuse_events", "hang_memory",  "refuse_memory", "hold_copies"};
    constexpr const char* kActs[] = {"none", "abort", "cut_link", "kill", "other_size"};
    constexpr const char* kMoments[] = {"before", "in flight", "recovering"};
    return StrCat("step ", step, ", ", kMoments[static_cast<int>(moment)], ": ",
                  kTroubles[static_cast<int>(trouble)], ", ", kActs[static_cast<int>(act)],
                  act == Act::kKill ? StrCat(" ", target) : "", done ? "" : " (not yet)");
  }
};

// Nothing of it is an error by itself, or is noticed in time: somebody has to act.
bool EndsNothing(Trouble trouble) {
  return trouble != Trouble::kAsyncError && trouble != Trouble::kLaunchError &&
         trouble != Trouble::kHangLaunch && trouble != Trouble::kHoldKernels &&
         trouble != Trouble::kLoseDevice;
}

Fault AnyFault(Random& random) {
  Fault fault;
  fault.step = static_cast<int>(random.Below(kSteps));
  fault.moment = AnyOf<Moment>(random);
  if (random.Below(2) == 0) fault.trouble = AnyOf<Trouble>(random);
  fault.act = AnyOf<Act>(random);
  fault.target = static_cast<int>(random.Below(kWorldSize));
  // A rank that lives and has not come to an operation yet is waited for: somebody has to act.
  if (fault.trouble == Trouble::kHangMemory || fault.trouble == Trouble::kHoldCopies) {
    fault.moment = Moment::kInFlight;
  }
  if (fault.act == Act::kOtherSize && fault.moment != Moment::kBefore) fault.act = Act::kNone;
  if (fault.act == Act::kNone && EndsNothing(fault.trouble)) fault.act = Act::kAbort;
  return fault;
}

void Apply(Trouble trouble, NcclScript& script) {
  switch (trouble) {
    case Trouble::kAsyncError:
      script.async_error = NcclResult::kRemoteError;
      break;
    case Trouble::kLaunchError:
      script.launch_result = NcclResult::kSystemError;
      break;
    case Trouble::kHangLaunch:
      script.hang_launch = true;
      break;
    case Trouble::kHoldKernels:
      script.hold_kernels = true;
      break;
    case Trouble::kHangAbort:
      script.hang_abort = true;
      break;
    case Trouble::kHangDestroy:
      script.hang_destroy = true;
      break;
    case Trouble::kInitError:
      script.init_result = NcclResult::kSystemError;
      break;
    case Trouble::kHangInit:
      script.hang_init = true;
      break;
    case Trouble::kLoseDevice:
      script.lose_device = true;
      break;
    case Trouble::kRefuseEvents:
      script.refuse_events = true;
      break;
    case Trouble::kHangMemory:
      script.hang_memory = true;
      break;
    case Trouble::kRefuseMemory:
      script.refuse_memory = true;
      break;
    case Trouble::kHoldCopies:
      script.hold_copies = true;
      break;
    case Trouble::kNone:
    case Trouble::kCount:
      break;
  }
}

// The same on all ranks that take part.
struct Planned {
  OpKind kind = OpKind::kAllReduce;  // kSend: a batch, to the next rank and from the one before.
  bool on_host = false;
  bool of_pair = false;
  std::size_t count = 1;
};

std::vector<Planned> PlanStep(std::uint64_t seed, int step) {
  Random random(seed * 1000 + static_cast<std::uint64_t>(step));
  std::vector<Planned> plan(1 + random.Below(kMostOperations));
  constexpr OpKind kKinds[] = {OpKind::kAllReduce, OpKind::kBroadcast, OpKind::kAllGather,
                               OpKind::kBarrier, OpKind::kSend};
  for (Planned& one : plan) {
    one.kind = kKinds[random.Below(std::size(kKinds))];
    one.on_host = one.kind != OpKind::kSend && random.Below(4) == 0;
    one.of_pair = random.Below(4) == 0;
    one.count = 1 + random.Below(3000);
  }
  return plan;
}

// One operation of one rank, with its memory, which whoever may still write to it keeps.
class Submitted {
 public:
  // `value`: what no other rank, operation, step or generation has, up to the rank.
  Submitted(const Planned& planned, int rank, int size, double value)
      : planned_(planned), rank_(rank), size_(size), value_(value) {
    const std::size_t blocks = planned.kind == OpKind::kAllGather ? 1 + Size() : 2;
    memory_ = std::make_shared<std::vector<double>>(blocks * planned.count, value + rank);
  }

  // The refusal, if it was refused.
  Status Start(Group& group, std::size_t more) {
    Operation op;
    op.kind = planned_.kind;
    op.dtype = DataType::kFloat64;
    op.reduce = Reduces(op.kind) ? ReduceOp::kSum : ReduceOp::kNone;
    op.root = HasRoot(op.kind) ? size_ - 1 : -1;
    op.device = planned_.on_host ? kHost : group.session().membership().rank;
    op.stall = kStall;
    if (op.kind != OpKind::kBarrier) {
      op.data = memory_->data();
      op.count = planned_.count + more;  // There is another block behind it.
    }
    if (op.kind == OpKind::kSend) return StartExchange(group, op);
    if (op.kind == OpKind::kAllGather) {
      for (std::size_t from = 0; from < Size(); ++from)
        op.outputs.push_back({Block(1 + from), op.count});
      op.count = planned_.count;
      for (Part& part : op.outputs) part.count = op.count;
    }
    return group.Submit(op, Keeping(0)).status();
  }

  // Both of an exchange.
  Status Await() {
    Status first = outcomes_[0].Await();
    if (planned_.kind != OpKind::kSend) return first;
    const Status second = outcomes_[1].Await();
    return first.ok() ? second : first;
  }

  void Check() const {
    const double sum = size_ * value_ + size_ * (size_ - 1) / 2.0;
    if (planned_.kind == OpKind::kAllReduce) ExpectBlock(0, sum);
    if (planned_.kind == OpKind::kBroadcast) ExpectBlock(0, value_ + size_ - 1);
    if (planned_.kind == OpKind::kSend) ExpectBlock(1, value_ + (rank_ + size_ - 1) % size_);
    if (planned_.kind != OpKind::kAllGather) return;
    for (int from = 0; from < size_; ++from)
      ExpectBlock(1 + static_cast<std::size_t>(from), value_ + from);
  }

 private:
  std::size_t Size() const { return static_cast<std::size_t>(size_); }
  double* Block(std::size_t number) { return memory_->data() + number * planned_.count; }
  Completion Keeping(std::size_t outcome) {
    return [done = outcomes_[outcome].Callback(), memory = memory_](const Status& status) {
      done(status);
    };
  }
  Status StartExchange(Group& group, Operation op) {
    op.peer = (rank_ + 1) % size_;
    Operation receive = op;
    receive.kind = OpKind::kRecv;
    receive.peer = (rank_ + size_ - 1) % size_;
    receive.data = Block(1);
    std::vector<Communicator::Submission> batch;
    batch.push_back({op, Keeping(0)});
    batch.push_back({receive, Keeping(1)});
    return group.SubmitBatch(std::move(batch)).status();
  }
  void ExpectBlock(std::size_t number, double value) const {
    const double* block = memory_->data() + number * planned_.count;
    for (std::size_t i = 0; i < planned_.count; ++i) {
      ASSERT_EQ(block[i], value) << OpKindName(planned_.kind) << ", block " << number << " at " << i
                                 << " of " << planned_.count << " on rank " << rank_;
    }
  }

  const Planned planned_;
  const int rank_;  // In its group.
  const int size_;
  const double value_;
  std::shared_ptr<std::vector<double>> memory_;
  std::array<Outcome, 2> outcomes_;
};

class CudaRandomWorldTest : public CudaWorld {
 protected:
  CudaRandomWorldTest() {
    cuda_.verdict_wait = Millis(50);
    cuda_.connect_timeout = std::chrono::seconds(1);
  }

  void RunSeeds() {
    const char* given = std::getenv("RESILIENT_TEST_SEED");
    const std::uint64_t first = given == nullptr ? 1 : std::strtoull(given, nullptr, 10);
    const std::uint64_t last = given == nullptr ? kSeeds : first;
    for (std::uint64_t seed = first; seed <= last; ++seed) {
      RunSeed(seed);
      if (HasFailure()) FAIL() << "seed " << seed << ": " << Plan();
    }
    RecordProperty("recoveries", recoveries_);
    for (const auto& [code, times] : causes_) RecordProperty(StrCat("cause_", code), times);
  }

  int TimesOf(StatusCode code) { return causes_[std::string(CodeName(code))]; }

 private:
  // Of one seat, over all the processes that take it.
  struct Seat {
    std::vector<Fault> faults;  // Of its thread.
    int cleared_after = 0;      // How many recoveries later the device is well again; its thread's.
    std::atomic<bool> finished = false;
    std::atomic<int> deaths = 0;  // Of processes whose session was over for good.
    std::atomic<int> kills = 0;   // And what they can be of.
  };
  struct Process {
    Rank rank;
    std::shared_ptr<Group> pair;  // Of ranks 0 and 1; null elsewhere.
    int step = 0;
    bool in_step = false;  // With the others: it knows the step of all.
  };

  void RunSeed(std::uint64_t seed) {
    MembershipHub hub(kWorldSize);
    hub_ = &hub;
    seed_ = seed;
    Random random(seed);
    for (Seat& seat : seats_) {
      seat.faults.clear();
      seat.cleared_after = 0;
      seat.finished = false;
      seat.deaths = seat.kills = 0;
    }
    over_ = false;
    const std::uint64_t faults = 1 + random.Below(kMostFaults);
    for (std::uint64_t i = 0; i < faults; ++i) {
      seats_[random.Below(kWorldSize)].faults.push_back(AnyFault(random));
    }
    OnRanks(kAllRanks, [this](int rank) {
      while (!AllHaveFinished()) Live(rank);
    });
    for (const Seat& seat : seats_) EXPECT_LE(seat.deaths.load(), seat.kills.load());
    ExpectNothingIsLeft();
    for (const std::string& misuse : fake_.TakeMisuse()) {
      // Of an operation with another size; every rank is told.
      EXPECT_THAT(misuse, ::testing::HasSubstr("is in another collective"));
    }
  }

  // "rank 1, step 3, in flight: hang_launch, abort; ...".
  std::string Plan() const {
    std::string plan;
    for (std::size_t rank = 0; rank < seats_.size(); ++rank) {
      for (const Fault& fault : seats_[rank].faults) {
        plan += StrCat(plan.empty() ? "" : "; ", "rank ", rank, ", ", fault.ToString());
      }
    }
    return plan;
  }

  // From a process's start to its end.
  void Live(int rank) {
    Seat& seat = SeatOf(rank);
    seat.finished = false;
    Process self;
    const Result<Rank> opened = Open(*hub_, rank);
    if (!opened.ok()) return Die(rank);
    self.rank = *opened;
    bool lives = true;
    if (rank < 2) {
      const auto pair = self.rank.session->CreateGroup("pair", {0, 1});
      lives = pair.ok();
      if (lives) self.pair = *pair;
    }
    if (!lives || !RunProgram(rank, self)) Die(rank);
    // What hangs would keep the process for its second of grace; a lost device is lost to its end.
    fake_.Change(rank, [](NcclScript& script) { script = {.lose_device = script.lose_device}; });
    self = {};
    Mend(rank);
  }
  void Mend(int rank) {
    fake_.Change(rank, [](NcclScript& script) { script = {}; });
  }

  // False when the process is at its end before the program is.
  bool RunProgram(int rank, Process& self) {
    Seat& seat = SeatOf(rank);
    while (!AllHaveFinished()) {
      Status status;
      if (!self.in_step) {
        status = Agree(self);
      } else if (self.step < kSteps) {
        status = Step(rank, self);
      } else {
        seat.finished = true;
        std::this_thread::yield();
        status = self.rank.session->failure();
      }
      if (!status.ok() && !Recover(rank, self, status)) return false;
    }
    return true;
  }

  // On the step from which all go on: who was ahead has done what the others have not.
  Status Agree(Process& self) {
    auto step = std::make_shared<std::int64_t>(self.step);
    Operation op;
    op.kind = OpKind::kAllReduce;
    op.dtype = DataType::kInt64;
    op.reduce = ReduceOp::kMax;
    op.data = step.get();
    op.count = 1;
    op.device = self.rank.session->membership().rank;
    op.stall = kStall;
    Outcome outcome;
    const auto submitted = self.rank.world->Submit(
        op, [done = outcome.Callback(), step](const Status& status) { done(status); });
    const Status status = submitted.ok() ? outcome.Await() : submitted.status();
    if (!status.ok()) return status;
    self.step = static_cast<int>(*step);
    self.in_step = true;
    return status;
  }

  Status Step(int rank, Process& self) {
    const bool other_size = Do(Moment::kBefore, rank, self);
    const double base = 1e6 * static_cast<double>(self.rank.session->epoch()) + 1e4 * self.step;
    std::vector<Submitted> submitted;
    std::vector<Status> refusals;
    std::size_t more = other_size ? 1 : 0;
    double number = 0;
    for (const Planned& planned : PlanStep(seed_, self.step)) {
      number += 100;
      if (planned.of_pair && self.pair == nullptr) continue;
      Submitted& one =
          submitted.emplace_back(planned, rank, planned.of_pair ? 2 : kWorldSize, base + number);
      const bool takes_it = planned.kind == OpKind::kAllReduce;
      refusals.push_back(
          one.Start(planned.of_pair ? *self.pair : *self.rank.world, takes_it ? more : 0));
      if (takes_it) more = 0;
    }
    Do(Moment::kInFlight, rank, self);
    Status first;
    for (std::size_t i = 0; i < submitted.size(); ++i) {
      const Status status = refusals[i].ok() ? submitted[i].Await() : refusals[i];
      if (status.ok()) submitted[i].Check();
      if (first.ok()) first = status;
    }
    if (first.ok()) ++self.step;
    return first;
  }

  // False when this process is at its end: given up by the others, or its device is lost.
  bool Recover(int rank, Process& self, const Status& told) {
    Seat& seat = SeatOf(rank);
    Session& session = *self.rank.session;
    const Status cause = session.AwaitFailure(Deadline::After(clock_.Now(), kTestBound));
    EXPECT_FALSE(cause.ok()) << "rank " << rank << " was told " << told.ToString();
    // What has failed here for a reason of its own says so, whatever else has ended the generation
    // in the same moment.
    const bool own = told.code() == StatusCode::kMismatch || told.detail().rank == rank;
    EXPECT_TRUE(told.code() == cause.code() || own || IsOfItself(cause, rank))
        << told.ToString() << "\nbut " << cause.ToString();
    Note(cause);
    const Status refused = Agree(self);
    EXPECT_TRUE(refused.code() == cause.code() || IsOfItself(refused, rank))
        << "before it is acknowledged: " << refused.ToString() << "\nbut " << cause.ToString();
    Do(Moment::kRecovering, rank, self);
    if (seat.cleared_after > 0 && --seat.cleared_after == 0) Mend(rank);
    while (!AllHaveFinished()) {
      const Status rebuilt = session.Rebuild({.deadline = Deadline::After(clock_.Now(), kLook)});
      if (rebuilt.ok()) {
        self.in_step = false;
        return true;
      }
      if (rebuilt.code() == StatusCode::kTimeout) {
        Mend(rank);  // It may be what holds up the recovery.
        continue;
      }
      EXPECT_EQ(session.membership().state, SessionState::kFailed) << rebuilt.ToString();
      EXPECT_TRUE(IsOfItself(rebuilt, rank)) << rebuilt.ToString();
      return false;
    }
    return true;
  }
  // What ends this very process comes above what happens to the others meanwhile.
  static bool IsOfItself(const Status& status, int rank) {
    return status.code() == StatusCode::kStaleGeneration ||
           (status.code() == StatusCode::kDeviceLost && status.detail().rank == rank);
  }

  void Die(int rank) {
    Seat& seat = SeatOf(rank);
    ++seat.deaths;
    seat.cleared_after = 0;
    hub_->Kill(rank);
  }

  // What is due. True: the next operation is to have another size.
  bool Do(Moment moment, int rank, Process& self) {
    bool other_size = false;
    Seat& seat = SeatOf(rank);
    for (Fault& fault : seat.faults) {
      if (fault.done || fault.moment != moment || fault.step > self.step) continue;
      fault.done = true;
      if (fault.trouble != Trouble::kNone) {
        if (fault.trouble == Trouble::kLoseDevice) ++seat.kills;
        fake_.Change(rank, [&](NcclScript& script) {
          script = {.lose_device = script.lose_device};  // One at a time, to be mended in time.
          Apply(fault.trouble, script);
        });
        const bool connects =
            fault.trouble == Trouble::kInitError || fault.trouble == Trouble::kHangInit;
        seat.cleared_after = connects || moment == Moment::kRecovering ? 2 : 1;
      }
      other_size = other_size || fault.act == Act::kOtherSize;
      DoAct(fault, self);
    }
    return other_size;
  }
  void DoAct(const Fault& fault, Process& self) {
    if (fault.act == Act::kAbort) self.rank.world->Abort("a fault of the test");
    if (fault.act == Act::kCutLink) hub_->CutLink();
    if (fault.act != Act::kKill) return;
    Seat& target = SeatOf(fault.target);
    target.finished = false;
    ++target.kills;
    hub_->Kill(fault.target);
  }

  bool AllHaveFinished() {
    if (HasFailure() || std::all_of(seats_.begin(), seats_.end(),
                                    [](const Seat& seat) { return seat.finished.load(); })) {
      over_ = true;
    }
    return over_;
  }
  Seat& SeatOf(int rank) { return seats_[static_cast<std::size_t>(rank)]; }
  void Note(const Status& cause) {
    std::lock_guard lock(mutex_);
    ++causes_[std::string(CodeName(cause.code()))];
    ++recoveries_;
  }

  MembershipHub* hub_ = nullptr;  // Of the seed that runs.
  std::uint64_t seed_ = 0;
  std::array<Seat, kWorldSize> seats_;
  std::atomic<bool> over_ = false;  // From then on ranks leave.
  std::mutex mutex_;
  // Guarded by mutex_ while ranks run:
  std::map<std::string, int> causes_;
  int recoveries_ = 0;
};

TEST_F(CudaRandomWorldTest, OverNccl_AnyFaults_AreOneFailureForAll_AndHeal) {
  RunSeeds();
  if (std::getenv("RESILIENT_TEST_SEED") != nullptr) return;
  for (const StatusCode code :
       {StatusCode::kRankLost, StatusCode::kCommFailed, StatusCode::kCommStalled,
        StatusCode::kMismatch, StatusCode::kDeviceLost}) {
    EXPECT_GT(TimesOf(code), 0) << CodeName(code);
  }
}

TEST_F(CudaRandomWorldTest, ThroughHost_AnyFaults_AreOneFailureForAll_AndHeal) {
  shared_gpu_ = true;
  shared_gpu_allowed_.fill(SharedGpu::kThroughHost);
  RunSeeds();
  EXPECT_EQ(fake_.Counts().unique_ids, 0) << "NCCL is not asked";
}

}  // namespace
}  // namespace resilient::recovery
