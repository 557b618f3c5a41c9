// Goal: threads that submit are listed, the latest first, each once, whatever happens beside.
// Method: threads that note one after the other.
#include "runtime/recovery/submitters.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/sanitizers.h"

namespace resilient::recovery {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

int NoteInAThread(Submitters& submitters) {
  int id = 0;
  std::thread([&] {
    submitters.Note();
    id = gettid();
  }).join();
  return id;
}

TEST(Submitters, AreListedTheLatestFirst) {
  Submitters submitters;
  EXPECT_THAT(submitters.Latest(), IsEmpty());
  submitters.Note();
  EXPECT_THAT(submitters.Latest(), ElementsAre(gettid()));
  const int other = NoteInAThread(submitters);
  EXPECT_THAT(submitters.Latest(), ElementsAre(other, gettid()));
  submitters.Note();
  submitters.Note();
  EXPECT_THAT(submitters.Latest(), ElementsAre(gettid(), other)) << "each once";
}

TEST(Submitters, OneThatSubmitsALotPushesNoOtherOut) {
  Submitters submitters;
  const int other = NoteInAThread(submitters);
  for (int i = 0; i < 1000; ++i) submitters.Note();
  EXPECT_THAT(submitters.Latest(), ElementsAre(gettid(), other));
}

TEST(Submitters, OfManyTheLatestAreKept) {
  Submitters submitters;
  submitters.Note();
  int last = 0;
  for (int i = 0; i < 100; ++i) last = NoteInAThread(submitters);
  const std::vector<int> latest = submitters.Latest();
  EXPECT_EQ(latest.front(), last);
  EXPECT_LE(latest.size(), 64u);
  EXPECT_THAT(latest, ::testing::Not(::testing::Contains(gettid())));
}

TEST(Submitters, ThoseThatRaceAreBothListed) {
  Submitters submitters;
  std::atomic<int> arrived{0};
  std::atomic<int> ids[2];
  const auto race = [&](int number) {
    ids[number] = gettid();
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
    for (int i = 0; i < 10'000; ++i) submitters.Note();
  };
  std::thread a(race, 0);
  std::thread b(race, 1);
  a.join();
  b.join();
  EXPECT_THAT(submitters.Latest(), UnorderedElementsAre(ids[0].load(), ids[1].load()));
}

TEST(Submitters, ForkedChild_HasAnotherIdForTheSameThread) {
  if (testing::kThreadSanitized) GTEST_SKIP() << "ThreadSanitizer does not follow such a fork";
  Submitters submitters;
  submitters.Note();
  const int parent = gettid();
  const pid_t pid = fork();
  if (pid == 0) {
    submitters.Note();
    const std::vector<int> latest = submitters.Latest();
    _exit(latest == std::vector{gettid(), parent} ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace resilient::recovery
