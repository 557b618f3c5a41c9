// Goal: of several that wait in a blocking queue_pop (a wait for the queue, then a pop), each item
// wakes one, and no wake-up is lost with the one that got it. Method: ClientFixture.
#include <gmock/gmock.h>

#include "tests/unit/tcpstore/client_fixture.h"

namespace resilient::store::tcpstore {
namespace {

using TcpStoreTurns = ClientFixture;

TEST_F(TcpStoreTurns, AnItem_WakesTheOneThatHasWaitedLongest) {
  Peer& producer = NewPeer();
  Peer& later = NewPeer();
  Peer& first = NewPeer();
  EXPECT_EQ(Wait(first, {"/q"}), "");
  EXPECT_EQ(Wait(later, {"/q"}), "");
  Push(producer, "/q", "a");
  EXPECT_EQ(Take(first), kStop);
  EXPECT_EQ(Take(later), "");
  EXPECT_EQ(Pop(first, "/q"), Number(1) + Text("a"));
  EXPECT_EQ(Take(later), "") << "there is no item for it";
  Push(producer, "/q", "b");
  EXPECT_EQ(Take(later), kStop);
  EXPECT_EQ(Pop(later, "/q"), Number(1) + Text("b"));
  EXPECT_EQ(Waits(), 0u);
}

TEST_F(TcpStoreTurns, TwoItems_WakeTwo) {
  Peer& producer = NewPeer();
  Peer& first = NewPeer();
  Peer& second = NewPeer();
  EXPECT_EQ(Wait(first, {"/q"}), "");
  EXPECT_EQ(Wait(second, {"/q"}), "");
  Push(producer, "/q", "a");
  Push(producer, "/q", "b");
  EXPECT_EQ(Take(first), kStop);
  EXPECT_EQ(Take(second), kStop);
}

TEST_F(TcpStoreTurns, AValue_WakesAll) {
  Peer& producer = NewPeer();
  Peer& first = NewPeer();
  Peer& second = NewPeer();
  EXPECT_EQ(Wait(first, {"/k"}), "");
  EXPECT_EQ(Wait(second, {"/k"}), "");
  Set(producer, "/k", "v");
  EXPECT_EQ(Take(first), kStop);
  EXPECT_EQ(Take(second), kStop);
}

TEST_F(TcpStoreTurns, AWaitForSeveralKeys_TakesNoTurn) {
  Peer& producer = NewPeer();
  Peer& of_two = NewPeer();
  Peer& popper = NewPeer();
  EXPECT_EQ(Wait(of_two, {"/q", "/k"}), "");
  EXPECT_EQ(Wait(popper, {"/q"}), "");
  Push(producer, "/q", "a");
  EXPECT_EQ(Take(popper), kStop);
  Set(producer, "/k", "");
  EXPECT_EQ(Take(of_two), kStop);
}

TEST_F(TcpStoreTurns, WhoDoesNotPop_LeavesTheItemToTheNext) {
  Peer& producer = NewPeer();
  Peer& first = NewPeer();
  Peer& second = NewPeer();
  EXPECT_EQ(Wait(first, {"/q"}), "");
  EXPECT_EQ(Wait(second, {"/q"}), "");
  Push(producer, "/q", "a");
  EXPECT_EQ(Take(first), kStop);
  EXPECT_EQ(Take(second), "");
  Ask(first, Byte(QueryType::kNumKeys));
  EXPECT_EQ(Take(second), kStop);
  EXPECT_EQ(Pop(second, "/q"), Number(1) + Text("a"));
}

TEST_F(TcpStoreTurns, WhoGivesUp_LeavesTheItemToTheNext) {
  Peer& producer = NewPeer();
  Peer& first = NewPeer();
  Peer& second = NewPeer();
  EXPECT_EQ(Wait(first, {"/q"}), "");
  EXPECT_EQ(Wait(second, {"/q"}), "");
  Push(producer, "/q", "a");
  EXPECT_EQ(Take(first), kStop);
  EXPECT_EQ(Cancel(first), kCancelled);
  EXPECT_EQ(Take(second), kStop);
}

TEST_F(TcpStoreTurns, WhoEnds_LeavesTheItemToTheNext) {
  Peer& producer = NewPeer();
  Peer& first = NewPeer();
  Peer& second = NewPeer();
  EXPECT_EQ(Wait(first, {"/q"}), "");
  EXPECT_EQ(Wait(second, {"/q"}), "");
  Push(producer, "/q", "a");
  EXPECT_EQ(Take(first), kStop);
  End(first);
  EXPECT_EQ(Take(second), kStop);
  EXPECT_EQ(Pop(second, "/q"), Number(1) + Text("a"));
}

TEST_F(TcpStoreTurns, AnItemThatIsGone_WakesNobody) {
  Peer& producer = NewPeer();
  Peer& first = NewPeer();
  Peer& second = NewPeer();
  EXPECT_EQ(Wait(first, {"/q"}), "");
  EXPECT_EQ(Wait(second, {"/q"}), "");
  Push(producer, "/q", "a");
  EXPECT_EQ(Pop(producer, "/q"), Number(1) + Text("a"));
  EXPECT_EQ(Pop(first, "/q"), Number(0));
  End(first);
  EXPECT_EQ(Take(second), "");
  EXPECT_EQ(Waits(), 1u);
}

}  // namespace
}  // namespace resilient::store::tcpstore
