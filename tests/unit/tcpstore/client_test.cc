// Goal: each query of torch's client has the answer of torch's own server, byte for byte, and what
// cannot be answered ends one connection alone. Method: ClientFixture.
#include <gmock/gmock.h>

#include "tests/unit/tcpstore/client_fixture.h"

namespace resilient::store::tcpstore {
namespace {

using ::testing::HasSubstr;

using TcpStoreClient = ClientFixture;

TEST_F(TcpStoreClient, Greeting_IsNotAnswered_PingIs) {
  Peer& peer = NewPeer();
  EXPECT_EQ(Take(peer), "");
  EXPECT_EQ(Ask(peer, Byte(QueryType::kPing) + "\x01\x02\x03\x84"), "\x01\x02\x03\x84");
}

TEST_F(TcpStoreClient, Values) {
  Peer& peer = NewPeer();
  Peer& other = NewPeer();
  EXPECT_EQ(Get(peer, "/k"), Text("")) << "a missing key has an empty value";
  Set(peer, "/k", std::string("a\0b", 3));
  EXPECT_EQ(Get(other, "/k"), Text(std::string_view("a\0b", 3)));
  EXPECT_EQ(Ask(peer, Texts(QueryType::kAppend, {"/k", "c"})), "");
  EXPECT_EQ(Get(other, "/k"), Text(std::string_view("a\0bc", 4)));
  EXPECT_EQ(Add(peer, "/n", 41), Number(41));
  EXPECT_EQ(Add(other, "/n", -42), Number(-1));
  EXPECT_EQ(Get(other, "/n"), Text("-1"));
  EXPECT_EQ(Ask(peer, Byte(QueryType::kNumKeys)), Number(2));
  EXPECT_EQ(Ask(peer, Byte(QueryType::kListKeys)), Number(2) + Text("/k") + Text("/n"));
  EXPECT_EQ(Ask(peer, Texts(QueryType::kDeleteKey, {"/k"})), Number(1));
  EXPECT_EQ(Ask(peer, Texts(QueryType::kDeleteKey, {"/k"})), Number(0));
  EXPECT_EQ(Ask(peer, Byte(QueryType::kNumKeys)), Number(1));
}

TEST_F(TcpStoreClient, CompareSet) {
  Peer& peer = NewPeer();
  const auto compare_set = [&](const std::string& expected, const std::string& desired) {
    return Ask(peer, Texts(QueryType::kCompareSet, {"/k", expected, desired}));
  };
  EXPECT_EQ(compare_set("x", "first"), Text("x")) << "as torch's: nothing was set";
  EXPECT_EQ(compare_set("", "first"), Text("first"));
  EXPECT_EQ(compare_set("wrong", "second"), Text("first"));
  EXPECT_EQ(compare_set("first", "second"), Text("second"));
}

TEST_F(TcpStoreClient, ManyKeys) {
  Peer& peer = NewPeer();
  EXPECT_EQ(Ask(peer, Keys(QueryType::kCheck, {})), kYes);
  EXPECT_EQ(Ask(peer, Keys(QueryType::kCheck, {"/a"})), kNo);
  EXPECT_EQ(Ask(peer, Many(QueryType::kMultiSet, 2, {"/a", "1", "/b", ""})), "");
  EXPECT_EQ(Ask(peer, Keys(QueryType::kCheck, {"/a", "/b"})), kYes);
  EXPECT_EQ(Ask(peer, Keys(QueryType::kMultiGet, {"/b", "/a", "/missing", "/a"})),
            Text("") + Text("1") + Text("") + Text("1"));
  EXPECT_EQ(Ask(peer, Keys(QueryType::kMultiGet, {})), "");
  EXPECT_EQ(Wait(peer, {}), kStop);
  EXPECT_EQ(Wait(peer, {"/a", "/b", "/a"}), kStop);
}

TEST_F(TcpStoreClient, MoreKeysThanOneRequestNames) {
  Peer& peer = NewPeer();
  Peer& waiter = NewPeer();
  std::vector<std::string> keys;
  std::vector<std::string> rounds;
  for (std::size_t i = 0; i < 2 * kKeysPerRequestMax + 3; ++i) {
    keys.push_back("/" + std::to_string(1000000 + i));
    rounds.push_back(keys.back());
    rounds.emplace_back("v");
  }
  EXPECT_EQ(Wait(waiter, keys), "");
  EXPECT_EQ(Ask(peer, Many(QueryType::kMultiSet, keys.size(), rounds)), "");
  EXPECT_EQ(Take(waiter), kStop);
  EXPECT_EQ(Ask(peer, Keys(QueryType::kCheck, keys)), kYes);
  EXPECT_EQ(Ask(peer, Byte(QueryType::kNumKeys)), Number(static_cast<std::int64_t>(keys.size())));
  std::string listed = Number(static_cast<std::int64_t>(keys.size()));
  for (const std::string& key : keys) listed += Text(key);
  EXPECT_EQ(Ask(peer, Byte(QueryType::kListKeys)), listed);
  EXPECT_EQ(Ask(peer, Texts(QueryType::kDeleteKey, {keys.back()})), Number(1));
  EXPECT_EQ(Ask(peer, Keys(QueryType::kCheck, keys)), kNo);
  std::string values;
  for (std::size_t i = 1; i < keys.size(); ++i) values += Text("v");
  EXPECT_EQ(Ask(peer, Keys(QueryType::kMultiGet, keys)), values + Text(""));
}

TEST_F(TcpStoreClient, Queues) {
  Peer& peer = NewPeer();
  EXPECT_EQ(Pop(peer, "/q"), Number(0));
  Push(peer, "/q", "a");
  Push(peer, "/q", "");
  EXPECT_EQ(Ask(peer, Texts(QueryType::kQueueLength, {"/q"})), Number(2));
  EXPECT_EQ(Ask(peer, Keys(QueryType::kCheck, {"/q"})), kYes);
  EXPECT_EQ(Ask(peer, Byte(QueryType::kNumKeys)), Number(0)) << "a queue is no key";
  EXPECT_EQ(Pop(peer, "/q"), Number(2) + Text("a"));
  EXPECT_EQ(Pop(peer, "/q"), Number(1) + Text(""));
  EXPECT_EQ(Pop(peer, "/q"), Number(0));
}

TEST_F(TcpStoreClient, Wait_IsAnsweredWhenAllKeysHaveBeenThere) {
  Peer& waiter = NewPeer();
  Peer& other = NewPeer();
  EXPECT_EQ(Wait(waiter, {"/a", "/b", "/c"}), "");
  Set(other, "/b", "");
  Add(other, "/a", 1);
  EXPECT_EQ(Take(waiter), "");
  EXPECT_EQ(Ask(other, Texts(QueryType::kDeleteKey, {"/b"})), Number(1));
  Ask(other, Texts(QueryType::kAppend, {"/c", "x"}));
  EXPECT_EQ(Take(waiter), kStop);
  EXPECT_EQ(Waits(), 0u);
}

TEST_F(TcpStoreClient, Cancel_EndsTheWaitWithoutItsAnswer) {
  Peer& waiter = NewPeer();
  Peer& other = NewPeer();
  EXPECT_EQ(Wait(waiter, {"/k"}), "");
  EXPECT_EQ(Cancel(waiter), kCancelled);
  EXPECT_EQ(Waits(), 0u);
  Set(other, "/k", "v");
  EXPECT_EQ(Take(waiter), "");
  EXPECT_EQ(Cancel(waiter), kCancelled) << "there is nothing to cancel any more";
}

TEST_F(TcpStoreClient, CancelThatCrossesTheAnswer_ComesBehindIt) {
  Peer& waiter = NewPeer();
  Peer& other = NewPeer();
  EXPECT_EQ(Wait(waiter, {"/k"}), "");
  Set(other, "/k", "v");
  Say(waiter, Byte(QueryType::kCancelWait));
  EXPECT_EQ(Take(waiter), kStop + kCancelled);
}

TEST_F(TcpStoreClient, WhatIsAskedBesideAWait_IsAnswered) {
  Peer& waiter = NewPeer();
  Peer& other = NewPeer();
  EXPECT_EQ(Wait(waiter, {"/k"}), "");
  EXPECT_EQ(Add(waiter, "/n", 1), Number(1));
  EXPECT_EQ(Wait(waiter, {"/another"}), "") << "it takes the place of the first";
  EXPECT_EQ(Waits(), 1u);
  Set(other, "/k", "v");
  EXPECT_EQ(Take(waiter), "");
  Set(other, "/another", "v");
  EXPECT_EQ(Take(waiter), kStop);
}

TEST_F(TcpStoreClient, ItsOwnKey_DoesNotEndAnotherWaitTwice) {
  Peer& peer = NewPeer();
  EXPECT_EQ(Wait(peer, {"/k"}), "");
  Say(peer, Texts(QueryType::kSet, {"/k", "v"}) + Byte(QueryType::kNumKeys));
  EXPECT_EQ(Take(peer), kStop + Number(1));
}

TEST_F(TcpStoreClient, EndInAWait_LeavesNothing) {
  Peer& waiter = NewPeer();
  Peer& other = NewPeer();
  EXPECT_EQ(Wait(waiter, {"/k"}), "");
  End(waiter);
  EXPECT_EQ(Waits(), 0u);
  Set(other, "/k", "v");
  EXPECT_EQ(Get(other, "/k"), Text("v"));
}

TEST_F(TcpStoreClient, Barrier_EndsForAllWithTheLastToCome) {
  const std::string arrive = Texts(QueryType::kBarrier, {"/b"}) + Number(3);
  Peer& first = NewPeer();
  Peer& second = NewPeer();
  Peer& third = NewPeer();
  EXPECT_EQ(Ask(first, arrive), "");
  EXPECT_EQ(Ask(second, arrive), "");
  EXPECT_EQ(Get(third, "/b"), Text("2"));
  EXPECT_EQ(Add(third, "/other", 1), Number(1));
  EXPECT_EQ(Ask(third, arrive), kStop);
  EXPECT_EQ(Take(first), kStop);
  EXPECT_EQ(Take(second), kStop);
  EXPECT_EQ(Ask(first, arrive), kStop) << "it has been reached, and is not begun again";
  EXPECT_EQ(Ask(first, Byte(QueryType::kNumKeys)), Number(2)) << "nothing but the count is left";
  EXPECT_EQ(Waits(), 0u);
}

TEST_F(TcpStoreClient, BarrierThatIsCancelled_KeepsItsCount) {
  const std::string arrive = Texts(QueryType::kBarrier, {"/b"}) + Number(2);
  Peer& first = NewPeer();
  EXPECT_EQ(Ask(first, arrive), "");
  EXPECT_EQ(Cancel(first), kCancelled);
  EXPECT_EQ(Waits(), 0u);
  EXPECT_EQ(Ask(first, arrive), kStop);
}

TEST_F(TcpStoreClient, WhatCannotBeAnswered_EndsThatConnection) {
  Peer& other = NewPeer();
  Set(other, "/text", "abc");
  Set(other, "/full", std::string(kValueBytesMax, 'x'));
  const std::vector<std::pair<std::string, std::string>> refused = {
      {Texts(QueryType::kAdd, {"/text"}) + Number(1), "ADD: add() needs a decimal number"},
      {Texts(QueryType::kAppend, {"/full", "y"}), "APPEND: "},
      {Texts(QueryType::kBarrier, {"/text"}) + Number(1), "BARRIER: "},
      {Keys(QueryType::kMultiGet, {"/full", "/full", "/full", "/full", "/full"}), "MULTI_GET has"},
      {"\x7f", "number 127"},
  };
  for (const auto& [bytes, why] : refused) {
    Peer& peer = NewPeer();
    EXPECT_EQ(Ask(peer, bytes), "");
    EXPECT_THAT(peer.ended.message(), HasSubstr(why));
    End(peer);
  }
  EXPECT_EQ(Get(other, "/text"), Text("abc"));
}

TEST_F(TcpStoreClient, FullStore_SaysSo) {
  CoreOptions options = Options();
  options.limits.keys_per_job = 2;
  Restart(options);
  Peer& peer = NewPeer();
  Set(peer, "/1", "");
  Set(peer, "/2", "");
  Say(peer, Texts(QueryType::kSet, {"/3", ""}));
  EXPECT_THAT(peer.ended.message(), HasSubstr("its SET: the job holds 2 keys"));
}

TEST_F(TcpStoreClient, AWaitInAJobThatIsForgotten_GoesOn) {
  CoreOptions options = Options();
  options.session_memory = std::chrono::seconds(1);
  Restart(options);
  Peer& waiter = NewPeer();
  EXPECT_EQ(Wait(waiter, {"/k"}), "");
  Hello hello = HelloOf(1, Role::kRequest);
  hello.job = kJob;
  Close(Open(hello));
  Pass(std::chrono::seconds(2));
  EXPECT_EQ(core_->Gauges().jobs, 1u);
  EXPECT_TRUE(waiter.ended.ok()) << waiter.ended.ToString();
  EXPECT_EQ(Waits(), 1u);
  Set(NewPeer(), "/k", "v");
  EXPECT_EQ(Take(waiter), kStop);
}

TEST_F(TcpStoreClient, Keys_OutliveTheServer_ConnectionsDoNot) {
  Peer& peer = NewPeer();
  Set(peer, "/k", "v");
  Add(peer, "/n", 7);
  Push(peer, "/q", "item");
  peers_.clear();
  Recover();
  Peer& again = NewPeer();
  EXPECT_EQ(Get(again, "/k"), Text("v"));
  EXPECT_EQ(Add(again, "/n", 1), Number(8));
  EXPECT_EQ(Pop(again, "/q"), Number(1) + Text("item"));
}

TEST_F(TcpStoreClient, OtherJobs_HaveKeysOfTheirOwn) {
  Peer& peer = NewPeer();
  Set(peer, "/k", "v");
  const ConnectionId native = OpenRequest(1);
  EXPECT_FALSE(CoreFixture::Ask(native, CheckOp{{"/k"}}).flag);
  Hello hello = HelloOf(2, Role::kRequest);
  hello.job = kJob;
  EXPECT_EQ(CoreFixture::Ask(Open(hello), GetOp{"/k"}).value, "v");
}

TEST_F(TcpStoreClient, SessionsOfClients_AreGoneWithThem) {
  const std::size_t rows = rows_.size();
  for (int i = 0; i < 10; ++i) End(NewPeer());
  EXPECT_EQ(core_->Gauges().sessions, 0u);
  EXPECT_LE(rows_.size(), rows + 1) << "but for the row of the store itself";
}

}  // namespace
}  // namespace resilient::store::tcpstore
