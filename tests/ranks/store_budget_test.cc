// Goal: what clients make the server keep is in a limit, whatever they do, and the others go on.
// Method: the real binary with small limits, clients that do their worst, its memory and what it
// says of it.

#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "store/core/keyspace.h"
#include "tests/ranks/store_limits_support.h"

namespace resilient::store {
namespace {

using ::testing::HasSubstr;

constexpr std::size_t kSlack = 64 * kMebi;  // Of the allocator, and of what is on its way.

// What the server has more in memory than before; a sanitizer's copies are not counted.
void ExpectGrewByLessThan(TestServer& server, std::size_t before, std::size_t most) {
  if (kSanitized) return;
  const std::size_t after = ResidentBytes(server.process().pid());
  EXPECT_LT(after, before + most) << "from " << before / kMebi << " to " << after / kMebi << " MiB";
}

// A refused compare_set answers with what is there, and the answer is kept until it is
// acknowledged: 200 bytes of requests made the server keep 16 MiB.
TEST(StoreBudget, AnswersNobodyAcknowledges_TakeTheirPartAndNoMore) {
  constexpr std::size_t kValue = 4 * kMebi;
  TestServer server(WithLimits({"result-bytes-per-job=32MiB"}));
  const auto witness = Greeted(server, "other");
  ASSERT_TRUE(witness->Call(SetOp{"k", "v"}));
  const auto owner = Greeted(server);
  ASSERT_TRUE(owner->Call(SetOp{"k", std::string(kValue, 'v')})->status.ok());
  Hello first = MakeTestHello(Role::kRequest);
  RawClient one(server.address());
  ASSERT_TRUE(one.SayHello(first));
  ASSERT_TRUE(one.Call(CompareSetOp{"k", "no", ""}));
  one.Close();
  const std::size_t before = ResidentBytes(server.process().pid());
  for (int i = 0; i < 100; ++i) {
    const auto client = Greeted(server);
    for (int seq = 0; seq < 2; ++seq) {
      const auto reply = client->Call(CompareSetOp{"k", "no", ""});
      ASSERT_TRUE(reply && reply->status.ok());
      ASSERT_EQ(reply->value.size(), kValue);
    }
  }
  // Of the 800 MiB that they were given; the allocator keeps what it has once had for the next one.
  ExpectGrewByLessThan(server, before, 2 * 32 * kMebi + kSlack);
  EXPECT_LE(Scrape(server)["resilient_store_result_bytes"], 33.0 * kMebi);
  ExpectWorks(*witness);
  // Who comes back for an answer that had to go is told so, and nothing happens twice.
  RawClient again(server.address());
  ASSERT_TRUE(again.SayHello(first));
  const auto repeated = again.Call(CompareSetOp{"k", "no", ""});
  ASSERT_TRUE(repeated);
  EXPECT_EQ(repeated->status.code(), StatusCode::kOutcomeUnknown) << repeated->status.ToString();
}

// What is replaced is given back.
TEST(StoreBudget, ValuesThatBecomeShort_TakeNoMoreMemory) {
  TestServer server(WithLimits({"bytes-per-job=16MiB"}));
  const auto client = Greeted(server);
  const std::size_t before = ResidentBytes(server.process().pid());
  for (int i = 0; i < 40; ++i) {
    const std::string key = "k" + std::to_string(i);
    ASSERT_TRUE(client->Call(SetOp{key, std::string(kValueBytesMax, 'v')})->status.ok());
    ASSERT_TRUE(client->Call(SetOp{key, "short"})->status.ok());
  }
  ExpectGrewByLessThan(server, before, 16 * kMebi + kSlack);
}

// Six bytes of a key that does not exist yet took 280.
TEST(StoreBudget, WaitsForManyKeys_CountForWhatTheyTake) {
  TestServer server(WithLimits({"bytes-per-job=64MiB"}));
  const auto witness = Greeted(server, "other");
  std::vector<std::string> keys;
  for (std::size_t i = 0; i < kKeysPerRequestMax; ++i) keys.push_back(std::to_string(100000 + i));
  const std::size_t before = ResidentBytes(server.process().pid());
  std::vector<std::unique_ptr<RawClient>> clients;
  bool refused = false;
  while (!refused) {
    ASSERT_LT(clients.size(), 40u) << "nobody counts them";
    clients.push_back(Greeted(server));
    for (std::size_t i = 0; i < kWaitKeysPerSessionMax / kKeysPerRequestMax; ++i) {
      ASSERT_TRUE(clients.back()->SendOp(WaitOp{keys}));
    }
    ASSERT_TRUE(clients.back()->SendOp(CheckOp{{"end"}}));
    // A wait that is refused is answered before what comes after it.
    const auto reply = clients.back()->Await<Reply>(In(kPatience));
    ASSERT_TRUE(reply);
    refused = reply->status.code() == StatusCode::kResourceExhausted;
  }
  EXPECT_LE(Scrape(server)["resilient_store_bytes"], 64.0 * kMebi);
  ExpectGrewByLessThan(server, before, 64 * kMebi + kSlack);
  ExpectWorks(*witness);
  clients.clear();
  const Deadline end = In(kPatience);
  while (Scrape(server)["resilient_store_waits"] != 0) ASSERT_FALSE(end.ExpiredAt(Now()));
  EXPECT_EQ(Scrape(server)["resilient_store_bytes"], 0);
}

TEST(StoreBudget, RequestsThatAreNotEnded_GiveWayToOthers) {
  TestServer server(WithLimits({"input-total-bytes=64MiB"}));
  const auto witness = Greeted(server, "other");
  const std::size_t before = ResidentBytes(server.process().pid());
  const std::string frame = EncodeFrame({.seq = 1, .body = std::string(kMaxFrameBody, 'x')});
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 16; ++i) {
    clients.push_back(Greeted(server));
    // One that is cut meanwhile may not take all of it.
    clients.back()->SendBytes(std::string_view(frame).substr(0, frame.size() - 1));
  }
  EXPECT_TRUE(Said(server, "it does not end its request")) << server.process().ErrorText();
  EXPECT_TRUE(clients.front()->ClosedBy(In(kPatience)));
  EXPECT_LE(Scrape(server)["resilient_store_input_bytes"], 64.0 * kMebi);
  ExpectGrewByLessThan(server, before, 64 * kMebi + kSlack);
  // A request that is ended is younger than they are.
  const auto set = witness->Call(SetOp{"k", std::string(kValueBytesMax, 'v')});
  ASSERT_TRUE(set);
  EXPECT_TRUE(set->status.ok()) << set->status.ToString();
  clients.clear();
  const Deadline end = In(kPatience);
  while (Scrape(server)["resilient_store_input_bytes"] != 0) ASSERT_FALSE(end.ExpiredAt(Now()));
}

// A world of 131,072 has 18 MiB of seats, of one join.
TEST(StoreBudget, SeatsOfWorlds_HaveALimit) {
  TestServer server(WithLimits({"seats-per-job=10", "seats=14"}));
  // Of one process, which may be in several worlds.
  const auto join = [&](const std::string& job, int size) {
    auto client = std::make_unique<RawClient>(server.address());
    Hello hello = MakeTestHello(Role::kControl, job);
    hello.incarnation = "of " + job;
    EXPECT_TRUE(client->SayHello(hello));
    EXPECT_TRUE(client->Call(JoinOp{MakeJoin(0, size)})->status.ok());
    return client;
  };
  const auto first = join("job", 6);
  const auto second = join("job", 5);
  const auto refused = second->Await<JoinRefusedEvent>(In(kPatience));
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->why.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(refused->why.message(), HasSubstr("have 6 seats of the 10"));
  const auto third = join("job", 4);
  EXPECT_EQ(Scrape(server)["resilient_store_seats"], 10);
  // The other job has its even share of 14, though 10 are taken.
  const auto other = join("other", 7);
  EXPECT_EQ(Scrape(server)["resilient_store_seats"], 17);
  const auto more = join("other", 1);
  EXPECT_TRUE(more->Await<JoinRefusedEvent>(In(kPatience)));
}

}  // namespace
}  // namespace resilient::store
