// Goal: whichever call into NCCL or CUDA goes wrong, of all that a communicator makes in its life,
// every operation of every rank ends, memory is let go, and the next generation works.
// Method: a program of all kinds of launches, or of a graph with all of them, is run once to see
// which calls it makes; then again for each of them, which fails, complains or stands still. What
// the session would do (a fence once it is told of a failure) the test does.

#include <algorithm>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/call_faults.h"
#include "tests/unit/comm/nccl_world.h"
#include "tests/unit/comm/staged_world.h"

namespace resilient::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Effect = CallFault::Effect;

constexpr int kRanks = 2;
constexpr int kCallsMax = 6;                // Of one function, that go wrong in turn.
constexpr std::chrono::seconds kAtOnce(5);  // What does not wait, on a machine that is busy.

bool IsOfLeaving(const std::string& call) {
  return call == "CommFinalize" || call == "CommDestroy";
}

// The operations of one rank and their memory. Lifetime: outlives them.
class Program {
 public:
  // `graphs`: they are captured and replayed once, by a thread, as CUDA's graphs are. Null: they
  // are submitted by the constructor.
  Program(Communicator& communicator, int rank, FakeEnvironment* graphs)
      : communicator_(communicator), rank_(rank) {
    data_ = {1.0F + static_cast<float>(rank), 5};
    given_ = {10.0F + static_cast<float>(rank)};
    gathered_.assign(kRanks, {0});
    parts_.assign(kRanks, {static_cast<float>(rank)});
    if (graphs != nullptr) {
      stream_ = static_cast<CudaStreamHandle>(graphs->NewStream());
      thread_ = std::thread([this, fake = &graphs->fake] { CaptureAndReplay(*fake); });
      return;
    }
    for (std::vector<Operation>& step : Steps()) {
      if (!Submit(std::move(step))) break;
    }
    is_run_ = true;
  }
  ~Program() { Join(); }

  bool AreDone() const {
    const std::lock_guard lock(mutex_);
    return is_run_ && std::all_of(pending_.begin(), pending_.end(),
                                  [](const Pending& one) { return one.IsDone(); });
  }
  // Whether all went well; waits for all.
  bool AllOk() {
    Join();
    bool ok = is_replayed_;
    for (const Pending& one : pending_) ok = one.Wait().ok() && ok;
    return ok;
  }
  bool AnyFailed() const {
    const std::lock_guard lock(mutex_);
    return std::any_of(pending_.begin(), pending_.end(),
                       [](const Pending& one) { return one.IsDone() && !one.Wait().ok(); });
  }
  void ExpectResults() const {
    EXPECT_THAT(data_, ElementsAre(3, 10));
    EXPECT_THAT(scaled_, ElementsAre(4));
    EXPECT_TRUE(taken_[0] == 21 - given_[0]) << taken_[0];
    EXPECT_THAT(gathered_, ElementsAre(ElementsAre(10), ElementsAre(11)));
    EXPECT_THAT(sum_, ElementsAre(1));
  }

 private:
  // One operation each, or a batch.
  std::vector<std::vector<Operation>> Steps() {
    const int peer = 1 - rank_;
    Operation premul = AllReduceOp(scaled_, ReduceOp::kPremulSum);
    premul.factor = 2;
    Operation scatter = MakeOp(OpKind::kReduceScatter, DataType::kFloat32, sum_);
    scatter.reduce = ReduceOp::kSum;
    for (std::vector<float>& part : parts_)
      scatter.inputs.push_back({.data = part.data(), .count = part.size()});
    return {{AllReduceOp(data_)},
            {premul},
            {SendOp(given_, peer, 0), RecvOp(taken_, peer, 0)},
            {BarrierOp()},
            {AllGatherOp(given_, gathered_)},
            {scatter}};
  }
  // False where it is refused, which a program would not go on from.
  bool Submit(std::vector<Operation> step) {
    const std::vector<Pending> submitted =
        step.size() > 1 ? Pending::TryBatch(communicator_, std::move(step))
                        : std::vector<Pending>{Pending::Try(communicator_, std::move(step[0]))};
    const std::lock_guard lock(mutex_);
    pending_.insert(pending_.end(), submitted.begin(), submitted.end());
    return submitted.front().seq != 0;
  }
  // Whatever goes wrong, the capture is ended and the graph destroyed.
  void CaptureAndReplay(FakeNccl& fake) {
    EXPECT_EQ(fake.BeginCapture(stream_), CudaResult::kSuccess);
    for (std::vector<Operation>& step : Steps()) {
      if (!Capture(std::move(step))) break;
    }
    CudaGraphHandle graph = nullptr;
    bool ok = fake.EndCapture(stream_, &graph) == CudaResult::kSuccess;
    for (const Pending& one : pending_) ok = one.Wait().ok() && ok;
    ok = ok && fake.LaunchGraph(graph, stream_) == CudaResult::kSuccess &&
         fake.SynchronizeStream(stream_) == CudaResult::kSuccess;
    if (graph != nullptr) {
      EXPECT_EQ(fake.DestroyGraph(graph), CudaResult::kSuccess);
    }
    const std::lock_guard lock(mutex_);
    is_run_ = true;
    is_replayed_ = ok;
  }
  bool Capture(std::vector<Operation> step) {
    std::vector<std::shared_ptr<LaunchMark>> marks;
    for (Operation& op : step) {
      op.stream = stream_;
      op.device = rank_;
      marks.push_back(op.mark = std::make_shared<LaunchMark>());
    }
    if (!Submit(std::move(step))) return false;
    for (const std::shared_ptr<LaunchMark>& mark : marks) {
      EXPECT_TRUE(mark->WaitFor(kBound));
      (void)mark->Join(stream_);
    }
    return true;
  }
  void Join() {
    if (thread_.joinable()) thread_.join();
  }

  Communicator& communicator_;
  const int rank_;
  std::vector<float> data_, given_;
  std::vector<float> scaled_ = {1}, taken_ = {0}, sum_ = {0};
  std::vector<std::vector<float>> gathered_, parts_;
  CudaStreamHandle stream_ = nullptr;
  mutable std::mutex mutex_;
  std::vector<Pending> pending_;  // Guarded where the thread is not the one that looks.
  bool is_run_ = false;           // Guarded.
  bool is_replayed_ = true;       // Guarded. Where nothing is to be replayed: true.
  std::thread thread_;
};

// Two ranks and a program of each, in one generation.
class Programs {
 public:
  Programs(World& world, std::uint64_t generation, FakeEnvironment* graphs)
      : group_(generation == 1 ? world.group : world.CreateAll("world", generation)) {
    for (int rank = 0; rank < kRanks; ++rank) {
      programs_.push_back(
          std::make_unique<Program>(*group_[static_cast<std::size_t>(rank)], rank, graphs));
    }
  }

  bool AreDone() const {
    return std::all_of(programs_.begin(), programs_.end(),
                       [](const auto& program) { return program->AreDone(); });
  }
  bool AnyFailed() const {
    return std::any_of(programs_.begin(), programs_.end(),
                       [](const auto& program) { return program->AnyFailed(); });
  }
  bool AllOk() const {
    bool ok = true;
    for (const auto& program : programs_) ok = program->AllOk() && ok;
    return ok;
  }
  void ExpectResults() const {
    for (const auto& program : programs_) program->ExpectResults();
  }
  // As a fence does, or a goodbye.
  void End(bool leave) {
    for (const auto& communicator : group_) {
      if (leave) {
        communicator->Leave();
      } else {
        communicator->Abort(Status(StatusCode::kRankLost, "the fence of the test"));
      }
    }
  }
  bool AreQuiet() const {
    return std::all_of(group_.begin(), group_.end(),
                       [](const auto& communicator) { return communicator->IsQuiet(); });
  }

 private:
  const std::vector<std::shared_ptr<Communicator>> group_;
  std::vector<std::unique_ptr<Program>> programs_;
};

// A way on which operations of devices go.
struct Way {
  std::string name;
  std::function<std::shared_ptr<FakeEnvironment>()> make;  // With faults around its tables.
  std::vector<std::string> calls;                          // Some of those that a program makes.
  // At least so many of the lives meet their fault.
  int failing = 0;
  int complaining = 0;
  int standing = 0;
  bool graphs = false;
};

template <typename Kind>
std::shared_ptr<FakeEnvironment> MakeEnvironment() {
  auto environment = std::make_shared<Kind>();
  NcclFabricOptions& options = environment->options();
  options.nccl = CallFaults::Around(options.nccl);
  options.cuda = CallFaults::Around(options.cuda);
  options.verdict_wait = Millis(10);
  options.flush_timeout = Millis(100);
  return environment;
}

std::vector<Way> Ways() {
  return {{.name = "nccl",
           .make = &MakeEnvironment<NcclEnvironment>,
           .calls = {"GetUniqueId", "CommInitRankConfig", "CommGetAsyncError", "AllReduce",
                     "RedOpCreatePreMulSum", "Send", "Recv", "Broadcast", "Reduce", "CommFinalize",
                     "CommDestroy", "EventRecord", "StreamWaitEvent", "Malloc"},
           .failing = 150,
           .complaining = 60,
           .standing = 30},
          {.name = "graphs",
           .make = &MakeEnvironment<NcclEnvironment>,
           .calls = {"StreamIsCapturing", "StreamGetCaptureInfo", "UserObjectCreate",
                     "GraphRetainUserObject", "EventRecordWithFlags",
                     "ThreadExchangeStreamCaptureMode", "StreamWaitEvent"},
           .failing = 150,
           .complaining = 60,
           .standing = 30,
           .graphs = true},
          {.name = "staged",
           .make = &MakeEnvironment<StagedEnvironment>,
           .calls = {"HostAlloc", "FreeHost", "MemcpyAsync", "EventRecord", "EventQuery",
                     "StreamWaitEvent"},
           .failing = 50,
           .complaining = 20,
           .standing = 10}};
}

class DeviceFaults : public ::testing::TestWithParam<Way> {
 protected:
  DeviceFaults() { SetLogLevel(LogLevel::kOff); }  // Of each fault there is a line.
  ~DeviceFaults() override { SetLogLevel(LogLevel::kWarn); }

  // One life of a world in which a rank meets `fault`, and the next generation, in which nothing
  // goes wrong.
  void Live(const CallFault& fault) {
    SCOPED_TRACE(StrCat("rank ", fault.rank, ", ", fault.call, " number ", fault.nth,
                        " of communicator ", fault.communicator,
                        fault.effect == Effect::kFails       ? " fails with "
                        : fault.effect == Effect::kComplains ? " complains with "
                                                             : " stands, with ",
                        fault.result));
    faults_.Set(fault);
    const std::shared_ptr<FakeEnvironment> environment = GetParam().make();
    World world = MakeWorld(environment);
    FakeEnvironment* const graphs = GraphsOf(*environment);
    Programs first(world, 1, graphs);
    const bool stands = fault.effect == Effect::kStands;
    EXPECT_TRUE(Eventually([&] {
      return first.AreDone() || first.AnyFailed() || (stands && faults_.Hit()) || IsTold(world);
    }));
    if (first.AreDone() && first.AllOk()) first.ExpectResults();
    const auto before = std::chrono::steady_clock::now();
    first.End(IsOfLeaving(fault.call));
    EXPECT_LT(std::chrono::steady_clock::now() - before, kAtOnce);
    if (stands) {
      EXPECT_TRUE(Eventually([&] { return faults_.Hit() || first.AreQuiet(); }));
      faults_.Release();
    }
    (void)first.AllOk();  // All end.
    EXPECT_TRUE(Eventually([&] { return first.AreQuiet(); }));
    hits_ += faults_.Hit() ? 1 : 0;
    faults_.Clear();
    // What did not get into a capture may have left it unjoined.
    if (graphs != nullptr) {
      EXPECT_THAT(graphs->fake.TakeMisuse(), Each(HasSubstr("a capture ends without a stream")));
    }
    Programs second(world, 2, graphs);
    EXPECT_TRUE(second.AllOk());
    second.ExpectResults();
  }

  // What the program calls, without faults, on that rank, and how often.
  std::map<std::string, int> Calls(int rank) {
    faults_.Clear();
    {
      const std::shared_ptr<FakeEnvironment> environment = GetParam().make();
      World world = MakeWorld(environment);
      Programs programs(world, 1, GraphsOf(*environment));
      EXPECT_TRUE(programs.AllOk());
      programs.ExpectResults();
    }
    return faults_.Calls(rank);
  }

  int hits_ = 0;
  CallFaults faults_;

 private:
  // Where its programs are captured; null: they are submitted.
  static FakeEnvironment* GraphsOf(FakeEnvironment& environment) {
    return GetParam().graphs ? &environment : nullptr;
  }
  static World MakeWorld(const std::shared_ptr<Environment>& environment) {
    return World({.name = GetParam().name,
                  .make = nullptr,
                  .environment = [environment] { return environment; }},
                 kRanks);
  }
  static bool IsTold(World& world) {
    for (int rank = 0; rank < kRanks; ++rank) {
      bool told = false;
      world.log(rank).WaitFor([&](EventLog& log) {
        told = !log.stalls.empty() || !log.mismatches.empty();
        return true;
      });
      if (told) return true;
    }
    return false;
  }
};

// What is not done when it fails: the memory or the communicator would be left, as with CUDA; and
// what fails for a wrong argument alone.
const std::set<std::string>& NeverFail() {
  static const std::set<std::string> calls = {"CommAbort",     "CommDestroy",
                                              "CommFinalize",  "EventDestroy",
                                              "StreamDestroy", "Free",
                                              "RedOpDestroy",  "GroupEnd",
                                              "FreeHost",      "ThreadExchangeStreamCaptureMode"};
  return calls;
}

const std::set<std::string>& Makers() {
  static const std::set<std::string> calls = {
      "EventCreateWithFlags", "GraphRetainUserObject", "HostAlloc",       "Malloc",
      "RedOpCreatePreMulSum", "StreamCreateWithFlags", "UserObjectCreate"};
  return calls;
}

// Of a function of NCCL's, else of CUDA's.
bool IsOfNccl(const std::string& call) {
  static const std::set<std::string> calls = [] {
    std::set<std::string> names;
#define RESILIENT_NAME(NAME) names.insert(#NAME);
    RESILIENT_NCCL_FUNCTIONS(RESILIENT_NAME)
    RESILIENT_NCCL_OPTIONAL_FUNCTIONS(RESILIENT_NAME)
#undef RESILIENT_NAME
    return names;
  }();
  return calls.count(call) != 0;
}

// One that comes again at the next try, and one that stays.
std::vector<int> ErrorsOf(const std::string& call) {
  if (IsOfNccl(call)) {
    return {static_cast<int>(NcclResult::kSystemError), static_cast<int>(NcclResult::kRemoteError)};
  }
  return {static_cast<int>(CudaResult::kInvalidValue),
          static_cast<int>(CudaResult::kLaunchFailure)};
}

TEST_P(DeviceFaults, ProgramsCalls_AreThoseOfTheTables) {
  const auto calls = Calls(0);
  for (const std::string& call : GetParam().calls) EXPECT_EQ(calls.count(call), 1u) << call;
}

TEST_P(DeviceFaults, ACallThatFails_EndsWhatItIsForAndNothingElse) {
  for (const int rank : {0, 1}) {
    for (const auto& [call, times] : Calls(rank)) {
      if (NeverFail().count(call) != 0) continue;
      for (int nth = 1; nth <= std::min(times, kCallsMax); ++nth) {
        for (const int error : ErrorsOf(call))
          Live({.rank = rank, .call = call, .nth = nth, .effect = Effect::kFails, .result = error});
      }
    }
  }
  EXPECT_GE(hits_, GetParam().failing);
}

// What was begun or made is there, whatever the call says: left out, as there is no such answer.
TEST_P(DeviceFaults, ACallThatComplains_LeavesNothingBehind) {
  for (const int rank : {0, 1}) {
    for (const auto& [call, times] : Calls(rank)) {
      if (call == "GroupStart" || Makers().count(call) != 0) continue;
      for (const int error : ErrorsOf(call))
        Live({.rank = rank, .call = call, .effect = Effect::kComplains, .result = error});
    }
  }
  EXPECT_GE(hits_, GetParam().complaining);
}

// But for what whoever makes the fabric or submits calls himself, as for any work of the device.
TEST_P(DeviceFaults, ACallThatStands_HoldsUpNoSubmitAndNoAbort) {
  const std::set<std::string> submitting = {
      "DeviceGetAttribute", "EventCreateWithFlags", "GetVersion", "EventRecord", "GetDevice",
      "SetDevice",          "StreamIsCapturing"};
  for (const int rank : {0, 1}) {
    for (const auto& [call, times] : Calls(rank)) {
      if (submitting.count(call) != 0) continue;
      for (int nth = 1; nth <= std::min(times, 2); ++nth)
        Live({.rank = rank, .call = call, .nth = nth, .effect = Effect::kStands});
    }
  }
  EXPECT_GE(hits_, GetParam().standing);
}

class NcclFaults : public DeviceFaults {};

// The second attempt's communicator is the second one.
TEST_P(NcclFaults, AFaultOfOneCommunicator_IsNotOfTheOthers) {
  Live({.rank = 1,
        .call = "CommInitRankConfig",
        .communicator = 1,
        .result = static_cast<int>(NcclResult::kSystemError)});
  EXPECT_EQ(hits_, 1);
  Live({.rank = 1,
        .call = "CommInitRankConfig",
        .communicator = 2,
        .result = static_cast<int>(NcclResult::kSystemError)});
  EXPECT_EQ(hits_, 1) << "the first attempt connects";
}

std::string NameOf(const ::testing::TestParamInfo<Way>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Ways, DeviceFaults, ::testing::ValuesIn(Ways()), NameOf);
INSTANTIATE_TEST_SUITE_P(Ways, NcclFaults, ::testing::Values(Ways().front()), NameOf);

}  // namespace
}  // namespace resilient::testing
