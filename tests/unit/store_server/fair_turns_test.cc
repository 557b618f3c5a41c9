// Goal: in each turn of the loop every job has its share, whatever others ask for; what a job takes
// beyond it is owed, and nobody is forgotten. Method: the table alone, with times of numbers, and a
// random run of many turns against what each job was due.

#include "store/server/fair_turns.h"

#include <map>
#include <random>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace resilient::store {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr Duration kShare = std::chrono::milliseconds(4);

Duration Ms(int milliseconds) { return std::chrono::milliseconds(milliseconds); }

class FairTurnsTest : public ::testing::Test {
 protected:
  // Those that are handled in this turn, each of which takes so long.
  std::vector<ConnectionId> Handle(const std::map<ConnectionId, std::string>& jobs, Duration each) {
    std::vector<ConnectionId> handled;
    while (const std::optional<ConnectionId> next = turns_.Next()) {
      handled.push_back(*next);
      turns_.Charge(jobs.at(*next), each);
    }
    return handled;
  }

  FairTurns turns_{kShare};
};

TEST_F(FairTurnsTest, AJobHasItsShare_AndNoMore) {
  EXPECT_EQ(turns_.Left("a"), kShare);
  turns_.Charge("a", Ms(3));
  EXPECT_EQ(turns_.Left("a"), Ms(1));
  turns_.Charge("a", Ms(1));
  EXPECT_EQ(turns_.Left("a"), Ms(0));
  EXPECT_EQ(turns_.Left("b"), kShare);
  turns_.NextTurn();
  EXPECT_EQ(turns_.Left("a"), kShare);
}

TEST_F(FairTurnsTest, WhatAJobTakesBeyondItsShareIsOwed) {
  turns_.Charge("a", Ms(11));
  turns_.NextTurn();
  EXPECT_LE(turns_.Left("a"), Ms(0));
  turns_.NextTurn();
  EXPECT_EQ(turns_.Left("a"), Ms(1));
}

TEST_F(FairTurnsTest, WhatAJobDoesNotTakeIsNotSaved) {
  turns_.Charge("a", Ms(1));
  for (int turn = 0; turn < 10; ++turn) turns_.NextTurn();
  EXPECT_EQ(turns_.Left("a"), kShare);
}

TEST_F(FairTurnsTest, OfManyJobs_ThoseThatOweAreNotForgotten) {
  turns_.Charge("debtor", 11 * kShare);
  for (int i = 0; i < 2000; ++i) turns_.Charge(std::to_string(i), Ms(1));
  for (int turn = 0; turn < 3; ++turn) turns_.NextTurn();
  EXPECT_EQ(turns_.Left("debtor"), -7 * kShare);
}

// The server was stopped in a request, or its processor was another's.
TEST_F(FairTurnsTest, WhoseStepTookSeconds_HasItsTurnSoon) {
  turns_.Charge("a", std::chrono::seconds(20));
  for (int turn = 0; turn < 10; ++turn) turns_.NextTurn();
  EXPECT_LE(turns_.Left("a"), Ms(0));
  turns_.NextTurn();
  EXPECT_EQ(turns_.Left("a"), kShare);
}

TEST_F(FairTurnsTest, JobsTakeTurns_AndTheirConnectionsInTheirOrder) {
  const std::map<ConnectionId, std::string> jobs = {{1, "a"}, {2, "a"}, {3, "a"}, {4, "b"}};
  for (const ConnectionId id : {3, 1, 2, 4}) turns_.Wait(jobs.at(id), id);
  turns_.Wait("a", 1);  // Where it is.
  EXPECT_THAT(Handle(jobs, Ms(1)), ElementsAre(3, 4, 1, 2));
  EXPECT_FALSE(turns_.any_waiting());
}

TEST_F(FairTurnsTest, WhoseJobHasSpentItsShare_WaitsForALaterTurn) {
  std::map<ConnectionId, std::string> jobs = {{9, "b"}};
  for (ConnectionId id = 1; id <= 5; ++id) {
    jobs[id] = "a";
    turns_.Wait("a", id);
  }
  turns_.Wait("b", 9);
  EXPECT_THAT(Handle(jobs, Ms(3)), ElementsAre(1, 9, 2));
  EXPECT_TRUE(turns_.any_waiting());
  EXPECT_THAT(Handle(jobs, Ms(3)), IsEmpty());
  turns_.NextTurn();
  EXPECT_THAT(Handle(jobs, Ms(3)), ElementsAre(3));
  turns_.NextTurn();
  EXPECT_THAT(Handle(jobs, Ms(3)), ElementsAre(4));
  turns_.NextTurn();
  EXPECT_THAT(Handle(jobs, Ms(3)), ElementsAre(5));
  EXPECT_FALSE(turns_.any_waiting());
}

TEST_F(FairTurnsTest, WhoIsForgottenIsNotNext_AndMayComeAgain) {
  const std::map<ConnectionId, std::string> jobs = {{1, "a"}, {2, "a"}};
  turns_.Wait("a", 1);
  turns_.Forget(1);
  turns_.Forget(1);
  EXPECT_FALSE(turns_.any_waiting());
  turns_.NextTurn();
  turns_.Wait("a", 2);
  turns_.Wait("a", 1);
  EXPECT_THAT(Handle(jobs, Ms(1)), ElementsAre(2, 1));
  turns_.Wait("a", 1);
  turns_.Clear();
  EXPECT_THAT(Handle(jobs, Ms(1)), IsEmpty());
}

// One job has 1,000 connections of heavy requests, seven have one of light ones: these are handled
// in every turn, and the heavy one has its share of the time, not less.
TEST_F(FairTurnsTest, InManyTurns_EachJobHasWhatItIsDue) {
  std::mt19937 random(7);
  std::uniform_int_distribution<int> heavy(1, 9);
  std::map<ConnectionId, std::string> jobs;
  for (ConnectionId id = 1; id <= 1000; ++id) jobs[id] = "tenant";
  for (ConnectionId id = 1001; id <= 1007; ++id) jobs[id] = std::to_string(id);
  std::map<std::string, int> times;
  Duration taken = Duration::zero();
  constexpr int kTurns = 2000;
  for (int turn = 0; turn < kTurns; ++turn) {
    for (const auto& [id, job] : jobs) turns_.Wait(job, id);
    while (const std::optional<ConnectionId> next = turns_.Next()) {
      const std::string& job = jobs.at(*next);
      const Duration took = job == "tenant" ? Ms(heavy(random)) : kShare;
      turns_.Charge(job, took);
      ++times[job];
      if (job == "tenant") taken += took;
    }
    turns_.NextTurn();
  }
  for (ConnectionId id = 1001; id <= 1007; ++id) EXPECT_EQ(times[jobs.at(id)], kTurns);
  EXPECT_LE(taken, kShare * kTurns + Ms(9));
  EXPECT_GE(taken, kShare * kTurns - Ms(9));
}

}  // namespace
}  // namespace resilient::store
