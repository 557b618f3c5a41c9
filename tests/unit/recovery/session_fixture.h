#pragma once

#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <resilient/session.h>

#include "tests/unit/recovery/fakes.h"

namespace resilient::recovery {

// A session between a fake membership line (a real control thread, scripted by the test) and fake
// communicators (a real comm thread; operations complete or are held). Time is manual, and the test
// waits for events, never for time.
class SessionTest : public ::testing::Test {
 protected:
  void Open() {
    auto rendezvous = std::make_unique<FakeRendezvous>(script_, record_);
    rendezvous_ = rendezvous.get();
    auto session = OpenSession(
        options_, std::move(rendezvous),
        [this](CommunicatorEvents& events) -> Result<std::unique_ptr<CommunicatorFactory>> {
          auto factory = std::make_unique<FakeFactory>(factory_script_, record_, events);
          factory_ = factory.get();
          return std::unique_ptr<CommunicatorFactory>(std::move(factory));
        },
        clock_);
    ASSERT_TRUE(session.ok()) << session.status().ToString();
    session_ = *session;
  }

  // RUNNING at generation 1, with the world's group.
  void Boot() {
    Open();
    const Status status = session_->Init();
    ASSERT_TRUE(status.ok()) << status.ToString();
    world_ = CreateGroup(kWorldGroup, {0, 1, 2, 3});
  }

  std::shared_ptr<Group> CreateGroup(const std::string& name, std::vector<int> ranks) {
    auto group = session_->CreateGroup(name, std::move(ranks));
    EXPECT_TRUE(group.ok()) << group.status().ToString();
    return group.ok() ? *group : nullptr;
  }

  Status Run(Group& group) {
    Outcome outcome;
    auto seq = group.Submit({}, outcome.Callback());
    return seq.ok() ? outcome.Await() : seq.status();
  }

  void FenceAndSettle(std::uint64_t generation, const Status& cause) {
    rendezvous_->SayFence(generation, cause);
    rendezvous_->Settle();
  }

  std::future<Status> StartInit() {
    return std::async(std::launch::async, [this] { return session_->Init(); });
  }
  std::future<Status> StartRebuild() {
    return std::async(std::launch::async, [this] { return session_->Rebuild({}); });
  }

  // Waits until the membership line or a communicator was asked so often: &Record::joins.
  template <typename List>
  bool AwaitCount(List Record::*list, std::size_t count) {
    return record_->Await(
        [list, count](const Record& record) { return (record.*list).size() == count; });
  }
  std::size_t Joins() {
    return record_->Get<std::size_t>([](const Record& record) { return record.joins.size(); });
  }
  std::vector<Report> Reports() {
    return record_->Get<std::vector<Report>>([](const Record& record) { return record.reports; });
  }

  FakeRendezvous::Script script_;
  FakeFactory::Script factory_script_;
  SessionOptions options_{.rank = 1, .world_size = 4, .interrupt = GiveUpAtTestBound()};
  ManualClock clock_;
  std::shared_ptr<Record> record_ = std::make_shared<Record>();
  FakeRendezvous* rendezvous_ = nullptr;
  FakeFactory* factory_ = nullptr;
  // Last: destroyed first.
  std::shared_ptr<Session> session_;
  std::shared_ptr<Group> world_;
};

}  // namespace resilient::recovery
