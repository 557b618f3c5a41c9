// Goal: the keys of a job behave as c10d's do, and every limit answers instead of breaking.
// Method: Keyspace alone; each test is a short table of calls and results.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "store/core/keyspace.h"

namespace resilient::store {
namespace {

using Ended = std::vector<EndedWait>;
using For = Keyspace::WaitFor;

TEST(Keyspace, SetAndFind_KeepScopesApart) {
  Keyspace keys;
  Ended ended;
  ASSERT_TRUE(keys.Set(0, "k", "job", ended).ok());
  ASSERT_TRUE(keys.Set(1, "k", "round", ended).ok());
  EXPECT_EQ(*keys.Find(0, "k"), "job");
  EXPECT_EQ(*keys.Find(1, "k"), "round");
  EXPECT_EQ(keys.Find(2, "k"), nullptr);
  EXPECT_EQ(keys.NumKeys(0), 1u);
  EXPECT_EQ(keys.keys(), 2u);
  EXPECT_EQ(keys.bytes(), 2u + 3u + 5u + 2 * kKeyOverhead);
}

TEST(Keyspace, Add_StoresDecimalText) {
  Keyspace keys;
  Ended ended;
  EXPECT_EQ(*keys.Add(0, "n", 5, ended), 5);
  EXPECT_EQ(*keys.Add(0, "n", -7, ended), -2);
  EXPECT_EQ(*keys.Find(0, "n"), "-2");
  EXPECT_EQ(*keys.Add(0, "n", 0, ended), -2);
}

TEST(Keyspace, Add_RefusesWhatIsNoNumber) {
  for (const char* value : {"", "abc", "1x", " 1", "1.5", "9223372036854775808"}) {
    Keyspace keys;
    Ended ended;
    ASSERT_TRUE(keys.Set(0, "k", value, ended).ok());
    EXPECT_EQ(keys.Add(0, "k", 1, ended).status().code(), StatusCode::kWrongType) << value;
    EXPECT_EQ(*keys.Find(0, "k"), value);
  }
}

TEST(Keyspace, Add_RefusesOverflow) {
  Keyspace keys;
  Ended ended;
  ASSERT_TRUE(keys.Set(0, "k", "9223372036854775807", ended).ok());
  EXPECT_EQ(keys.Add(0, "k", 1, ended).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(*keys.Find(0, "k"), "9223372036854775807");
}

TEST(Keyspace, CompareSet_FollowsC10d) {
  struct Row {
    const char* present;  // Null: missing.
    const char* expected;
    const char* returned;
    bool swapped;
  };
  for (const Row& row : {Row{nullptr, "", "new", true}, Row{nullptr, "old", "old", false},
                         Row{"old", "old", "new", true}, Row{"old", "other", "old", false},
                         Row{"old", "", "old", false}, Row{"", "", "new", true}}) {
    Keyspace keys;
    Ended ended;
    if (row.present) {
      ASSERT_TRUE(keys.Set(0, "k", row.present, ended).ok());
    }
    const Result<Keyspace::Swapped> result = keys.CompareSet(0, "k", row.expected, "new", ended);
    ASSERT_TRUE(result.ok());
    EXPECT_EQ(result->value, row.returned);
    EXPECT_EQ(result->swapped, row.swapped);
    EXPECT_EQ(keys.Find(0, "k") != nullptr && *keys.Find(0, "k") == "new", row.swapped);
  }
}

TEST(Keyspace, Delete_TellsWhetherItWasThere) {
  Keyspace keys;
  Ended ended;
  ASSERT_TRUE(keys.Set(0, "k", "v", ended).ok());
  EXPECT_TRUE(keys.Delete(0, "k"));
  EXPECT_FALSE(keys.Delete(0, "k"));
  EXPECT_FALSE(keys.Delete(7, "k"));
  EXPECT_EQ(keys.bytes(), 0u);
}

TEST(Keyspace, WaitingGet_IsAnsweredWithTheValue) {
  Keyspace keys;
  Ended ended;
  ASSERT_TRUE(keys.AddWait({1, 10}, 0, {"k"}, For::kValue).ok());
  ASSERT_TRUE(keys.Set(1, "k", "other scope", ended).ok());
  EXPECT_TRUE(ended.empty());
  ASSERT_TRUE(keys.Set(0, "k", "v", ended).ok());
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].wait, (WaitId{1, 10}));
  EXPECT_EQ(ended[0].value, "v");
  EXPECT_EQ(keys.waits(), 0u);
}

TEST(Keyspace, WaitForSeveral_EndsWithTheLast) {
  Keyspace keys;
  Ended ended;
  ASSERT_TRUE(keys.Set(0, "a", "", ended).ok());
  ASSERT_TRUE(keys.AddWait({1, 1}, 0, {"a", "b", "c", "b"}, For::kKeys).ok());
  ASSERT_TRUE(keys.Add(0, "b", 1, ended).ok());
  EXPECT_TRUE(keys.Delete(0, "b"));  // It existed once: that counts.
  EXPECT_TRUE(ended.empty());
  ASSERT_TRUE(keys.CompareSet(0, "c", "", "x", ended).ok());
  EXPECT_EQ(ended.size(), 1u);
  EXPECT_EQ(keys.bytes(), 1u + 2u + 2 * kKeyOverhead);
}

TEST(Keyspace, CancelAndDrop_LeaveNothingBehind) {
  Keyspace keys;
  Ended ended;
  ASSERT_TRUE(keys.AddWait({1, 1}, 0, {"a", "b"}, For::kKeys).ok());
  ASSERT_TRUE(keys.AddWait({1, 2}, 3, {"a"}, For::kValue).ok());
  ASSERT_TRUE(keys.AddWait({2, 1}, 0, {"a"}, For::kValue).ok());
  EXPECT_TRUE(keys.CancelWait({1, 1}));
  EXPECT_FALSE(keys.CancelWait({1, 1}));
  keys.DropWaits(1);
  EXPECT_EQ(keys.waits(), 1u);
  ASSERT_TRUE(keys.Set(0, "a", "v", ended).ok());
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].wait.session, 2u);
  EXPECT_TRUE(keys.Delete(0, "a"));
  EXPECT_EQ(keys.bytes(), 0u);
}

TEST(Keyspace, RepeatedWait_ReplacesTheFirst) {
  Keyspace keys;
  Ended ended;
  ASSERT_TRUE(keys.AddWait({1, 1}, 0, {"a"}, For::kValue).ok());
  ASSERT_TRUE(keys.AddWait({1, 1}, 0, {"a"}, For::kValue).ok());
  EXPECT_EQ(keys.waits(), 1u);
  ASSERT_TRUE(keys.Set(0, "a", "v", ended).ok());
  EXPECT_EQ(ended.size(), 1u);
}

TEST(Keyspace, EndWaits_EndsOneScopeWithItsCause) {
  Keyspace keys;
  Ended ended;
  const Status cause(StatusCode::kRankLost, "rank 2 is lost");
  ASSERT_TRUE(keys.AddWait({1, 1}, 4, {"a", "b"}, For::kKeys).ok());
  ASSERT_TRUE(keys.AddWait({1, 2}, 0, {"a"}, For::kKeys).ok());
  keys.EndWaits(4, cause, true, ended);
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].status.message(), cause.message());
  EXPECT_EQ(keys.waits(), 1u);
}

TEST(Keyspace, EndScopedWaits_SparesTheJobsOwnKeys) {
  Keyspace keys;
  Ended ended;
  ASSERT_TRUE(keys.AddWait({1, 1}, 4, {"a"}, For::kKeys).ok());
  ASSERT_TRUE(keys.AddWait({1, 2}, 0, {"a"}, For::kKeys).ok());
  ASSERT_TRUE(keys.AddWait({2, 1}, 4, {"a"}, For::kKeys).ok());
  keys.EndScopedWaits(1, Status(StatusCode::kStaleGeneration, "out"), ended);
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].wait, (WaitId{1, 1}));
}

TEST(Keyspace, DropAllKeys_EndsScopedWaitsOnly) {
  Keyspace keys;
  Ended ended;
  ASSERT_TRUE(keys.Set(0, "a", "v", ended).ok());
  ASSERT_TRUE(keys.Set(4, "a", "v", ended).ok());
  ASSERT_TRUE(keys.AddWait({1, 1}, 4, {"b"}, For::kKeys).ok());
  ASSERT_TRUE(keys.AddWait({1, 2}, 0, {"b"}, For::kKeys).ok());
  keys.DropAllKeys(Status(StatusCode::kStaleGeneration, "new life"), ended);
  EXPECT_EQ(keys.keys(), 0u);
  EXPECT_EQ(ended.size(), 1u);
  EXPECT_EQ(keys.waits(), 1u);
}

TEST(Keyspace, Sizes_AreTakenUpToTheLimit) {
  Keyspace keys;
  Ended ended;
  const std::string key(kKeyBytesMax, 'k');
  EXPECT_TRUE(keys.Set(0, key, std::string(kValueBytesMax, 'v'), ended).ok());
  EXPECT_EQ(keys.Set(0, key + "k", "", ended).code(), StatusCode::kTooLarge);
  EXPECT_EQ(keys.Set(0, "k", std::string(kValueBytesMax + 1, 'v'), ended).code(),
            StatusCode::kTooLarge);
  EXPECT_EQ(keys.Add(0, key + "k", 1, ended).status().code(), StatusCode::kTooLarge);
  EXPECT_EQ(keys.CompareSet(0, key + "k", "", "", ended).status().code(), StatusCode::kTooLarge);
  EXPECT_EQ(keys.keys(), 1u);
}

TEST(Keyspace, NumberOfKeys_HasALimit) {
  Keyspace keys({.keys = 2, .bytes = 1000});
  Ended ended;
  ASSERT_TRUE(keys.Set(0, "a", "", ended).ok());
  ASSERT_TRUE(keys.Set(1, "a", "", ended).ok());
  EXPECT_EQ(keys.Set(0, "b", "", ended).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(keys.Add(0, "b", 1, ended).status().code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(keys.Set(0, "a", "again", ended).ok());
  EXPECT_TRUE(keys.Delete(1, "a"));
  EXPECT_TRUE(keys.Set(0, "b", "", ended).ok());
}

TEST(Keyspace, Bytes_CountKeysValuesAndWaits) {
  constexpr std::size_t kMost = 9 + kKeyOverhead + 1 + kWaitOverhead + kWaitKeyOverhead;
  Keyspace keys({.keys = 100, .bytes = kMost});
  Ended ended;
  const std::string all(kMost - kKeyOverhead - 1, 'v');
  ASSERT_TRUE(keys.Set(0, "a", all, ended).ok());
  EXPECT_EQ(keys.Set(0, "b", "", ended).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(keys.Set(0, "a", all + "v", ended).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(keys.AddWait({1, 1}, 0, {"b"}, For::kKeys).code(), StatusCode::kResourceExhausted);
  ASSERT_TRUE(keys.Set(0, "a", "12345678", ended).ok());
  EXPECT_TRUE(keys.AddWait({1, 1}, 0, {"b"}, For::kKeys).ok());
  EXPECT_EQ(keys.bytes(), kMost);
}

TEST(Keyspace, WaitsOfOneSession_HaveALimit) {
  Keyspace keys;
  for (std::uint64_t i = 1; i <= kInFlightPerSessionMax; ++i) {
    ASSERT_TRUE(keys.AddWait({1, i}, 0, {"k"}, For::kKeys).ok());
  }
  EXPECT_EQ(keys.AddWait({1, kInFlightPerSessionMax + 1}, 0, {"k"}, For::kKeys).code(),
            StatusCode::kResourceExhausted);
  EXPECT_TRUE(keys.AddWait({2, 1}, 0, {"k"}, For::kKeys).ok());
}

// All of them end in the step in which the connection is lost.
TEST(Keyspace, KeysThatOneSessionWaitsFor_HaveALimit) {
  Keyspace keys;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < kKeysPerRequestMax; ++i) names.push_back(std::to_string(i));
  ASSERT_EQ(kWaitKeysPerSessionMax % kKeysPerRequestMax, 0u);
  std::uint64_t seq = 0;
  while (seq < kWaitKeysPerSessionMax / kKeysPerRequestMax) {
    ASSERT_TRUE(keys.AddWait({1, ++seq}, 0, names, For::kKeys).ok());
  }
  const Status full = keys.AddWait({1, seq + 1}, 0, {"k"}, For::kKeys);
  EXPECT_EQ(full.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(full.message(), ::testing::HasSubstr(std::to_string(kWaitKeysPerSessionMax)));
  // One of them anew counts once.
  EXPECT_TRUE(keys.AddWait({1, seq}, 0, names, For::kKeys).ok());
  EXPECT_TRUE(keys.AddWait({2, 1}, 0, {"k"}, For::kKeys).ok());
  keys.DropWaits(1);
  EXPECT_TRUE(keys.AddWait({1, 1}, 0, {"k"}, For::kKeys).ok());
}

}  // namespace
}  // namespace resilient::store
