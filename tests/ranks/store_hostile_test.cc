// Goal: whatever clients send, the server lives, keeps what it has acknowledged, stays within its
// memory, and another tenant's member keeps its lease and gets its answers. Method: the real
// binary, durable, with small limits, killed and started again in between; hostile peers
// (hostile_peers.h) for RESILIENT_HOSTILE_SECONDS (default 4), and a member of another job that
// works meanwhile. RESILIENT_HOSTILE_SEED repeats the acts of a run, not its timing.

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/ranks/hostile_peers.h"
#include "tests/ranks/store_limits_support.h"
#include "tests/support/from_environment.h"
#include "tests/support/test_directory.h"

namespace resilient::store {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;

// Of the limits below, and the program itself. With AddressSanitizer all is slower, and fills less.
constexpr std::size_t kMemoryMax = (testing::kAddressSanitized ? 300 : 400) * kMebi;
constexpr Duration kActsPerTurn = Millis(20);  // Of the witness, which has a lease to keep.
constexpr int kTurnsPerLife = 100;

// The other tenant: the only rank of a world, and in a job of its own, as a new life of the first
// one begins without keys, a client that counts.
class Witness {
 public:
  void Meet(const HostPort& store) {
    member_ = std::make_unique<RawClient>(store);
    ASSERT_TRUE(member_->SayHello(MakeTestHello(Role::kControl, "witness")));
    ASSERT_TRUE(member_->Call(JoinOp{MakeJoin(0, 1)})->status.ok());
    // Of a server that was killed the member before it has a lease still.
    const Deadline seated = In(kPatience);
    while (!member_->Await<View>(In(Millis(500)))) {
      ASSERT_FALSE(seated.ExpiredAt(Now()) || member_->ended());
      ASSERT_TRUE(member_->Send({.op = HeartbeatOp{}}));
    }
    client_ = std::make_unique<RawClient>(store);
    ASSERT_TRUE(client_->SayHello(MakeTestHello(Role::kRequest, "witness-keys")));
  }
  // It has all its answers, in time, and is a member still.
  void Work() {
    const Instant begun = Now();
    const auto counted = client_->Call(AddOp{"count", 1});
    ASSERT_TRUE(counted) << (client_->ended() ? "its connection has ended" : "no answer")
                         << " after " << ToSeconds(Now() - begun) << " s";
    ASSERT_TRUE(counted->status.ok()) << counted->status.ToString();
    ASSERT_EQ(counted->number, ++count_);
    const Instant called = Now();
    ASSERT_TRUE(member_->Send({.op = HeartbeatOp{static_cast<std::uint64_t>(count_)}}));
    while (true) {
      const auto message = member_->Receive(In(kPatience));
      ASSERT_TRUE(message) << (member_->ended() ? "its connection has ended" : "no answer");
      const Event* event = std::get_if<Event>(&*message);
      if (event == nullptr) continue;
      if (std::holds_alternative<HeartbeatAckEvent>(*event)) break;
      if (const auto* lost = std::get_if<SessionLostEvent>(event)) {
        FAIL() << "it is no member any more: " << lost->why.ToString() << "; its last turn ended "
               << ToSeconds(begun - worked_) << " s before this one, whose call took "
               << ToSeconds(called - begun) << " s";
      }
      if (const auto* fence = std::get_if<Fence>(event)) FAIL() << fence->cause.ToString();
    }
    worked_ = Now();
    slowest_ = std::max(slowest_, worked_ - begun);
  }
  Duration slowest() const { return slowest_; }

 private:
  std::unique_ptr<RawClient> member_;
  std::unique_ptr<RawClient> client_;
  std::int64_t count_ = 0;
  Duration slowest_{};
  Instant worked_{};
};

// AddressSanitizer keeps 256 MiB of what was freed, by default.
void KeepLittleOfWhatWasFreed() {
  const char* const options = std::getenv("ASAN_OPTIONS");
  const std::string with =
      (options != nullptr ? std::string(options) + ":" : "") + "quarantine_size_mb=8";
  setenv("ASAN_OPTIONS", with.c_str(), 1);
}

TEST(HostilePeers, TheStoreAndItsOtherTenantsLiveOn) {
  const std::uint64_t seed = FromEnvironment("RESILIENT_HOSTILE_SEED", RandomSeed() % 1000000);
  const auto time = seconds(FromEnvironment("RESILIENT_HOSTILE_SECONDS", 4));
  SCOPED_TRACE("RESILIENT_HOSTILE_SEED=" + std::to_string(seed));
  const TestDirectory data;
  KeepLittleOfWhatWasFreed();
  std::vector<std::string> arguments =
      WithLimits({"bytes-per-job=24MiB", "bytes=48MiB", "result-bytes-per-job=16MiB",
                  "result-total-bytes=32MiB", "change-total-bytes=16MiB", "input-total-bytes=32MiB",
                  "output-bytes=16MiB", "output-total-bytes=32MiB", "seats-per-job=200000",
                  "seats=300000", "sessions=300", "jobs=8", "held-bytes=16MiB", "slow-seconds=1"});
  arguments.insert(arguments.end(), {"--data", data / "store", "--log-level", "warn"});
  HostilePeers hostile(seed);
  Witness witness;
  std::size_t lives = 0;
  std::size_t most_memory = 0;
  const Deadline end = In(time);
  while (!end.ExpiredAt(Now())) {
    TestServer server(arguments);
    ++lives;
    hostile.Meet(server.address());
    ASSERT_NO_FATAL_FAILURE(witness.Meet(server.address())) << server.process().ErrorText();
    for (int turn = 0; turn < kTurnsPerLife && !end.ExpiredAt(Now()); ++turn) {
      for (const Instant begun = Now(); Now() - begun < kActsPerTurn;) hostile.Act();
      ASSERT_NO_FATAL_FAILURE(witness.Work()) << "in life " << lives << ", turn " << turn << "\n"
                                              << server.process().ErrorText();
    }
    most_memory = std::max(most_memory, ResidentBytes(server.process().pid()));
    // Every other life ends in good order.
    server.process().Signal(lives % 2 == 0 ? SIGTERM : SIGKILL);
    const auto exit = server.process().WaitExit(In(kPatience));
    ASSERT_TRUE(exit);
    EXPECT_EQ(*exit, lives % 2 == 0 ? 0 : -SIGKILL) << server.process().ErrorText();
    EXPECT_THAT(server.process().ErrorText(), Not(HasSubstr("Sanitizer")));
  }
  std::printf(
      "seed %llu: %llu acts in %zu lives of the server; the other tenant waited %.0f ms at most; "
      "%zu MiB\n",
      static_cast<unsigned long long>(seed), static_cast<unsigned long long>(hostile.acts()), lives,
      std::chrono::duration<double, std::milli>(witness.slowest()).count(), most_memory / kMebi);
  if (!testing::kThreadSanitized) {
    EXPECT_LT(most_memory, kMemoryMax);
  }
}

}  // namespace
}  // namespace resilient::store
