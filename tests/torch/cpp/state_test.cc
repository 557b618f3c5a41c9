// Goal: what the State of a C++ program brings back is what the commit had, in the form that it had
// there, or every rank hears why not; and never what another elastic run has committed. Method: a
// real store server; a world of one for the forms, real processes for what ranks tell each other.
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <resilient/torch.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "tests/torch/cpp/ranks.h"

namespace resilient {
namespace {

using testing::Child;
using testing::kPatience;
using testing::RanksTest;

class StateTest : public RanksTest {
 protected:
  void SetUp() override {
    RanksTest::SetUp();
    if (!HasFatalFailure())
      world_ = init_process_group({.rank = 0, .world_size = 1, .store = {address_}, .job = "cpp"});
  }
  void TearDown() override {
    if (world_) destroy_process_group(world_);
  }

  ProcessGroup world_;
};

// The text of what `does` throws; empty: nothing.
std::string Thrown(StatusCode code, const std::function<void()>& does) {
  try {
    does();
  } catch (const BackendError& error) {
    EXPECT_EQ(error.status().code(), code) << error.what();
    return error.status().message();
  }
  return {};
}

TEST_F(StateTest, Tensor_ComesBackInTheFormOfTheCommit) {
  struct Case {
    at::Tensor committed;
    at::Tensor since;
  };
  const std::vector<Case> cases = {
      {at::full({4}, 1.25, at::kFloat), at::full({4}, 1, at::kInt)},  // As many bytes.
      {at::full({2, 3}, 2.5, at::kFloat), at::full({3, 2}, 0.5, at::kFloat)},
      {at::full({1}, 5.0, at::kDouble), at::full({4}, 1.0, at::kFloat)},
      {at::full({}, 5.0, at::kDouble), at::full({0}, 1.0, at::kDouble)},
      {at::full({0}, 5.0, at::kDouble), at::full({2}, 1.0, at::kDouble)},
      {at::full({3}, 5.0, at::kHalf), at::full({3}, 1.0, at::kBFloat16)}};
  for (const Case& one : cases) {
    at::Tensor value = one.committed.clone();
    State state(world_);
    state.add("value", value);
    state.commit();
    value.set_data(one.since);
    state.restore();
    EXPECT_EQ(value.scalar_type(), one.committed.scalar_type());
    EXPECT_TRUE(at::equal(value, one.committed)) << value;
  }
}

TEST_F(StateTest, InferenceMode_ChangesNothing) {
  for (const bool while_committed : {false, true}) {
    for (const bool while_restored : {false, true}) {
      at::Tensor value;
      {
        const c10::InferenceMode mode(while_committed);
        value = at::full({4}, 1.25);
      }
      State state(world_);
      state.add("value", value);
      // Twice and once more: the third takes over the memory of the first.
      for (int i = 0; i < 3; ++i) {
        const c10::InferenceMode mode(while_committed == (i % 2 == 0));
        state.commit();
      }
      {
        const c10::InferenceMode mode(value.is_inference());
        value.fill_(7);
      }
      const c10::InferenceMode mode(while_restored);
      state.restore();
      EXPECT_EQ(value.sum().item<float>(), 5.0f);
    }
  }
}

TEST_F(StateTest, Module_TakesTheDtypeOfTheCommitAndKeepsItsShapes) {
  torch::nn::Linear model(3, 2);
  const at::Tensor weight = model->weight.detach().clone();
  State state(world_);
  state.add("model", *model);
  state.commit();
  model->to(at::kHalf);
  const at::Tensor parameter = model->weight;
  state.restore();
  EXPECT_TRUE(at::equal(model->weight, weight));
  EXPECT_TRUE(at::equal(parameter, weight)) << "the optimizer holds the same parameter";

  model->weight.set_data(at::zeros({2, 4}));
  const std::string said = Thrown(StatusCode::kSetting, [&] { state.restore(); });
  EXPECT_NE(said.find("'model.weight' is Float[2, 4] here and Float[2, 3]"), std::string::npos)
      << said;
}

TEST_F(StateTest, Module_LayersAreFrozenAsInTheCommit) {
  torch::nn::Linear model(3, 2);
  model->bias.requires_grad_(false);
  State state(world_);
  state.add("model", *model);
  state.commit();
  model->weight.requires_grad_(false);
  model->bias.requires_grad_(true);
  state.sync();
  EXPECT_TRUE(model->weight.requires_grad());
  EXPECT_FALSE(model->bias.requires_grad());
}

TEST_F(StateTest, Optimizer_LosesTheGroupsThatWereAddedSince) {
  torch::nn::Linear model(3, 2), head(2, 1);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));
  State state(world_);
  state.add("optimizer", optimizer);
  state.commit();
  optimizer.add_param_group(head->parameters());
  static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options()).lr(0.1);
  state.restore();
  ASSERT_EQ(optimizer.param_groups().size(), 1u);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.5);
}

TEST_F(StateTest, Optimizer_OfTheCommitHasMoreGroups_SaysSo) {
  torch::nn::Linear model(3, 2), head(2, 1);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.5));
  State state(world_);
  state.add("optimizer", optimizer);
  optimizer.add_param_group(head->parameters());
  state.commit();
  optimizer.param_groups().pop_back();
  const std::string said = Thrown(StatusCode::kSetting, [&] { state.restore(); });
  EXPECT_NE(said.find("an optimizer with 1 parameter groups here and one with 2"),
            std::string::npos)
      << said;
}

TEST_F(StateTest, SecondRunOfAState_BeginsWithItsPresentValues) {
  std::int64_t step = 0;
  State state(world_);
  state.add("step", step);
  elastic(state, [&](State&) {
    step = 3;
    state.commit();
  });
  // What the run has left in the store would be taken for the next one's.
  EXPECT_FALSE(world_->getStore()->check({"state/1.1/1.2/0"}));
  step = 10;
  std::int64_t began_at = 0;
  elastic(state, [&](State&) { began_at = step; });
  EXPECT_EQ(began_at, 10);
}

TEST_F(StateTest, TwoStatesOfOneRun_HaveKeysOfTheirOwn) {
  std::int64_t step = 0, other_step = 0;
  State state(world_), other(world_);
  state.add("step", step);
  other.add("step", other_step);
  elastic(state, [&](State&) {
    step = 3;
    other_step = 5;
    state.commit();
    other.commit();
    other.commit();
    step = other_step = 0;
    state.sync();
    other.sync();
  });
  EXPECT_EQ(step, 3);
  EXPECT_EQ(other_step, 5);
}

TEST_F(StateTest, KilledInTheSecondRun_EveryRankHearsOfBothPlaces) {
  destroy_process_group(world_);
  world_ = {};
  std::vector<std::unique_ptr<Child>> ranks;
  for (int rank = 0; rank < 3; ++rank) ranks.push_back(StartRank(rank, 3, "--folds-rank"));
  for (auto& rank : ranks) ASSERT_EQ(rank->Line(kPatience), "second run");
  ranks[1]->Signal(SIGKILL);
  ranks[1] = StartRank(1, 3, "--folds-rank");
  for (auto& rank : ranks) {
    const std::string said = rank->Line(kPatience);
    EXPECT_EQ(said.rfind("SETTING ", 0), 0u) << said;
    EXPECT_NE(said.find("rank 1 is in elastic run 1, with its State (sum)"), std::string::npos)
        << said;
    EXPECT_NE(said.find("ranks 0, 2 are in elastic run 2, with its State (sum)"), std::string::npos)
        << said;
    EXPECT_NE(rank->Wait(), -1);
  }
}

TEST_F(StateTest, ValuesThatDifferBetweenRanks_AreNamedOnceByRankZero) {
  destroy_process_group(world_);
  world_ = {};
  std::vector<std::unique_ptr<Child>> ranks;
  for (int rank = 0; rank < 2; ++rank) ranks.push_back(StartRank(rank, 2, "--statistics-rank"));
  const std::string said = ranks[0]->Line(kPatience);
  EXPECT_NE(said.find("At commit 2 rank 0 and rank 1 have different values of statistics (ranks "
                      "that differ from rank 0: 1)"),
            std::string::npos)
      << said;
  EXPECT_EQ(ranks[0]->Line(kPatience), "warnings: 1");
  EXPECT_EQ(ranks[1]->Line(kPatience), "warnings: 0");
  for (auto& rank : ranks) EXPECT_EQ(rank->Wait(), 0);
}

TEST_F(StateTest, FunctionThrows_TheOthersHearOfIt) {
  destroy_process_group(world_);
  world_ = {};
  auto survivor = StartRank(0, 2, "--throwing-rank");
  auto victim = StartRank(1, 2, "--throwing-rank");
  const std::string said = survivor->Line(kPatience);
  EXPECT_NE(said.find("ended by std::runtime_error: CUDA out of memory, then exit(3)"),
            std::string::npos)
      << said;
  EXPECT_EQ(WEXITSTATUS(victim->Wait()), 3);
}

TEST_F(StateTest, ReplacementMadeItsValueOtherwise_EveryRankHearsOfIt) {
  destroy_process_group(world_);
  world_ = {};
  std::vector<std::unique_ptr<Child>> ranks;
  for (int rank = 0; rank < 2; ++rank) ranks.push_back(StartRank(rank, 2, "--layers-rank"));
  for (auto& rank : ranks) ASSERT_EQ(rank->Line(kPatience), "three columns");
  ranks[1]->Signal(SIGKILL);
  ranks[1] = StartRank(1, 2, "--other-layers-rank");
  for (auto& rank : ranks) {
    const std::string said = rank->Line(kPatience);
    EXPECT_EQ(said.rfind("SETTING ", 0), 0u) << said;
    EXPECT_NE(said.find("on rank 1: the value 'model.weight' is Float[2, 5] here and Float[2, 3]"),
              std::string::npos)
        << said;
    EXPECT_NE(rank->Wait(), -1);
  }
}

ProcessGroup Join(int rank, int world_size, const std::string& address) {
  setenv("RESILIENT_SEAT_WAIT", "30s", 1);
  return init_process_group(
      {.rank = rank, .world_size = world_size, .store = {address}, .job = "cpp"});
}

int EndWith(const BackendError& error) {
  const Status& status = error.status();
  std::string line = status.code() == StatusCode::kSetting ? "SETTING " : "another error: ";
  std::cout << line + status.message() << std::endl;
  return 0;
}

// Two folds with a run and a State of its own each; in the second one it waits to be killed.
int RunFoldsRank(int rank, int world_size, const std::string& address) {
  const ProcessGroup world = Join(rank, world_size, address);
  try {
    for (int fold = 1; fold <= 2; ++fold) {
      std::int64_t sum = 0;
      State state(world);
      state.add("sum", sum);
      elastic(state, [&](State& committed) {
        sum = fold;
        committed.commit();
        if (fold == 2) std::cout << "second run" << std::endl;
        while (fold == 2) committed.world()->barrier()->wait();
      });
    }
  } catch (const BackendError& error) {
    return EndWith(error);
  }
  return 1;
}

// A model of `columns` columns, which is trained until a rank is killed.
int RunLayersRank(int rank, int world_size, const std::string& address, int columns) {
  const ProcessGroup world = Join(rank, world_size, address);
  try {
    torch::nn::Linear model(columns, 2);
    State state(world);
    state.add("model", *model);
    elastic(state, [&](State& committed) {
      committed.commit();
      std::cout << "three columns" << std::endl;
      while (true) committed.world()->barrier()->wait();
    });
  } catch (const BackendError& error) {
    return EndWith(error);
  }
  return 1;
}

// Rank 1 ends by an exception of the elastic function, by way of a main that catches it.
int RunThrowingRank(int rank, int world_size, const std::string& address) {
  const ProcessGroup world = init_process_group(
      {.rank = rank, .world_size = world_size, .store = {address}, .job = "cpp"});
  try {
    State state(world);
    elastic(state, [rank](State& committed) {
      if (rank == 1) throw std::runtime_error("CUDA out of memory");
      committed.world()->barrier()->wait();
    });
  } catch (const BackendError& error) {
    return EndWith(error);
  } catch (const std::runtime_error&) {
    std::exit(3);
  }
  return 1;
}

// Prints the warnings that it gets.
class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    ++count;
    std::cout << warning.msg() << std::endl;
  }
  int count = 0;
};

// Its statistics are its own after each step; a counter of its own is in the per-rank part, too.
int RunStatisticsRank(int rank, int world_size, const std::string& address) {
  const ProcessGroup world = Join(rank, world_size, address);
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  at::Tensor weight = at::zeros({4}), statistics = at::zeros({4}), counter = at::zeros({4});
  State state(world);
  state.add("weight", weight).add("statistics", statistics).add("counter", counter);
  state.add("own counter", counter, State::Part::kPerRank);
  elastic(state, [&](State& committed) {
    for (int step = 0; step < 6; ++step) {
      weight.add_(1);
      statistics.add_(rank);
      counter.add_(rank);
      committed.world()->barrier()->wait();
      committed.commit();
    }
  });
  std::cout << "warnings: " << warnings.count << std::endl;
  destroy_process_group(world);
  return 0;
}

}  // namespace
}  // namespace resilient

int main(int argc, char** argv) {
  const std::string as = argc == 5 ? argv[1] : "";
  const auto number = [argv](int i) { return std::atoi(argv[i]); };
  if (as == "--folds-rank") return resilient::RunFoldsRank(number(2), number(3), argv[4]);
  if (as == "--layers-rank") return resilient::RunLayersRank(number(2), number(3), argv[4], 3);
  if (as == "--other-layers-rank")
    return resilient::RunLayersRank(number(2), number(3), argv[4], 5);
  if (as == "--throwing-rank") return resilient::RunThrowingRank(number(2), number(3), argv[4]);
  if (as == "--statistics-rank") return resilient::RunStatisticsRank(number(2), number(3), argv[4]);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
