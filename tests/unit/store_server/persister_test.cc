// Goal: the writer thread keeps steps in order, makes one transaction of those that gathered, tells
// the loop only what is kept, and nothing more after a failure. Method: an engine that is held up
// and fails on command, and a real loop.

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "store/server/held_effects.h"
#include "store/server/persister.h"

namespace resilient::store {
namespace {

constexpr std::chrono::seconds kPersistPatience(20);

// What the test and the writer thread share. Outlives the engine.
class Disk {
 public:
  // Commits wait from now on.
  void Hold() {
    Set([this] { held_ = true; });
  }
  void Release() {
    Set([this] { held_ = false; });
  }
  void Break() {
    Set([this] { broken_ = true; });
  }

  Status Commit(const std::vector<Write>& writes) {
    std::unique_lock lock(mutex_);
    ++begun_;
    changed_.notify_all();
    if (!changed_.wait_for(lock, kPersistPatience, [this] { return !held_; })) {
      ADD_FAILURE() << "nobody released the disk";
    }
    if (broken_) return Status(StatusCode::kInternal, "the disk is broken");
    transactions_.push_back(writes);
    return {};
  }
  Status Tend() {
    const std::lock_guard lock(mutex_);
    ++tended_;
    return tend_broken_ ? Status(StatusCode::kInternal, "the disk is broken") : Status();
  }
  void BreakTend() {
    Set([this] { tend_broken_ = true; });
  }

  void AwaitBegun(int count) {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, kPersistPatience, [&] { return begun_ >= count; }));
  }
  std::vector<std::vector<Write>> transactions() {
    const std::lock_guard lock(mutex_);
    return transactions_;
  }
  int tended() {
    const std::lock_guard lock(mutex_);
    return tended_;
  }

 private:
  void Set(const std::function<void()>& change) {
    const std::lock_guard lock(mutex_);
    change();
    changed_.notify_all();
  }

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  bool broken_ = false;
  bool tend_broken_ = false;
  int begun_ = 0;
  int tended_ = 0;
  std::vector<std::vector<Write>> transactions_;
};

class FakeEngine final : public Engine {
 public:
  explicit FakeEngine(Disk& disk) : disk_(disk) {}
  Status Load(const std::function<void(std::string_view, std::string_view)>&) override {
    return {};
  }
  Status Commit(const std::vector<Write>& writes) override { return disk_.Commit(writes); }
  Status Tend() override { return disk_.Tend(); }

 private:
  Disk& disk_;
};

class PersisterTest : public ::testing::Test {
 protected:
  PersisterTest()
      : guard_(loop_, [] {
          ADD_FAILURE() << "the loop waited for too long";
          abort();
        }) {
    guard_.Start(std::chrono::milliseconds(kPersistPatience).count(), 0);
    persister_ = std::make_unique<Persister>(
        loop_, std::make_unique<FakeEngine>(disk_),
        PersisterEvents{.on_kept = [this](std::uint64_t ticket) { OnKept(ticket); },
                        .on_failure =
                            [this](const Status& why) {
                              failure_ = why;  // Read after Stop.
                            }});
  }
  ~PersisterTest() override { guard_.Close(); }

  void OnKept(std::uint64_t ticket) {
    kept_.push_back(ticket);
    if (ticket >= wanted_) uv_stop(loop_.get());
  }
  void AwaitKept(std::uint64_t ticket) {
    wanted_ = ticket;
    if (kept_.empty() || kept_.back() < ticket) loop_.Run();
    ASSERT_FALSE(kept_.empty());
    EXPECT_EQ(kept_.back(), ticket);
  }
  std::uint64_t AddAndFlush(std::vector<Write> writes) {
    const std::uint64_t ticket = persister_->Add(std::move(writes));
    persister_->Flush();
    return ticket;
  }

  Disk disk_;
  UvLoop loop_;
  UvTimer guard_;
  std::vector<std::uint64_t> kept_;
  std::uint64_t wanted_ = 0;
  Status failure_;
  std::unique_ptr<Persister> persister_;
};

TEST_F(PersisterTest, Step_IsCommittedThenTold) {
  AwaitKept(AddAndFlush({{"a", "1"}, {"b", std::nullopt}}));
  ASSERT_EQ(disk_.transactions().size(), 1u);
  EXPECT_EQ(disk_.transactions()[0], (std::vector<Write>{{"a", "1"}, {"b", std::nullopt}}));
  persister_->Stop();
  EXPECT_EQ(disk_.tended(), 1);
  EXPECT_TRUE(failure_.ok());
}

TEST_F(PersisterTest, NothingIsTold_BeforeItIsKept) {
  disk_.Hold();
  AddAndFlush({{"a", "1"}});
  disk_.AwaitBegun(1);
  uv_run(loop_.get(), UV_RUN_NOWAIT);
  EXPECT_TRUE(kept_.empty());
  disk_.Release();
  AwaitKept(1);
}

TEST_F(PersisterTest, StepsThatGather_AreOneTransactionWithTheLastOfEachRow) {
  disk_.Hold();
  AddAndFlush({{"a", "1"}});
  disk_.AwaitBegun(1);
  AddAndFlush({{"a", "2"}, {"b", "2"}});
  persister_->Add({{"c", "3"}});
  const std::uint64_t last = AddAndFlush({{"b", std::nullopt}, {"a", "4"}});
  disk_.Release();
  AwaitKept(last);
  const auto transactions = disk_.transactions();
  ASSERT_EQ(transactions.size(), 2u);
  EXPECT_EQ(transactions[1], (std::vector<Write>{{"c", "3"}, {"b", std::nullopt}, {"a", "4"}}));
}

TEST_F(PersisterTest, StepsOfOneTurn_WaitForFlush) {
  persister_->Add({{"a", "1"}});
  const std::uint64_t last = persister_->Add({{"b", "1"}});
  EXPECT_EQ(persister_->last_ticket(), last);
  persister_->Flush();
  AwaitKept(last);
  EXPECT_EQ(disk_.transactions().size(), 1u);
}

TEST_F(PersisterTest, Failure_EndsTheWritingAndIsToldOnce) {
  AwaitKept(AddAndFlush({{"a", "1"}}));
  disk_.Hold();
  disk_.Break();
  AddAndFlush({{"a", "2"}});
  disk_.AwaitBegun(2);
  AddAndFlush({{"a", "3"}});
  disk_.Release();
  persister_->Stop();
  EXPECT_EQ(failure_.message(), "the disk is broken");
  EXPECT_EQ(disk_.transactions().size(), 1u);
  uv_run(loop_.get(), UV_RUN_NOWAIT);
  EXPECT_THAT(kept_, ::testing::ElementsAre(1u));
}

TEST_F(PersisterTest, FailedHousekeeping_IsAFailure) {
  disk_.BreakTend();
  AddAndFlush({{"a", "1"}});
  disk_.AwaitBegun(1);
  persister_->Stop();
  EXPECT_FALSE(failure_.ok());
}

TEST_F(PersisterTest, Stop_KeepsWhatWasAdded) {
  persister_->Add({{"a", "1"}});
  persister_->Stop();
  persister_->Stop();
  EXPECT_EQ(disk_.transactions().size(), 1u);
}

Effects EffectsWithReply(std::uint64_t seq, std::string value = {}) {
  Effects effects;
  Reply reply;
  reply.seq = seq;
  reply.value = std::move(value);
  effects.send.push_back({1, reply});
  return effects;
}

TEST(HeldEffects, Steps_ComeOutInOrderWhenTheirTicketIsKept) {
  HeldEffects held;
  held.Push(1, 10, EffectsWithReply(1));
  held.Push(2, 10, EffectsWithReply(2));
  held.Push(2, 0, EffectsWithReply(3));
  held.Push(3, 10, EffectsWithReply(4));
  EXPECT_FALSE(held.Pop(0));
  std::vector<std::uint64_t> seqs;
  while (const auto step = held.Pop(2)) {
    seqs.push_back(std::get<Reply>(step->effects.send.at(0).message).seq);
  }
  EXPECT_THAT(seqs, ::testing::ElementsAre(1u, 2u, 3u));
  EXPECT_FALSE(held.empty());
  EXPECT_TRUE(held.Pop(3));
  EXPECT_TRUE(held.empty());
  EXPECT_EQ(held.bytes(), 0u);
}

TEST(HeldEffects, Bytes_CountWritesAndMessages) {
  HeldEffects held;
  held.Push(1, 5000, EffectsWithReply(1, std::string(7000, 'x')));
  EXPECT_GE(held.bytes(), 12000u);
  EXPECT_LT(held.bytes(), 13000u);
  EXPECT_GE(BytesOf({{std::string(100, 'r'), std::string(200, 'v')}, {"r", std::nullopt}}), 301u);
}

}  // namespace
}  // namespace resilient::store
