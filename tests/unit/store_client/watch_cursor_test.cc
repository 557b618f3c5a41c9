// Goal: a watch goes on exactly behind what it has told, and begins anew with a snapshot of one
// revision when the store has forgotten changes. Method: WatchCursor alone, answers by hand.
#include "store/client/watch_cursor.h"

#include <gtest/gtest.h>

namespace resilient::store {
namespace {

Reply Answer(std::uint64_t revision, std::vector<KeyEvent> events, bool more = false) {
  Reply reply;
  reply.revision = revision;
  reply.events = std::move(events);
  reply.flag = more;
  return reply;
}

Reply Compacted() {
  Reply reply;
  reply.status = Status(StatusCode::kCompacted, "too far behind");
  return reply;
}

TEST(WatchCursorTest, FromARevision_FollowsBehindEachBatch) {
  WatchCursor cursor("k", 5);
  const auto asked = std::get<WatchOp>(cursor.Next());
  EXPECT_EQ(asked.prefix, "k");
  EXPECT_EQ(asked.from_revision, 5u);
  EXPECT_TRUE(asked.wait);
  auto batch = cursor.OnReply(Answer(9, {{5, "k1", "v"}, {8, "k2", std::nullopt}}));
  ASSERT_TRUE(batch.ok() && *batch);
  EXPECT_FALSE((*batch)->snapshot);
  EXPECT_EQ((*batch)->revision, 9u);
  EXPECT_EQ((*batch)->changes, (std::vector<KeyChange>{{5, "k1", "v"}, {8, "k2", std::nullopt}}));
  EXPECT_EQ(std::get<WatchOp>(cursor.Next()).from_revision, 10u);
  // An answer without changes only moves it on.
  batch = cursor.OnReply(Answer(20, {}));
  EXPECT_TRUE(batch.ok() && !*batch);
  EXPECT_EQ(std::get<WatchOp>(cursor.Next()).from_revision, 21u);
}

TEST(WatchCursorTest, FromTheBeginning_ListsPagesAndWhatChangedBetweenThem) {
  WatchCursor cursor("k", 0);
  auto page = std::get<ListKeysOp>(cursor.Next());
  EXPECT_TRUE(page.values);
  EXPECT_EQ(page.after, "");
  auto batch = cursor.OnReply(Answer(10, {{0, "k1", "a"}, {0, "k2", "b"}}, true));
  EXPECT_TRUE(batch.ok() && !*batch);
  EXPECT_EQ(std::get<ListKeysOp>(cursor.Next()).after, "k2");
  // By now k1 has changed, k0 has come, k2 is gone; k3 is listed as it is.
  batch = cursor.OnReply(Answer(14, {{0, "k3", "new"}}));
  EXPECT_TRUE(batch.ok() && !*batch);
  const auto between = std::get<WatchOp>(cursor.Next());
  EXPECT_EQ(between.from_revision, 11u);
  EXPECT_FALSE(between.wait);
  batch = cursor.OnReply(Answer(12, {{11, "k1", "c"}, {12, "k2", std::nullopt}}));
  EXPECT_TRUE(batch.ok() && !*batch);
  batch = cursor.OnReply(Answer(15, {{13, "k3", "new"}, {15, "k0", "z"}}));
  ASSERT_TRUE(batch.ok() && *batch);
  EXPECT_TRUE((*batch)->snapshot);
  EXPECT_EQ((*batch)->revision, 15u);
  EXPECT_EQ((*batch)->changes,
            (std::vector<KeyChange>{{0, "k0", "z"}, {0, "k1", "c"}, {0, "k3", "new"}}));
  EXPECT_EQ(std::get<WatchOp>(cursor.Next()).from_revision, 16u);
}

TEST(WatchCursorTest, Compacted_BeginsAnew) {
  WatchCursor cursor("k", 5);
  auto batch = cursor.OnReply(Compacted());
  EXPECT_TRUE(batch.ok() && !*batch);
  ASSERT_TRUE(std::holds_alternative<ListKeysOp>(cursor.Next()));
  EXPECT_TRUE(cursor.OnReply(Answer(30, {{0, "k1", "a"}}, true)).ok());
  EXPECT_TRUE(cursor.OnReply(Answer(31, {})).ok());
  // And so it does when it was too slow between two pages.
  batch = cursor.OnReply(Compacted());
  EXPECT_TRUE(batch.ok() && !*batch);
  EXPECT_EQ(std::get<ListKeysOp>(cursor.Next()).after, "");
  batch = cursor.OnReply(Answer(40, {}));
  ASSERT_TRUE(batch.ok() && *batch);
  EXPECT_TRUE((*batch)->snapshot);
  EXPECT_TRUE((*batch)->changes.empty());
  EXPECT_EQ(std::get<WatchOp>(cursor.Next()).from_revision, 41u);
}

TEST(WatchCursorTest, OtherErrors_LeaveItWhereItIs) {
  WatchCursor cursor("k", 5);
  Reply fenced;
  fenced.status = Status(StatusCode::kStaleGeneration, "over");
  EXPECT_EQ(cursor.OnReply(fenced).status().code(), StatusCode::kStaleGeneration);
  EXPECT_EQ(std::get<WatchOp>(cursor.Next()).from_revision, 5u);
}

TEST(WatchCursorTest, ChangesTwiceOrOutOfOrder_AreAProtocolError) {
  for (const auto& revisions : {std::vector<std::uint64_t>{4}, {5, 5}, {6, 5}, {10}}) {
    WatchCursor cursor("k", 5);
    std::vector<KeyEvent> events;
    for (const std::uint64_t revision : revisions) events.push_back({revision, "k", "v"});
    EXPECT_EQ(cursor.OnReply(Answer(9, events)).status().code(), StatusCode::kProtocol);
  }
  WatchCursor back("k", 5);
  EXPECT_EQ(back.OnReply(Answer(3, {})).status().code(), StatusCode::kProtocol);
  WatchCursor endless("k", 0);
  EXPECT_EQ(endless.OnReply(Answer(3, {}, true)).status().code(), StatusCode::kProtocol);
}

}  // namespace
}  // namespace resilient::store
