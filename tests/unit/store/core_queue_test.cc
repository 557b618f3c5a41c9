// Goal: queues, listings and operations on several keys answer as c10d's callers expect, up to the
// limits and beyond. Method: Keyspace alone; each test is a short table of calls and results.
#include <gmock/gmock.h>

#include "store/core/keyspace.h"

namespace resilient::store {
namespace {

using Ended = std::vector<EndedWait>;
using For = Keyspace::WaitFor;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Queue, Items_ComeOutInTheirOrder) {
  Keyspace keys;
  Ended ended;
  EXPECT_EQ(*keys.Push(0, "q", "a", ended), 1u);
  EXPECT_EQ(*keys.Push(0, "q", "", ended), 2u);
  EXPECT_EQ(*keys.Push(1, "q", "other scope", ended), 1u);
  EXPECT_EQ(keys.QueueLength(0, "q"), 2u);
  EXPECT_EQ(keys.Pop(0, "q"), "a");
  EXPECT_EQ(*keys.Push(0, "q", "b", ended), 2u);
  EXPECT_EQ(keys.Pop(0, "q"), "");
  EXPECT_EQ(keys.Pop(0, "q"), "b");
  EXPECT_EQ(keys.Pop(0, "q"), std::nullopt);
  EXPECT_EQ(keys.Pop(0, "never"), std::nullopt);
  EXPECT_EQ(keys.QueueLength(0, "q"), 0u);
  EXPECT_EQ(keys.Pop(1, "q"), "other scope");
  EXPECT_EQ(keys.keys(), 0u);
  EXPECT_EQ(keys.bytes(), 0u);
}

TEST(Queue, ValuesAndItems_OfOneKeyAreApart) {
  Keyspace keys;
  Ended ended;
  ASSERT_TRUE(keys.Push(0, "k", "item", ended).ok());
  EXPECT_EQ(keys.Find(0, "k"), nullptr);
  EXPECT_EQ(keys.NumKeys(0), 0u);
  EXPECT_TRUE(keys.ListKeys(0, "", "").keys.empty());
  EXPECT_EQ(keys.MultiGet(0, {"k"}).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(*keys.Add(0, "k", 1, ended), 1);
  EXPECT_EQ(*keys.Find(0, "k"), "1");
  EXPECT_EQ(keys.NumKeys(0), 1u);
  EXPECT_EQ(keys.QueueLength(0, "k"), 1u);
  EXPECT_TRUE(keys.Delete(0, "k"));
  EXPECT_EQ(keys.Find(0, "k"), nullptr);
  EXPECT_EQ(keys.QueueLength(0, "k"), 0u);
  EXPECT_FALSE(keys.Delete(0, "k"));
  EXPECT_EQ(keys.bytes(), 0u);
}

TEST(Queue, WaitsForKeys_EndWithAnItem) {
  Keyspace keys;
  Ended ended;
  EXPECT_FALSE(keys.HasAll(0, {"q"}));
  ASSERT_TRUE(keys.AddWait({1, 1}, 0, {"q", "v"}, For::kKeys).ok());
  ASSERT_TRUE(keys.AddWait({2, 1}, 0, {"q"}, For::kValue).ok());
  ASSERT_TRUE(keys.Set(0, "v", "", ended).ok());
  ASSERT_TRUE(keys.Push(0, "q", "item", ended).ok());
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].wait, (WaitId{1, 1}));
  EXPECT_FALSE(ended[0].mutation);
  EXPECT_TRUE(keys.HasAll(0, {"q", "v"}));
  ASSERT_TRUE(keys.Set(0, "q", "value", ended).ok());
  ASSERT_EQ(ended.size(), 2u);
  EXPECT_EQ(ended[1].value, "value");
}

TEST(Queue, WaitsInTurn_EndOneForEachItemAndAllForAValue) {
  Keyspace keys;
  Ended ended;
  for (const WaitId id : {WaitId{9, 1}, WaitId{1, 7}, WaitId{5, 1}, WaitId{2, 1}}) {
    ASSERT_TRUE(keys.AddWait(id, 0, {"q"}, For::kTurn).ok());
  }
  ASSERT_TRUE(keys.AddWait({3, 1}, 0, {"q"}, For::kKeys).ok());
  keys.PassOn(0, "q", ended);
  EXPECT_TRUE(ended.empty()) << "there is no item";
  EXPECT_EQ(*keys.Push(0, "q", "a", ended), 1u);
  ASSERT_EQ(ended.size(), 2u);
  EXPECT_EQ(ended[0].wait, (WaitId{9, 1}));
  EXPECT_EQ(ended[1].wait, (WaitId{3, 1})) << "in no turn";
  keys.PassOn(0, "q", ended);
  ASSERT_EQ(ended.size(), 3u);
  EXPECT_EQ(ended[2].wait, (WaitId{1, 7}));
  ASSERT_TRUE(keys.Set(0, "q", "value", ended).ok());
  EXPECT_EQ(ended.size(), 5u);
  EXPECT_EQ(keys.waits(), 0u);
}

TEST(Queue, WaitingPops_AreServedInTheirOrder) {
  Keyspace keys;
  Ended ended;
  for (const WaitId id : {WaitId{9, 1}, WaitId{1, 7}, WaitId{1, 3}, WaitId{5, 1}}) {
    ASSERT_TRUE(keys.AddPop(id, 0, "q").ok());
  }
  EXPECT_TRUE(keys.CancelWait({1, 7}));
  for (const char* item : {"a", "b", "c"}) EXPECT_EQ(*keys.Push(0, "q", item, ended), 0u);
  ASSERT_EQ(ended.size(), 3u);
  EXPECT_EQ(ended[0].wait, (WaitId{9, 1}));
  EXPECT_EQ(ended[1].wait, (WaitId{1, 3}));
  EXPECT_EQ(ended[2].wait, (WaitId{5, 1}));
  EXPECT_EQ(ended[2].value, "c");
  EXPECT_TRUE(ended[2].mutation);
  EXPECT_EQ(keys.waits(), 0u);
  EXPECT_EQ(keys.bytes(), 0u);
  EXPECT_EQ(*keys.Push(0, "q", "d", ended), 1u);
}

TEST(Queue, ARepeatedPop_GoesToTheEndOfTheLine) {
  Keyspace keys;
  Ended ended;
  ASSERT_TRUE(keys.AddPop({1, 1}, 0, "q").ok());
  ASSERT_TRUE(keys.AddPop({2, 1}, 0, "q").ok());
  keys.DropWaits(1);
  ASSERT_TRUE(keys.AddPop({1, 1}, 0, "q").ok());
  ASSERT_TRUE(keys.Push(0, "q", "a", ended).ok());
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].wait, (WaitId{2, 1}));
}

TEST(Queue, DroppingKeys_DropsItemsAndKeepsThoseWhoWait) {
  Keyspace keys;
  Ended ended;
  ASSERT_TRUE(keys.Push(0, "full", "a", ended).ok());
  ASSERT_TRUE(keys.Push(3, "full", "a", ended).ok());
  ASSERT_TRUE(keys.AddPop({1, 1}, 0, "empty").ok());
  ASSERT_TRUE(keys.AddPop({1, 2}, 3, "empty").ok());
  keys.DropAllKeys(Status(StatusCode::kStaleGeneration, "new life"), ended);
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].wait, (WaitId{1, 2}));
  EXPECT_EQ(ended[0].status.code(), StatusCode::kStaleGeneration);
  EXPECT_TRUE(ended[0].mutation);
  EXPECT_EQ(keys.keys(), 0u);
  EXPECT_EQ(keys.waits(), 1u);
  ASSERT_TRUE(keys.Push(0, "empty", "b", ended).ok());
  ASSERT_EQ(ended.size(), 2u);
  EXPECT_EQ(ended[1].value, "b");
}

TEST(Queue, Limits_RefuseAndKeepTheRest) {
  Keyspace keys({.keys = 2, .bytes = 900, .queue_items = 2});
  Ended ended;
  EXPECT_EQ(keys.Push(0, std::string(kKeyBytesMax + 1, 'k'), "", ended).status().code(),
            StatusCode::kTooLarge);
  EXPECT_EQ(keys.Push(0, "q", std::string(kValueBytesMax + 1, 'v'), ended).status().code(),
            StatusCode::kTooLarge);
  ASSERT_TRUE(keys.Push(0, "q", "", ended).ok());
  ASSERT_TRUE(keys.Push(0, "q", "", ended).ok());
  EXPECT_EQ(keys.Push(0, "q", "", ended).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(keys.Push(0, "r", std::string(700, 'v'), ended).status().code(),
            StatusCode::kResourceExhausted);
  ASSERT_TRUE(keys.Set(0, "v", "", ended).ok());
  EXPECT_EQ(keys.Push(0, "r", "", ended).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(keys.QueueLength(0, "q"), 2u);
  EXPECT_TRUE(keys.Delete(0, "q"));
  EXPECT_EQ(keys.bytes(), 1u + kKeyOverhead);
  EXPECT_EQ(keys.AddPop({1, 1}, 0, std::string(200, 'k')).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(keys.AddPop({1, 1}, 0, std::string(kKeyBytesMax + 1, 'k')).code(),
            StatusCode::kTooLarge);
  EXPECT_EQ(keys.waits(), 0u);
}

TEST(Keyspace, Append_GrowsUpToTheLimit) {
  Keyspace keys;
  Ended ended;
  EXPECT_EQ(*keys.Append(0, "k", "ab", ended), 2u);
  EXPECT_EQ(*keys.Append(0, "k", "", ended), 2u);
  EXPECT_EQ(*keys.Append(0, "k", "c", ended), 3u);
  EXPECT_EQ(*keys.Find(0, "k"), "abc");
  ASSERT_TRUE(keys.AddWait({1, 1}, 0, {"new"}, For::kValue).ok());
  EXPECT_EQ(*keys.Append(0, "new", "x", ended), 1u);
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].value, "x");
  EXPECT_EQ(*keys.Append(0, "k", std::string(kValueBytesMax - 3, 'v'), ended), kValueBytesMax);
  EXPECT_EQ(keys.Append(0, "k", "v", ended).status().code(), StatusCode::kTooLarge);
  EXPECT_EQ(keys.Find(0, "k")->size(), kValueBytesMax);
}

TEST(Keyspace, MultiSet_IsAllOrNone) {
  Keyspace keys({.keys = 3, .bytes = 100 + 2 * kKeyOverhead});
  Ended ended;
  ASSERT_TRUE(keys.Set(0, "a", "old", ended).ok());
  const std::string big(101, 'v');
  EXPECT_EQ(keys.MultiSet(0, {"a", "b"}, {"1"}, ended).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(keys.MultiSet(0, {"a", "b", "c", "d"}, {"1", "2", "3", "4"}, ended).code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(keys.MultiSet(0, {"a", "b"}, {"1", big}, ended).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(keys.MultiSet(0, {"a", std::string(kKeyBytesMax + 1, 'k')}, {"1", ""}, ended).code(),
            StatusCode::kTooLarge);
  EXPECT_EQ(*keys.Find(0, "a"), "old");
  EXPECT_EQ(keys.NumKeys(0), 1u);
  EXPECT_TRUE(keys.MultiSet(0, {"a", "b", "a"}, {"1", "2", "3"}, ended).ok());
  EXPECT_EQ(*keys.Find(0, "a"), "3");
  EXPECT_EQ(keys.bytes(), 2u + 2u + 2 * kKeyOverhead);
  // What is replaced makes room, and exactly the limit fits.
  EXPECT_TRUE(keys.MultiSet(0, {"a", "b"}, {std::string(97, 'v'), "x"}, ended).ok());
  EXPECT_EQ(keys.bytes(), 100u + 2 * kKeyOverhead);
  EXPECT_TRUE(keys.MultiSet(0, {}, {}, ended).ok());
}

TEST(Keyspace, MultiSet_ShowsAllOfItselfToThoseWhoWait) {
  Keyspace keys;
  Ended ended;
  ASSERT_TRUE(keys.Set(0, "z", "old", ended).ok());
  ASSERT_TRUE(keys.AddWait({1, 1}, 0, {"z", "a"}, For::kValues).ok());
  ASSERT_TRUE(keys.MultiSet(0, {"a", "z"}, {"1", "new"}, ended).ok());
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_THAT(ended[0].values, ElementsAre("new", "1"));
}

TEST(Keyspace, MultiGet_KeepsTheOrderOfTheKeys) {
  Keyspace keys;
  Ended ended;
  ASSERT_TRUE(keys.MultiSet(0, {"a", "b"}, {"1", ""}, ended).ok());
  EXPECT_THAT(*keys.MultiGet(0, {"b", "a", "b"}), ElementsAre("", "1", ""));
  EXPECT_TRUE(keys.MultiGet(0, {})->empty());
  EXPECT_THAT(keys.MultiGet(0, {"a", "no"}).status().message(), HasSubstr("'no'"));
  const std::string half(kReplyValuesBytesMax / 2 + 1, 'v');
  ASSERT_TRUE(keys.Set(0, "big", half, ended).ok());
  EXPECT_TRUE(keys.MultiGet(0, {"big"}).ok());
  EXPECT_EQ(keys.MultiGet(0, {"big", "big"}).status().code(), StatusCode::kTooLarge);
}

TEST(Keyspace, WaitingMultiGet_WaitsAgainForWhatWasDeleted) {
  Keyspace keys;
  Ended ended;
  ASSERT_TRUE(keys.Set(0, "a", "1", ended).ok());
  ASSERT_TRUE(keys.AddWait({1, 1}, 0, {"a", "b"}, For::kValues).ok());
  EXPECT_TRUE(keys.Delete(0, "a"));
  ASSERT_TRUE(keys.Set(0, "b", "2", ended).ok());
  EXPECT_TRUE(ended.empty());
  ASSERT_TRUE(keys.Set(0, "a", "3", ended).ok());
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_THAT(ended[0].values, ElementsAre("3", "2"));
  EXPECT_FALSE(ended[0].mutation);
  EXPECT_EQ(keys.bytes(), 4u + 2 * kKeyOverhead);
}

TEST(Keyspace, WaitingMultiGet_OfTooMuchEndsWithThat) {
  Keyspace keys;
  Ended ended;
  ASSERT_TRUE(keys.Set(0, "a", std::string(kValueBytesMax, 'v'), ended).ok());
  ASSERT_TRUE(keys.AddWait({1, 1}, 0, {"a", "b"}, For::kValues).ok());
  ASSERT_TRUE(keys.Set(0, "b", std::string(kValueBytesMax, 'v'), ended).ok());
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].status.code(), StatusCode::kTooLarge);
}

TEST(Keyspace, ListKeys_GivesSortedPages) {
  Keyspace keys;
  Ended ended;
  for (const char* key : {"b", "a/2", "a/1", "a", "", "a0", "c"}) {
    ASSERT_TRUE(keys.Set(0, key, "", ended).ok());
  }
  ASSERT_TRUE(keys.Set(1, "other", "", ended).ok());
  EXPECT_THAT(keys.ListKeys(0, "", "").keys, ElementsAre("", "a", "a/1", "a/2", "a0", "b", "c"));
  EXPECT_THAT(keys.ListKeys(0, "a/", "").keys, ElementsAre("a/1", "a/2"));
  EXPECT_THAT(keys.ListKeys(0, "a/", "a/1").keys, ElementsAre("a/2"));
  EXPECT_THAT(keys.ListKeys(0, "a/", "a/15").keys, ElementsAre("a/2"));
  EXPECT_THAT(keys.ListKeys(0, "a/", "A").keys, ElementsAre("a/1", "a/2"));
  EXPECT_TRUE(keys.ListKeys(0, "a/", "b").keys.empty());
  EXPECT_TRUE(keys.ListKeys(0, "x", "").keys.empty());
  EXPECT_FALSE(keys.ListKeys(0, "", "").more);
}

TEST(Keyspace, ListKeys_EndsAPageAtItsLimits) {
  Keyspace keys;
  Ended ended;
  for (std::size_t i = 0; i < kKeysPerPage + 1; ++i) {
    ASSERT_TRUE(keys.Set(0, "k" + std::to_string(10000 + i), "", ended).ok());
  }
  const Keyspace::Page first = keys.ListKeys(0, "k", "");
  EXPECT_EQ(first.keys.size(), kKeysPerPage);
  EXPECT_TRUE(first.more);
  const Keyspace::Page second = keys.ListKeys(0, "k", first.keys.back());
  EXPECT_EQ(second.keys.size(), 1u);
  EXPECT_FALSE(second.more);
  ASSERT_TRUE(keys.Delete(0, second.keys.front()));
  EXPECT_FALSE(keys.ListKeys(0, "k", "").more);
  const std::size_t fit = kPageBytesMax / kKeyBytesMax;
  for (std::size_t i = 0; i < fit + 1; ++i) {
    std::string key = "z" + std::to_string(1000 + i);
    key.resize(kKeyBytesMax, 'z');
    ASSERT_TRUE(keys.Set(0, key, "", ended).ok());
  }
  EXPECT_EQ(keys.ListKeys(0, "z", "").keys.size(), fit);
  EXPECT_TRUE(keys.ListKeys(0, "z", "").more);
}

}  // namespace
}  // namespace resilient::store
