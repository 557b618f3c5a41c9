// Goal: a knock is answered by every process that lives and was in that world, whatever its links
// and operations do, and by nothing else.
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/comm/op_timeouts.h"
#include "runtime/net/socket.h"
#include "tests/unit/comm/comm_world.h"

namespace resilient::testing {
namespace {

using ::testing::HasSubstr;

// What the one that knocks is told. Thread: thread-safe.
class Heard final : public CommunicatorEvents {
 public:
  void OnConnected(const std::string&, std::uint64_t) override {}
  void OnLinkLost(const std::string&, std::uint64_t, int, const Status&) override {}
  void OnUnreached(const std::string&, std::uint64_t, int, const Status&) override {}
  void OnMismatch(const std::string&, std::uint64_t, const Status&) override {}
  void OnStalled(const std::string&, std::uint64_t, const Status&) override {}
  void OnWaiting(const std::string&, std::uint64_t, std::vector<WaitingOperation>) override {}
  void OnProgress(std::uint64_t, GroupProgress) override {}
  void OnKnocked(std::uint64_t generation, int global_rank, const Status& found) override {
    const std::lock_guard lock(mutex_);
    if (generation == 7) found_.insert_or_assign(global_rank, found);
  }

  // Of so many ranks.
  std::map<int, Status> Await(std::size_t count) {
    EXPECT_TRUE(Eventually([&] {
      const std::lock_guard lock(mutex_);
      return found_.size() >= count;
    }));
    const std::lock_guard lock(mutex_);
    return found_;
  }

 private:
  std::mutex mutex_;
  std::map<int, Status> found_;  // Guarded by mutex_.
};

// Rank 0 knocks; the others are fabrics, or only ports.
class KnockTest : public ::testing::Test {
 protected:
  void SetUp() override { Add(true); }
  // A fabric, with or without the world's communicator.
  void Add(bool in_world) {
    auto fabric = MakeCpuFabric({}, clock_, heard_);
    ASSERT_TRUE(fabric.ok());
    fabrics_.push_back(std::move(fabric).value());
    in_world_.push_back(in_world);
    spec_.members.push_back({.global_rank = static_cast<int>(spec_.members.size()),
                             .endpoint = fabrics_.back()->endpoint()});
  }
  // A process that was stopped: its kernel takes connections.
  void AddStopped() {
    Result<FileDescriptor> listener = ListenTcp({.host = "127.0.0.1", .port = 0}, 16);
    ASSERT_TRUE(listener.ok());
    AddEndpoint(FormatHostPort(*LocalAddress(*listener)));
    listeners_.push_back(std::move(*listener));
  }
  void AddEndpoint(const std::string& address) {
    fabrics_.push_back(nullptr);
    in_world_.push_back(false);
    spec_.members.push_back({.global_rank = static_cast<int>(spec_.members.size()),
                             .endpoint = EncodeEndpoint({.address = address})});
  }
  void Join() {
    for (std::size_t rank = 0; rank < fabrics_.size(); ++rank) {
      if (!in_world_[rank]) continue;
      GroupSpec own = spec_;
      own.rank = static_cast<int>(rank);
      communicators_.push_back(fabrics_[rank]->Create(std::move(own), nullptr));
    }
  }
  std::map<int, Status> KnockAtAll(Duration patience) {
    std::vector<int> ranks;
    for (int rank = 1; rank < static_cast<int>(spec_.members.size()); ++rank) ranks.push_back(rank);
    fabrics_[0]->Knock(spec_, ranks, patience);
    return heard_.Await(ranks.size());
  }

  SystemClock clock_;
  Heard heard_;
  GroupSpec spec_{.name = "world", .generation = 7, .attempt = 1, .secret = "s", .members = {}};
  std::vector<FileDescriptor> listeners_;
  std::vector<bool> in_world_;
  std::vector<std::unique_ptr<CommunicatorFactory>> fabrics_;
  std::vector<std::shared_ptr<Communicator>> communicators_;
};

TEST_F(KnockTest, WhoeverLives_Answers) {
  for (int i = 0; i < 40; ++i) Add(true);  // More than are asked at a time.
  Join();
  const auto found = KnockAtAll(kBound);
  for (const auto& [rank, status] : found)
    EXPECT_TRUE(status.ok()) << rank << ": " << status.ToString();
}

TEST_F(KnockTest, WhoeverHasLeftItsGroup_LivesAndAnswers) {
  Add(true);
  Join();
  communicators_[1]->Leave();
  const auto found = KnockAtAll(kBound);
  EXPECT_TRUE(found.at(1).ok()) << found.at(1).ToString();
}

TEST_F(KnockTest, StoppedProcess_IsSilentAndHoldsUpNobody) {
  AddStopped();
  Add(true);
  Join();
  const auto found = KnockAtAll(Millis(500));
  EXPECT_EQ(found.at(1).code(), StatusCode::kUnreachable);
  EXPECT_THAT(found.at(1).message(), HasSubstr("gives no answer"));
  EXPECT_TRUE(found.at(2).ok()) << found.at(2).ToString();
}

TEST_F(KnockTest, LongPatience_Ends) {
  AddStopped();
  Join();
  EXPECT_FALSE(KnockAtAll(kUnwatched + Millis(300)).at(1).ok());
}

TEST_F(KnockTest, PortOfNobody_IsNamedWithWhatCame) {
  AddStopped();
  listeners_.clear();
  Join();
  const auto found = KnockAtAll(Millis(200));
  EXPECT_EQ(found.at(1).code(), StatusCode::kRefused) << found.at(1).ToString();
}

TEST_F(KnockTest, ProcessOfAnotherJob_IsNoAnswer) {
  Add(false);
  Join();
  GroupSpec other = spec_;
  other.rank = 1;
  other.secret = "another";
  communicators_.push_back(fabrics_[1]->Create(std::move(other), nullptr));
  const auto found = KnockAtAll(Millis(300));
  EXPECT_FALSE(found.at(1).ok());
}

}  // namespace
}  // namespace resilient::testing
