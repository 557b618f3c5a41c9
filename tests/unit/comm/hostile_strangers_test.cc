// Goal: whatever strangers do at the port of a rank, the groups there go on with right results, new
// ones are made, and what the strangers take is bounded, and given back. Method: ranks are
// fabrics of one process; strangers that do not know the secret act on a thread of their own for
// RESILIENT_HOSTILE_SECONDS (default 1): hellos with any field, in parts, with a byte changed, with
// messages after them, and other bytes, on connections that stay, end or are reset.
// RESILIENT_HOSTILE_SEED repeats the acts of a run, not its timing.

#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "runtime/comm/endpoint.h"
#include "runtime/comm/wire.h"
#include "runtime/net/socket.h"
#include "tests/support/descriptors.h"
#include "tests/support/from_environment.h"
#include "tests/unit/comm/comm_world.h"

namespace resilient::testing {
namespace {

constexpr int kAttackedRanks = 3;
constexpr std::uint64_t kAttackedGeneration = 5;  // Of the group that is there all the time.

// Owner: a test. Thread: caller-synchronised; the world goes on meanwhile.
class Strangers {
 public:
  // They are at the port of rank 0.
  Strangers(const World& world, std::uint64_t seed)
      : clock_(world.clock),
        random_(seed),
        port_(*ParseHostPort(DecodeEndpoint(world.endpoint(0)).address)) {
    made_.push_back({});
    const std::vector<int> ranks = {0, 1, 2};
    made_.push_back(RanksOfGroup(ranks, "train.py:1 main"));
    made_.push_back(RanksOfGroup(std::vector<int>{0, 2}, "elsewhere.py:1 main"));
  }

  void Act() {
    ++acts_;
    switch (random_.Below(9)) {
      case 0:
        return Begin(SayHello(AnyHello(), "guess"));
      case 1:
        return Begin(SayHello(AnyHello(), "guess") + AnyMessages());
      case 2: {
        const std::string hello = SayHello(AnyHello(), "guess");
        return Begin(hello.substr(0, random_.Below(hello.size())));
      }
      case 3:
        return Begin(Damaged(SayHello(AnyHello(), kSecret)));
      case 4:
        return Begin(resilient::RandomBytes(random_.Below(300)));
      case 5:
        return Begin("");
      case 6:
        return More(random_.Below(2) == 0 ? AnyMessages()
                                          : resilient::RandomBytes(random_.Below(2000)));
      case 7:
        return End(/*reset=*/false);
      default:
        return End(/*reset=*/true);
    }
  }
  std::uint64_t acts() const { return acts_; }

 private:
  static constexpr std::size_t kOpenMost = 48;

  template <typename T>
  const T& OneOf(const std::vector<T>& all) {
    return all[random_.Below(all.size())];
  }

  Hello AnyHello() {
    Hello hello;
    hello.generation = OneOf<std::uint64_t>({0, kAttackedGeneration - 1, kAttackedGeneration,
                                             kAttackedGeneration + 1, kAttackedGeneration + 40,
                                             std::uint64_t{1} << 40, UINT64_MAX});
    hello.attempt = random_.Below(3);
    hello.from = static_cast<int>(random_.Below(kAttackedRanks + 2)) - 1;
    hello.to = static_cast<int>(random_.Below(kAttackedRanks + 2)) - 1;
    hello.lane = static_cast<Lane>(1 + random_.Below(3));
    hello.stream = static_cast<int>(random_.Below(5));
    hello.connector = random_.Next();
    hello.group = OneOf<std::string>({"world", "extra", "", std::string(kMaxGroupName, 'g')});
    hello.shm_offer = OneOf<std::string>({"", "x", std::string(kMaxShmText, '/')});
    hello.made = OneOf(made_);
    hello.from_world = static_cast<int>(random_.Below(kAttackedRanks + 2)) - 1;
    return hello;
  }

  std::string AnyMessages() {
    std::string bytes;
    for (std::uint64_t left = random_.Below(4); left > 0; --left) {
      MessageHeader header;
      header.type = static_cast<MessageType>(1 + random_.Below(5));
      header.kind = static_cast<OpKind>(random_.Below(8));
      header.phase = static_cast<std::uint8_t>(random_.Below(6));
      header.seq = random_.Below(4);
      header.count = OneOf<std::uint64_t>({0, 1, 1000, UINT64_MAX});
      header.payload_bytes = OneOf<std::uint64_t>({0, 10, 4096, UINT64_MAX});
      bytes += EncodeMessage(header) + resilient::RandomBytes(random_.Below(100));
    }
    return bytes;
  }

  std::string Damaged(std::string bytes) {
    char& byte = bytes[random_.Below(bytes.size())];
    byte = static_cast<char>(byte ^ static_cast<char>(1 << random_.Below(8)));
    return bytes;
  }

  void Begin(const std::string& bytes) {
    auto socket = ConnectTcp(port_, clock_, Deadline::After(clock_.Now(), kBound), -1);
    if (!socket.ok()) return;  // It has all that it takes.
    if (open_.size() >= kOpenMost) open_.erase(open_.begin());
    open_.push_back(std::move(*socket));
    Send(open_.back(), bytes);
  }
  void More(const std::string& bytes) {
    if (!open_.empty()) Send(open_[random_.Below(open_.size())], bytes);
  }
  void End(bool reset) {
    if (open_.empty()) return;
    const auto which = open_.begin() + static_cast<std::ptrdiff_t>(random_.Below(open_.size()));
    const linger at_once{.l_onoff = 1, .l_linger = 0};
    if (reset) setsockopt(which->get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    open_.erase(which);
  }
  static void Send(const FileDescriptor& socket, const std::string& bytes) {
    send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  const Clock& clock_;
  Random random_;
  const HostPort port_;
  std::vector<GroupRanks> made_;
  std::vector<FileDescriptor> open_;
  std::uint64_t acts_ = 0;
};

class HostileStrangers : public ::testing::TestWithParam<Transport> {
 protected:
  // With few files, so that a bound is reached soon.
  void SetUp() override {
    getrlimit(RLIMIT_NOFILE, &files_);
    const rlimit few{.rlim_cur = kFiles, .rlim_max = files_.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    world_ = std::make_unique<World>(GetParam(), kAttackedRanks);
    world_->group = world_->CreateAll("world", kAttackedGeneration);
    ExpectAllOk(world_->RunAll([](int) { return BarrierOp(); }));
  }
  void TearDown() override { setrlimit(RLIMIT_NOFILE, &files_); }
  // With whatever number of values, also those that go in pieces.
  void ReduceOnce() {
    const std::size_t count = 1 + random_.Below(random_.Below(8) == 0 ? 100'000 : 500);
    std::vector<std::vector<float>> data(kAttackedRanks, std::vector<float>(count, 1.0f));
    ExpectAllOk(world_->RunAll(
        [&data](int rank) { return AllReduceOp(data[static_cast<std::size_t>(rank)]); }));
    for (const std::vector<float>& sums : data) {
      ASSERT_EQ(sums, std::vector<float>(count, float{kAttackedRanks}));
    }
  }
  // As after a loss, or a new_group().
  void MakeAnother() {
    const auto group = world_->CreateAll("extra", kAttackedGeneration + ++others_);
    std::vector<Pending> pending;
    for (const auto& one : group) pending.push_back(Pending::Of(*one, BarrierOp()));
    for (const Pending& one : pending) ASSERT_TRUE(one.Wait().ok());
  }
  // What they leave with a hello that nobody can judge yet: a quarter of the files of connections
  // that wait for their group, and a sixteenth of those that have ended.
  static constexpr std::size_t kFiles = 1024;
  static constexpr std::size_t kMostThatIsLeft = kFiles / 4 + kFiles / 16;

  const std::uint64_t seed_ = FromEnvironment("RESILIENT_HOSTILE_SEED", RandomSeed() % 1'000'000);
  const std::size_t descriptors_ = OpenDescriptors();
  Random random_{seed_};
  std::unique_ptr<World> world_;
  std::uint64_t others_ = 0;
  rlimit files_{};
};

// Shared memory alone has the ports of TCP.
INSTANTIATE_TEST_SUITE_P(Transports, HostileStrangers,
                         ::testing::Values(AllTransports().front(), AllTransports().back(),
                                           EncryptedTransports().front()),
                         [](const auto& info) { return info.param.name; });

TEST_P(HostileStrangers, GroupsGoOn_AndWhatStrangersTakeIsBounded) {
  SCOPED_TRACE("RESILIENT_HOSTILE_SEED=" + std::to_string(seed_));
  const auto time = std::chrono::seconds(FromEnvironment("RESILIENT_HOSTILE_SECONDS", 1));
  const std::size_t with_world = OpenDescriptors();
  std::uint64_t acts = 0;
  std::atomic<bool> ends = false;
  std::thread actor([&] {
    Strangers strangers(*world_, seed_);
    while (!ends) strangers.Act();
    acts = strangers.acts();
  });
  std::size_t rounds = 0;
  for (const Instant end = world_->clock.Now() + time; world_->clock.Now() < end && !HasFailure();
       ++rounds) {
    ReduceOnce();
    if (rounds % 16 == 0) MakeAnother();
  }
  ends = true;
  actor.join();
  for (int rank = 0; rank < kAttackedRanks; ++rank) {
    for (int other = 0; other < kAttackedRanks; ++other) {
      EXPECT_EQ(world_->log(rank).LostCountIn("world", other), 0) << rank << " of " << other;
    }
    EXPECT_EQ(world_->log(rank).MismatchCount(), 0u);
  }
  ReduceOnce();
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() <= with_world + kMostThatIsLeft; }))
      << OpenDescriptors() << " of " << with_world;
  world_.reset();
  EXPECT_TRUE(Eventually([this] { return OpenDescriptors() <= descriptors_; }))
      << OpenDescriptors() << " of " << descriptors_;
  std::printf("seed %llu: %llu acts of strangers, %zu rounds, %llu other groups\n",
              static_cast<unsigned long long>(seed_), static_cast<unsigned long long>(acts), rounds,
              static_cast<unsigned long long>(others_));
}

}  // namespace
}  // namespace resilient::testing
