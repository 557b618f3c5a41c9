// Goal: the memory that ranks share is what it says, goes with them, and is never read before it is
// written nor written before it is read. Method: segments by themselves; boards and collectives of
// threads on one mapping, where ThreadSanitizer sees every access.

#include <dirent.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <ctime>
#include <set>
#include <thread>

#include <gtest/gtest.h>

#include <resilient/abort.h>

#include "runtime/base/log.h"
#include "runtime/base/random.h"
#include "runtime/comm/shm_board.h"
#include "runtime/comm/shm_collective.h"
#include "runtime/comm/shm_segment.h"
#include "tests/unit/comm/comm_world.h"
#include "tests/unit/comm/fault_points.h"
#include "tests/unit/comm/trial.h"

namespace resilient::testing {
namespace {

std::set<std::string> SharedFiles() {
  std::set<std::string> names;
  DIR* dir = opendir("/dev/shm");
  if (dir == nullptr) return names;
  while (const dirent* entry = readdir(dir)) names.insert(entry->d_name);
  closedir(dir);
  return names;
}

ShmGeometry Least(int ranks) { return *ShmGeometry::Within(LeastShmLimit(ranks), ranks); }

TEST(ShmGeometry, StaysWithinItsLimitAndIsOfUse) {
  for (const int ranks : {1, 2, 3, 8, 64, 1000}) {
    for (std::size_t limit = 1; limit < std::size_t{16} << 30; limit = limit * 3 / 2 + 1) {
      const auto geometry = ShmGeometry::Within(limit, ranks);
      if (!geometry) continue;
      EXPECT_EQ(geometry->ranks, ranks);
      EXPECT_LE(geometry->TotalBytes(), limit);
      EXPECT_EQ(geometry->slot_bytes % 4096, 0u);
      EXPECT_GE(geometry->slot_bytes, 256u * static_cast<std::size_t>(ranks));
      EXPECT_GE(geometry->slot_bytes, 16u << 10);
    }
  }
}

TEST(ShmGeometry, TooLittle_IsNone) {
  EXPECT_FALSE(ShmGeometry::Within(0, 1));
  EXPECT_FALSE(ShmGeometry::Within(4096, 1));
  EXPECT_FALSE(ShmGeometry::Within(64u << 20, 100'000));
  const std::size_t least = 4096 + 2 * ShmGeometry::kSlots * (16u << 10);
  EXPECT_FALSE(ShmGeometry::Within(least - 1, 2));
  ASSERT_TRUE(ShmGeometry::Within(least, 2));
  EXPECT_EQ(ShmGeometry::Within(least, 2)->TotalBytes(), least);
}

TEST(ShmSegment, Offer_ReadsWhatItWrote) {
  const ShmSegment::Offer offer{.pid = 12, .fd = 3, .bytes = 1u << 30, .inode = ~0ull};
  const auto read = ShmSegment::DecodeOffer(ShmSegment::EncodeOffer(offer));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->pid, 12);
  EXPECT_EQ(read->fd, 3);
  EXPECT_EQ(read->bytes, 1u << 30);
  EXPECT_EQ(read->inode, ~0ull);
  for (const char* text : {"", " ", "1", "1 2 3", "1 2 3 4 5", "1 2 3 x", "-1 2 3 4", "0 2 3 4",
                           "1 -2 3 4", "1 2 3 4 ", "1 2 3 99999999999999999999", "1 2 -3 4"}) {
    EXPECT_FALSE(ShmSegment::DecodeOffer(text)) << "'" << text << "'";
  }
}

TEST(ShmSegment, IsSharedZeroedAndGone) {
  const std::set<std::string> files = SharedFiles();
  ASSERT_EQ(MappedSegments(), 0u);
  {
    const auto made = ShmSegment::Create(Least(2).TotalBytes());
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    const auto attached = ShmSegment::Attach((*made)->MakeOffer(), Least(2).TotalBytes());
    ASSERT_TRUE(attached.ok()) << attached.status().ToString();
    EXPECT_EQ(MappedSegments(), 2u);
    const auto mine = (*made)->memory();
    const auto theirs = (*attached)->memory();
    ASSERT_EQ(mine.size(), theirs.size());
    ASSERT_NE(mine.data(), theirs.data());
    for (const std::byte byte : theirs) ASSERT_EQ(byte, std::byte{0});
    mine.back() = std::byte{7};
    EXPECT_EQ(theirs.back(), std::byte{7});
    (*made)->CloseOffer();
    theirs.front() = std::byte{8};
    EXPECT_EQ(mine.front(), std::byte{8}) << "lives on without its descriptor";
    EXPECT_EQ(SharedFiles(), files) << "no file has a name";
  }
  EXPECT_EQ(MappedSegments(), 0u);
  EXPECT_EQ(SharedFiles(), files);
}

TEST(ShmSegment, Attach_RefusesWhatWasNotOffered) {
  const auto made = ShmSegment::Create(Least(2).TotalBytes());
  ASSERT_TRUE(made.ok());
  const ShmSegment::Offer offer = (*made)->MakeOffer();
  const auto refused = [](const ShmSegment::Offer& changed, const ShmGeometry& geometry) {
    return ShmSegment::Attach(changed, geometry.TotalBytes()).status().code() ==
           StatusCode::kUnreachable;
  };
  EXPECT_TRUE(refused(offer, Least(3))) << "another size here";
  ShmSegment::Offer changed = offer;
  changed.bytes += 4096;
  EXPECT_TRUE(refused(changed, Least(2))) << "another size there";
  changed = offer;
  changed.inode += 1;
  EXPECT_TRUE(refused(changed, Least(2))) << "the descriptor now is another file";
  changed = offer;
  changed.pid = 0x7ffffff0;
  EXPECT_TRUE(refused(changed, Least(2))) << "no such process";
  // Right in all it says, but it can be made shorter while it is mapped.
  const FileDescriptor unsealed(memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(unsealed.get(), static_cast<off_t>(offer.bytes)), 0);
  struct stat found {};
  ASSERT_EQ(fstat(unsealed.get(), &found), 0);
  changed = {.pid = getpid(), .fd = unsealed.get(), .bytes = offer.bytes, .inode = found.st_ino};
  EXPECT_TRUE(refused(changed, Least(2)));
  (*made)->CloseOffer();
  EXPECT_TRUE(refused(offer, Least(2))) << "closed";
}

TEST(ShmSegment, MoreThanAFileCanHave_IsRefused) {
  const auto made = ShmSegment::Create(std::size_t{1} << 63);
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(made.status().message().find("RESILIENT_SHM_LIMIT"), std::string::npos);
}

TEST(ShmSegment, IsNotInAForkedChild) {
  const auto made = ShmSegment::Create(Least(2).TotalBytes());
  ASSERT_TRUE(made.ok());
  const int fd = (*made)->MakeOffer().fd;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    struct stat found {};
    _exit(MappedSegments() == 0 && fstat(fd, &found) != 0 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// Boards of several ranks on one mapping.
class ShmBoardTest : public ::testing::Test {
 protected:
  void Make(int ranks) {
    auto made = ShmSegment::Create(Least(ranks).TotalBytes());
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    segment_ = std::move(*made);
    boards_.clear();
    for (int rank = 0; rank < ranks; ++rank) {
      boards_.push_back(std::make_unique<ShmBoard>(segment_->memory(), Least(ranks), rank));
    }
  }
  // Runs `body` of each rank on a thread of its own.
  void RunAll(const std::function<void(ShmBoard&)>& body) {
    std::vector<std::thread> threads;
    for (auto& board : boards_) threads.emplace_back([&] { body(*board); });
    for (std::thread& thread : threads) thread.join();
  }
  // Asleep from the first moment: what is slow or lost shows.
  static void WaitForAll(ShmBoard& board, Duration slice) {
    for (int missing = board.FirstMissing(); missing >= 0; missing = board.FirstMissing())
      board.Sleep(missing, slice, [] { return false; });
  }

  SystemClock clock_;
  std::unique_ptr<ShmSegment> segment_;
  std::vector<std::unique_ptr<ShmBoard>> boards_;
};

std::uint64_t ValueOf(int rank, std::uint64_t step) {
  return step * 1000 + static_cast<std::uint64_t>(rank);
}

TEST_F(ShmBoardTest, EveryoneSeesWhatWasPublished_AlsoAStepLater_AndNoWakeUpIsLost) {
  constexpr std::uint64_t kSteps = 3000;
  // One lost wake-up would take longer than all of the test may.
  constexpr std::chrono::seconds kSlice(60);
  for (const int ranks : {1, 2, 3, 8}) {
    Make(ranks);
    const Instant start = clock_.Now();
    std::atomic<int> wrong = 0;
    RunAll([&](ShmBoard& board) {
      Random random(static_cast<std::uint64_t>(board.rank()));
      for (std::uint64_t step = 1; step <= kSteps; ++step) {
        // A result is left in the slot of the step before, as all_reduce does.
        const auto value = ValueOf(board.rank(), step);
        if (step > 1) std::memcpy(board.Slot(board.rank(), step - 1) + 8, &value, 8);
        std::memcpy(board.NextSlot(), &value, 8);
        board.Publish();
        if (random.Below(64) == 0) std::this_thread::yield();
        WaitForAll(board, kSlice);
        for (int rank = 0; rank < board.size(); ++rank) {
          std::uint64_t now = 0, before = 0;
          std::memcpy(&now, board.Slot(rank, step), 8);
          if (step > 1) std::memcpy(&before, board.Slot(rank, step - 1) + 8, 8);
          if (now != ValueOf(rank, step)) ++wrong;
          if (step > 1 && before != ValueOf(rank, step)) ++wrong;
        }
      }
    });
    EXPECT_EQ(wrong.load(), 0);
    EXPECT_LT(clock_.Now() - start, kSlice);
  }
}

TEST_F(ShmBoardTest, AWaitForALatePeer_TakesNoProcessorTime) {
  Make(2);
  std::atomic<int> slices = 0;
  timespec used{};
  std::thread waiter([&] {
    ShmBoard& board = *boards_[0];
    board.Publish();
    for (int missing = board.FirstMissing(); missing >= 0; missing = board.FirstMissing()) {
      board.Sleep(missing, Millis(20), [] { return false; });
      ++slices;
    }
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  });
  EXPECT_TRUE(ComesTo(slices, 10));
  boards_[1]->Publish();
  waiter.join();
  const auto nanoseconds = std::chrono::seconds(used.tv_sec) + Duration(used.tv_nsec);
  EXPECT_LT(nanoseconds, Millis(50)) << "of at least 180 ms";
}

TEST_F(ShmBoardTest, WakeSelf_IsNeverMissed) {
  Make(2);
  constexpr std::chrono::seconds kSlice(60);
  ShmBoard& board = *boards_[0];
  board.Publish();
  const Instant start = clock_.Now();
  for (int i = 0; i < 2000; ++i) {
    std::atomic<bool> stop = false;
    std::thread stopper([&] {
      stop.store(true);
      board.WakeSelf();
    });
    while (!stop.load()) board.Sleep(1, kSlice, [&] { return stop.load(); });
    stopper.join();
  }
  EXPECT_LT(clock_.Now() - start, kSlice);
}

// The abort comes between the last look at the cell and the sleep itself.
TEST_F(ShmBoardTest, AnAbortBehindTheLastLook_IsNotMissed) {
  Make(2);
  constexpr std::chrono::seconds kSlice(60);
  ShmBoard& board = *boards_[0];
  board.Publish();
  AbortCell cell;
  cell.Listen([&] { board.WakeSelf(); });
  const Instant start = clock_.Now();
  board.Sleep(1, kSlice, [&] {
    const bool seen = cell.IsSet();
    std::thread([&] { cell.Set(Status(StatusCode::kRankLost, "rank 1 was killed")); }).join();
    return seen;
  });
  EXPECT_TRUE(cell.IsSet());
  EXPECT_LT(clock_.Now() - start, kSlice / 2);
}

// It comes before the mark that the rank sleeps, whose writing undoes the wake-up.
TEST_F(ShmBoardTest, AnAbortAheadOfTheSleep_IsSeenByTheLastLook) {
  Make(2);
  constexpr std::chrono::seconds kSlice(60);
  ShmBoard& board = *boards_[0];
  board.Publish();
  const Instant start = clock_.Now();
  for (int i = 0; i < 2000; ++i) {
    AbortCell cell;
    cell.Listen([&] { board.WakeSelf(); });
    std::atomic<bool> begin = false;
    std::thread aborter([&] {
      while (!begin.load()) std::this_thread::yield();
      cell.Set(Status(StatusCode::kRankLost, "rank 1 was killed"));
    });
    begin.store(true);
    while (!cell.IsSet()) board.Sleep(1, kSlice, [&] { return cell.IsSet(); });
    aborter.join();
  }
  EXPECT_LT(clock_.Now() - start, kSlice);
}

TEST_F(ShmBoardTest, Collectives_OfThreadsOnOneMapping) {
  for (const int ranks : {1, 2, 3, 8}) {
    Make(ranks);
    Random random(static_cast<std::uint64_t>(ranks));
    std::vector<GroupSpec> specs;
    for (int rank = 0; rank < ranks; ++rank) {
      specs.push_back({.name = "board",
                       .rank = rank,
                       .members = std::vector<GroupMember>(static_cast<std::size_t>(ranks))});
    }
    std::vector<std::unique_ptr<Trial>> trials;
    for (int i = 0; i < 60; ++i)
      trials.push_back(std::make_unique<Trial>(RandomCall(ranks, 30'000, random), random));
    RunAll([&](ShmBoard& board) {
      const int rank = board.rank();
      std::uint64_t seq = 0;
      for (auto& trial : trials) {
        Operation op = trial->At(rank);
        // As ValidateOperation leaves it.
        if (op.kind == OpKind::kBarrier) op.dtype = DataType::kUInt8;
        const auto run = MakeShmCollective(op, ++seq, specs[static_cast<std::size_t>(rank)], board);
        for (auto progress = run->Advance(); progress != ShmCollective::Progress::kDone;
             progress = run->Advance()) {
          ASSERT_NE(progress, ShmCollective::Progress::kFailed) << run->failure().ToString();
          if (progress == ShmCollective::Progress::kWaiting) WaitForAll(board, Millis(50));
        }
      }
    });
    for (auto& trial : trials)
      for (int rank = 0; rank < ranks; ++rank) ASSERT_EQ(trial->WhatIsWrong(rank), "");
  }
}

}  // namespace
}  // namespace resilient::testing
