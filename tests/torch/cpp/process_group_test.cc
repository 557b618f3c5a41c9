// Goal: a libtorch C++ program without Python runs collectives through c10d::ProcessGroup, and
// learns of a killed peer as a c10d exception. Method: a real store server and real processes: this
// program runs itself again as each rank, steered through pipes.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Functions.h>
#include <resilient/torch.h>

#include "tests/torch/cpp/ranks.h"

namespace resilient {
namespace {

using std::chrono::milliseconds;
using testing::Child;
using testing::kPatience;
using testing::RanksTest;
using SteadyClock = std::chrono::steady_clock;

class ProcessGroupTest : public RanksTest {};

TEST_F(ProcessGroupTest, TwoRanks_SumAndKeys) {
  auto first = StartRank(0, 2);
  auto second = StartRank(1, 2);
  EXPECT_EQ(first->Line(kPatience), "sum 3 key from rank 1");
  EXPECT_EQ(second->Line(kPatience), "sum 3 key from rank 0");
  first->Say("leave");
  second->Say("leave");
  EXPECT_EQ(first->Wait(), 0);
  EXPECT_EQ(second->Wait(), 0);
}

TEST_F(ProcessGroupTest, PeerKilled_WaiterCatchesRankLostWithinASecond) {
  auto survivor = StartRank(0, 2);
  auto victim = StartRank(1, 2);
  ASSERT_EQ(survivor->Line(kPatience), "sum 3 key from rank 1");
  ASSERT_EQ(victim->Line(kPatience), "sum 3 key from rank 0");
  survivor->Say("reduce");
  ASSERT_EQ(survivor->Line(kPatience), "submitted");

  const auto killed = SteadyClock::now();
  victim->Signal(SIGKILL);
  const std::string line = survivor->Line(kPatience);
  EXPECT_EQ(line.rfind("DistBackendError [resilient:RANK_LOST] rank 1 ", 0), 0u) << line;
  EXPECT_LT(SteadyClock::now() - killed, milliseconds(1000));
  // Sticky until Rebuild.
  EXPECT_EQ(survivor->Line(kPatience).rfind("again [resilient:RANK_LOST]", 0), 0u);
  survivor->Say("leave");
  EXPECT_EQ(survivor->Wait(), 0);
}

TEST_F(ProcessGroupTest, PeerEndsByItself_WaiterHearsOfWhat) {
  struct Case {
    std::string does;
    std::string said;
  };
  const std::vector<Case> cases = {
      {"throw", "ended by std::runtime_error: CUDA out of memory"},
      {"throw on a thread", "ended by std::runtime_error: CUDA out of memory"},
      {"throw a number", "ended by int"},
      {"exit", "ended by exit(3)"},
  };
  for (const Case& one : cases) {
    auto survivor = StartRank(0, 2);
    auto victim = StartRank(1, 2);
    ASSERT_EQ(survivor->Line(kPatience), "sum 3 key from rank 1");
    ASSERT_EQ(victim->Line(kPatience), "sum 3 key from rank 0");
    survivor->Say("reduce");
    ASSERT_EQ(survivor->Line(kPatience), "submitted");
    victim->Say(one.does);
    const std::string line = survivor->Line(kPatience);
    EXPECT_EQ(line.rfind("DistBackendError [resilient:RANK_LOST] rank 1 ", 0), 0u) << line;
    EXPECT_NE(line.find(one.said), std::string::npos) << one.does << ": " << line;
    EXPECT_NE(victim->Wait(), 0);
    survivor->Say("leave");
    EXPECT_EQ(survivor->Wait(), 0);
  }
}

TEST_F(ProcessGroupTest, MinWorld_TheRanksThatAreLeftGoOnWithTheirOwnParts) {
  std::vector<std::unique_ptr<Child>> ranks;
  for (int rank = 0; rank < 3; ++rank) ranks.push_back(StartRank(rank, 3, "--elastic-rank"));
  for (auto& rank : ranks) ASSERT_EQ(rank->Line(kPatience), "three");
  ranks[0]->Signal(SIGKILL);
  // Who was rank 1 is rank 0 now, with the values of the commit and the number that it had kept.
  EXPECT_EQ(ranks[1]->Line(kPatience), "rank 0 of 2, step 1, was 1, sum 3");
  EXPECT_EQ(ranks[2]->Line(kPatience), "rank 1 of 2, step 1, was 2, sum 3");
  // The commit was made anew under the new numbers: another loss finds it.
  ranks[1]->Signal(SIGKILL);
  EXPECT_EQ(ranks[2]->Line(kPatience), "rank 0 of 1, step 1, was 2, sum 2");
  EXPECT_EQ(ranks[2]->Wait(), 0);
}

TEST_F(ProcessGroupTest, Shrunk_ThePresentWorldServesAndTheOneBeforeIsItOrThrows) {
  std::vector<std::unique_ptr<Child>> ranks;
  for (int rank = 0; rank < 3; ++rank) ranks.push_back(StartRank(rank, 3, "--shrinking-rank"));
  for (auto& rank : ranks) ASSERT_EQ(rank->Line(kPatience), "rank of 3");
  ranks[1]->Signal(SIGKILL);
  for (const int rank : {0, 2}) {
    EXPECT_EQ(ranks[static_cast<std::size_t>(rank)]->Line(kPatience), "rank of 2, sum 3");
  }
  ranks[0]->Signal(SIGKILL);
  EXPECT_EQ(ranks[2]->Line(kPatience), "rank of 1, sum 1");
  EXPECT_EQ(ranks[2]->Wait(), 0);
}

// What sync would give all ranks has changed since.
TEST_F(ProcessGroupTest, CommitOneIsLostBehindItsBarrier_SyncSaysThatThereIsNone) {
  const ProcessGroup world =
      init_process_group({.rank = 0, .world_size = 1, .store = {address_}, .job = "cpp"});
  std::int64_t step = 0;
  State state(world);
  state.add("step", step);
  std::string said;
  elastic(state, [&](State&) {
    step = 7;
    ASSERT_TRUE(world->getStore()->deleteKey("state/1.1/1.1/0"));
    try {
      state.sync();
    } catch (const BackendError& error) {
      said = error.status().message();
    }
  });
  EXPECT_NE(said.find("no commit is complete"), std::string::npos) << said;
  EXPECT_EQ(step, 7);
  destroy_process_group(world);
}

TEST_F(ProcessGroupTest, NobodyListens_NetworkErrorNamesTheAddress) {
  server_.reset();
  try {
    init_process_group({.rank = 0,
                        .world_size = 1,
                        .store = {address_},
                        .job = "cpp",
                        .timeout = milliseconds(200)});
    FAIL() << "opened a world without a store";
  } catch (const c10::DistNetworkError& error) {
    EXPECT_EQ(std::string(error.what()).rfind("[resilient:", 0), 0u) << error.what();
    EXPECT_NE(std::string(error.what()).find(address_), std::string::npos) << error.what();
  }
}

std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

[[noreturn]] void RunOutOfMemory() { throw std::runtime_error("CUDA out of memory"); }

// Does not come back where the command is a way to end.
void EndBy(const std::string& command) {
  if (command == "throw") RunOutOfMemory();
  if (command == "throw on a thread") std::thread(&RunOutOfMemory).join();
  if (command == "throw a number") throw 7;
  if (command == "exit") std::exit(3);
}

// One rank: sums its rank + 1, exchanges a key, then does what it is told.
int RunRank(int rank, int world_size, const std::string& address) {
  const ProcessGroup world = init_process_group(
      {.rank = rank, .world_size = world_size, .store = {address}, .job = "cpp"});

  std::vector<at::Tensor> tensors = {at::full({1000}, static_cast<double>(rank + 1))};
  world->allreduce(tensors)->wait();
  const double sum = tensors[0].max().item<double>();
  world->getStore()->set("from/" + std::to_string(rank), "from rank " + std::to_string(rank));
  const std::string key =
      world->getStore()->get_to_str("from/" + std::to_string((rank + 1) % world_size));
  std::cout << "sum " << sum << " key " << key << std::endl;

  std::string command;
  while (std::getline(std::cin, command) && command != "leave") {
    EndBy(command);
    const auto work = world->allreduce(tensors);
    std::cout << "submitted" << std::endl;
    try {
      work->wait();
      std::cout << "finished" << std::endl;
    } catch (const c10::DistBackendError& error) {
      std::cout << "DistBackendError " << FirstLine(error.what()) << std::endl;
    }
    try {
      world->allreduce(tensors)->wait();
    } catch (const BackendError& error) {
      std::cout << "again " << FirstLine(error.status().ToString()) << std::endl;
    }
  }
  destroy_process_group(world);
  return 0;
}

// One rank of a world that may shrink to one rank, which then ends.
int RunElasticRank(int rank, int world_size, const std::string& address) {
  std::int64_t step = 0;
  std::int64_t was = rank;
  State state(init_process_group(
      {.rank = rank, .world_size = world_size, .store = {address}, .job = "cpp"}));
  state.add("step", step).add("was", was, State::Part::kPerRank);
  elastic(
      state,
      [&](State& committed) {
        const ProcessGroup world = committed.world();
        if (world->getSize() == world_size) {
          step = 1;
          state.commit();
          world->barrier()->wait();  // Then the commit is complete.
          step = 7;
          was = 7;
          std::cout << "three" << std::endl;
        } else {
          std::vector<at::Tensor> tensors = {at::full({1}, was, at::kLong)};
          world->allreduce(tensors)->wait();
          std::cout << "rank " << world->getRank() << " of " << world->getSize() << ", step "
                    << step << ", was " << was << ", sum " << tensors[0].item<std::int64_t>()
                    << std::endl;
        }
        while (world->getSize() > 1) world->barrier()->wait();
      },
      /*max_restarts=*/100, /*min_world=*/1);
  destroy_process_group(state.world());
  return 0;
}

bool ThrowsAsFormer(const ProcessGroup& group) {
  try {
    group->barrier()->wait();
  } catch (const BackendError& error) {
    return error.status().message().find("resilient::present_world") != std::string::npos;
  }
  return false;
}

// The same by rebuild, with the handle of init kept.
int RunShrinkingRank(int rank, int world_size, const std::string& address) {
  const ProcessGroup first = init_process_group(
      {.rank = rank, .world_size = world_size, .store = {address}, .job = "cpp"});
  std::cout << "rank of " << first->getSize() << std::endl;
  ProcessGroup world = first;
  while (world->getSize() > 1) {
    try {
      while (true) world->barrier()->wait();
    } catch (const BackendError&) {
      const Membership now = rebuild(first, std::nullopt, 1, Duration::zero());
      world = present_world(first);
      if (world != present_world(world) || world->getRank() != now.rank) return 2;
      if (world != first && !ThrowsAsFormer(first)) return 3;
    }
    std::vector<at::Tensor> tensors = {at::full({1}, world->getRank() + 1, at::kLong)};
    world->allreduce(tensors)->wait();
    std::cout << "rank of " << world->getSize() << ", sum " << tensors[0].item<std::int64_t>()
              << std::endl;
  }
  destroy_process_group(first);
  return 0;
}

}  // namespace
}  // namespace resilient

int main(int argc, char** argv) {
  if (argc == 5 && std::string(argv[1]) == "--rank") {
    return resilient::RunRank(std::atoi(argv[2]), std::atoi(argv[3]), argv[4]);
  }
  if (argc == 5 && std::string(argv[1]) == "--elastic-rank") {
    return resilient::RunElasticRank(std::atoi(argv[2]), std::atoi(argv[3]), argv[4]);
  }
  if (argc == 5 && std::string(argv[1]) == "--shrinking-rank") {
    return resilient::RunShrinkingRank(std::atoi(argv[2]), std::atoi(argv[3]), argv[4]);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
