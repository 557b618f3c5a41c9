// Goal: any mix of operations that ranks may submit gives what a serial program would give.
// Method: programs from a seed: several groups, each rank's operations for each group submitted by
// a thread of its own with many in flight. Every result is compared bit for bit with the serial
// reference. To run one seed again: RESILIENT_TEST_SEED=... comm_programs_test.

#include <algorithm>
#include <cstdlib>
#include <deque>

#include "runtime/base/random.h"
#include "tests/support/sanitizers.h"
#include "tests/unit/comm/conformance.h"
#include "tests/unit/comm/trial.h"

namespace resilient::testing {
namespace {

constexpr int kPrograms = kSanitized ? 6 : 24;
constexpr std::size_t kMaxInFlight = 48;
// Of one operation over all ranks.
constexpr std::size_t kMaxElements = 200'000;

// One rank sends, another receives.
struct Message {
  int from = 0;
  int to = 0;
  std::uint32_t tag = 0;
  bool from_any = false;  // The recv does not name its sender; no other message has its tag.
  std::vector<float> sent;
  std::vector<float> got;
  int sender = -1;
};

// All other ranks send to one, which takes what comes first.
struct FanIn {
  int to = 0;
  std::uint32_t tag = 0;
  std::vector<std::vector<float>> sent;  // By sender.
  std::deque<std::vector<float>> got;    // By recv.
  std::vector<int> senders;
};

// All ranks have a batch of sends to some of the others and of what these send to them.
struct Exchange {
  std::vector<Message> messages;
  std::vector<std::vector<Operation>> batches;  // By rank.
};

// One step of a program: one of these.
struct Step {
  std::unique_ptr<Trial> trial;
  std::unique_ptr<Message> message;
  std::unique_ptr<FanIn> fan_in;
  std::unique_ptr<Exchange> exchange;
};

std::vector<float> RandomFloats(std::size_t count, Random& random) {
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random.Unit());
  return values;
}

// The operations of one group.
class Program {
 public:
  // `hosts`: see Call.
  Program(const Transport& transport, int size, int steps,
          std::vector<std::vector<std::size_t>> hosts, Random& random)
      : transport_(transport), size_(size), hosts_(std::move(hosts)) {
    for (int i = 0; i < steps; ++i) steps_.push_back(MakeStep(random));
  }

  // What `rank` submits in `step`, in this order.
  std::vector<Operation> OperationsOf(std::size_t step, int rank) {
    Step& one = steps_[step];
    if (one.trial != nullptr) return {one.trial->At(rank)};
    if (one.message != nullptr) return OperationsOf(*one.message, rank);
    if (one.exchange != nullptr) return one.exchange->batches[static_cast<std::size_t>(rank)];
    return OperationsOf(*one.fan_in, rank);
  }
  std::size_t steps() const { return steps_.size(); }
  bool IsBatch(std::size_t step) const { return steps_[step].exchange != nullptr; }

  void Check() const {
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      SCOPED_TRACE("step " + std::to_string(i));
      const Step& step = steps_[i];
      if (step.trial != nullptr) {
        for (int rank = 0; rank < size_; ++rank) ASSERT_EQ(step.trial->WhatIsWrong(rank), "");
      } else if (step.message != nullptr) {
        ASSERT_TRUE(step.message->got == step.message->sent);
        ASSERT_EQ(step.message->sender, step.message->from);
      } else if (step.exchange != nullptr) {
        for (const Message& message : step.exchange->messages)
          ASSERT_TRUE(message.got == message.sent && message.sender == message.from);
      } else {
        Check(*step.fan_in);
      }
    }
  }

 private:
  std::size_t RandomCount(Random& random) {
    return random.Below(3) == 0 ? random.Below(4) : random.Below(20'000);
  }
  int RandomRank(Random& random) {
    return static_cast<int>(random.Below(static_cast<std::uint64_t>(size_)));
  }

  Step MakeStep(Random& random) {
    Step step;
    std::uint64_t kind = size_ == 1 ? 9 : random.Below(11);
    if (!transport_.has_tags && (kind == 0 || kind == 3)) kind = 1;
    if (kind == 10) {
      step.exchange = MakeExchange(random);
    } else if (kind == 0) {
      step.fan_in = std::make_unique<FanIn>();
      step.fan_in->to = RandomRank(random);
      step.fan_in->tag = next_tag_++;
      const std::size_t count = RandomCount(random);
      for (int rank = 0; rank < size_; ++rank)
        step.fan_in->sent.push_back(RandomFloats(count, random));
      step.fan_in->got.assign(static_cast<std::size_t>(size_ - 1), std::vector<float>(count));
      step.fan_in->senders.assign(static_cast<std::size_t>(size_ - 1), -1);
    } else if (kind <= 3) {
      step.message = std::make_unique<Message>();
      Message& message = *step.message;
      message.from = RandomRank(random);
      message.to = (message.from + 1 + RandomRank(random) % (size_ - 1)) % size_;
      message.from_any = kind == 3;
      message.tag = message.from_any ? next_tag_++ : static_cast<std::uint32_t>(random.Below(3));
      message.sent = RandomFloats(RandomCount(random), random);
      message.got.resize(message.sent.size());
    } else {
      const auto n = static_cast<std::size_t>(size_);
      Call probe = RandomCall(size_, 0, random);
      while (!Supports(probe)) probe = RandomCall(size_, 0, random);
      const std::size_t parts = probe.kind == OpKind::kAllToAll ? n * n : n;
      Call call = probe;
      call.hosts = hosts_;
      SetRandomCounts(call, size_, kMaxElements / parts, random);
      step.trial = std::make_unique<Trial>(call, random);
    }
    return step;
  }

  bool Supports(const Call& call) const {
    Operation op;
    op.kind = call.kind;
    op.dtype = call.dtype;
    op.reduce = call.reduce;
    op.factor = call.factor;
    return transport_.Supports(op, size_);
  }

  std::unique_ptr<Exchange> MakeExchange(Random& random) {
    auto exchange = std::make_unique<Exchange>();
    exchange->messages.reserve(static_cast<std::size_t>(size_ * size_));
    exchange->batches.resize(static_cast<std::size_t>(size_));
    for (int from = 0; from < size_; ++from) {
      for (int to = 0; to < size_; ++to) {
        if (from == to || random.Below(2) == 0) continue;
        Message& message = exchange->messages.emplace_back();
        message.from = from;
        message.to = to;
        message.sent = RandomFloats(RandomCount(random), random);
        message.got.resize(message.sent.size());
        for (const int rank : {from, to}) {
          std::vector<Operation>& batch = exchange->batches[static_cast<std::size_t>(rank)];
          const auto at = static_cast<std::ptrdiff_t>(random.Below(batch.size() + 1));
          batch.insert(batch.begin() + at, OperationsOf(message, rank).front());
        }
      }
    }
    return exchange;
  }

  static std::vector<Operation> OperationsOf(Message& message, int rank) {
    if (rank == message.from) return {SendOp(message.sent, message.to, message.tag)};
    if (rank != message.to) return {};
    Operation recv = RecvOp(message.got, message.from_any ? kAnyPeer : message.from, message.tag);
    recv.sender = &message.sender;
    return {recv};
  }
  static std::vector<Operation> OperationsOf(FanIn& fan_in, int rank) {
    if (rank != fan_in.to)
      return {SendOp(fan_in.sent[static_cast<std::size_t>(rank)], fan_in.to, fan_in.tag)};
    std::vector<Operation> recvs;
    for (std::size_t i = 0; i < fan_in.got.size(); ++i) {
      recvs.push_back(RecvOp(fan_in.got[i], kAnyPeer, fan_in.tag));
      recvs.back().sender = &fan_in.senders[i];
    }
    return recvs;
  }
  static void Check(const FanIn& fan_in) {
    std::vector<int> heard = fan_in.senders;
    std::sort(heard.begin(), heard.end());
    std::vector<int> others;
    for (int rank = 0; rank <= static_cast<int>(heard.size()); ++rank) {
      if (rank != fan_in.to) others.push_back(rank);
    }
    ASSERT_EQ(heard, others);
    for (std::size_t i = 0; i < fan_in.got.size(); ++i)
      ASSERT_TRUE(fan_in.got[i] == fan_in.sent[static_cast<std::size_t>(fan_in.senders[i])]);
  }

  const Transport& transport_;
  const int size_;
  const std::vector<std::vector<std::size_t>> hosts_;
  std::vector<Step> steps_;
  std::uint32_t next_tag_ = 100;  // Of messages whose recvs name no sender.
};

std::vector<std::vector<std::size_t>> HostsOf(const Transport& transport, int size) {
  if (!transport.hierarchical) return {};
  std::map<int, std::vector<std::size_t>> hosts;  // Of which those with lower numbers come first.
  for (int rank = 0; rank < size; ++rank)
    hosts[transport.host_of(rank)].push_back(static_cast<std::size_t>(rank));
  std::vector<std::vector<std::size_t>> ranks;
  for (auto& [host, of_host] : hosts) ranks.push_back(std::move(of_host));
  return ranks;
}

// Submits all of `rank`; at most kMaxInFlight wait at a time, and a batch.
void RunRank(Program& program, Communicator& communicator, int rank, ExecutionStream stream) {
  std::deque<Pending> in_flight;
  for (std::size_t step = 0; step < program.steps(); ++step) {
    std::vector<Operation> ops = program.OperationsOf(step, rank);
    for (Operation& op : ops) op.stream = stream;
    if (program.IsBatch(step)) {
      for (Pending& one : Pending::OfBatch(communicator, std::move(ops)))
        in_flight.push_back(std::move(one));
    } else {
      for (Operation& op : ops) in_flight.push_back(Pending::Of(communicator, std::move(op)));
    }
    while (in_flight.size() > kMaxInFlight) {
      EXPECT_TRUE(in_flight.front().Wait().ok()) << "step " << step;
      in_flight.pop_front();
    }
  }
  for (const Pending& one : in_flight) {
    const Status status = one.Wait();
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
}

void RunPrograms(const Transport& transport, std::uint64_t seed) {
  SCOPED_TRACE("RESILIENT_TEST_SEED=" + std::to_string(seed) + " on " + transport.name);
  Random random(seed);
  const int size = 1 + static_cast<int>(random.Below(8));
  const int groups = 1 + static_cast<int>(random.Below(3));
  World world(transport, size);
  std::deque<Program> programs;
  std::vector<std::vector<std::shared_ptr<Communicator>>> communicators;
  for (int group = 0; group < groups; ++group) {
    programs.emplace_back(transport, size, 20 + static_cast<int>(random.Below(30)),
                          HostsOf(transport, size), random);
    communicators.push_back(world.CreateAll("group" + std::to_string(group)));
  }
  std::vector<std::thread> threads;
  for (std::size_t group = 0; group < programs.size(); ++group) {
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, group, rank, stream = world.NewStream()] {
        RunRank(programs[group], *communicators[group][static_cast<std::size_t>(rank)], rank,
                stream);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (const Program& program : programs) program.Check();
}

class RandomPrograms : public ::testing::TestWithParam<Transport> {};

INSTANTIATE_TEST_SUITE_P(Transports, RandomPrograms, ::testing::ValuesIn(ProgramTransports()),
                         [](const auto& info) { return info.param.name; });

TEST_P(RandomPrograms, EqualTheSerialReference) {
  if (const char* seed = std::getenv("RESILIENT_TEST_SEED"))
    return RunPrograms(GetParam(), std::strtoull(seed, nullptr, 10));
  for (std::uint64_t seed = 1; seed <= kPrograms; ++seed) {
    RunPrograms(GetParam(), seed);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace resilient::testing
