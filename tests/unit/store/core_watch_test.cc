// Goal: a watch tells of each change of its keys once and in order; who is too far behind is told
// so, and nobody else pays for it. Method: CoreFixture; messages in, messages out; the log of
// changes also alone.
#include <gmock/gmock.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "store/core/change_log.h"
#include "tests/unit/store/core_fixture.h"

namespace resilient::store {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class Watches : public CoreFixture {
 protected:
  static std::vector<std::string> Texts(const Reply& reply) {
    std::vector<std::string> texts;
    for (const KeyEvent& event : reply.events) {
      texts.push_back(event.key + (event.value ? "=" + *event.value : " deleted"));
    }
    return texts;
  }
  // The revision from which on changes are kept.
  std::uint64_t Present(ConnectionId connection) {
    return Ask(connection, ListKeysOp{"", "", true}).revision;
  }
};

TEST_F(Watches, EachChange_IsToldOnceAndInOrder) {
  const ConnectionId connection = OpenRequest(1);
  Ask(connection, SetOp{"a/0", "before"});
  const std::uint64_t present = Present(connection);
  Send(connection, WatchOp{"a/", present + 1, true}, 100);
  ASSERT_FALSE(TakeReply(connection, 100));
  EXPECT_EQ(Ask(connection, SetOp{"b/1", "other"}).revision, present + 1);
  ASSERT_FALSE(TakeReply(connection, 100));
  Ask(connection, SetOp{"a/1", "x"});
  const std::optional<Reply> first = TakeReply(connection, 100);
  ASSERT_TRUE(first);
  EXPECT_THAT(Texts(*first), ElementsAre("a/1=x"));
  EXPECT_EQ(first->revision, present + 2);
  // What happens between two questions is told by the next answer.
  Ask(connection, AddOp{"a/n", 5});
  Ask(connection, AppendOp{"a/1", "y"});
  Ask(connection, DeleteOp{"a/1"});
  Ask(connection, DeleteOp{"a/1"});  // There is nothing to delete: no change.
  Ask(connection, CompareSetOp{"a/n", "4", "9"});
  Ask(connection, CompareSetOp{"a/n", "5", "9"});
  const Reply second = Ask(connection, WatchOp{"a/", first->revision + 1, true});
  EXPECT_THAT(Texts(second), ElementsAre("a/n=5", "a/1=xy", "a/1 deleted", "a/n=9"));
  Send(connection, WatchOp{"a/", second.revision + 1, true}, 200);
  Ask(connection, MultiSetOp{{"a/2", "c", "a/3"}, {"2", "-", "3"}});
  EXPECT_THAT(Texts(*TakeReply(connection, 200)), ElementsAre("a/2=2", "a/3=3"));
}

TEST_F(Watches, WithoutWait_AnswersAtOnce) {
  const ConnectionId connection = OpenRequest(1);
  const std::uint64_t present = Present(connection);
  Ask(connection, SetOp{"b", "x"});
  const Reply nothing = Ask(connection, WatchOp{"a", present + 1, false});
  EXPECT_TRUE(nothing.status.ok());
  EXPECT_THAT(nothing.events, IsEmpty());
  EXPECT_EQ(nothing.revision, present + 1);
  EXPECT_EQ(Ask(connection, WatchOp{"a", present + 100, true}).status.code(),
            StatusCode::kInvalidArgument);
}

TEST_F(Watches, TooFarBehind_IsCompactedAndTheOthersGoOn) {
  CoreOptions options = Options();
  options.changes_per_job = 4;
  Restart(options);
  const ConnectionId slow = OpenRequest(1);
  const ConnectionId quick = OpenRequest(2);
  const std::uint64_t present = Present(slow);
  Send(quick, WatchOp{"k", present + 1, true}, 100);
  for (int i = 0; i < 6; ++i) Ask(slow, SetOp{"k" + std::to_string(i), "v"});
  EXPECT_THAT(Texts(*TakeReply(quick, 100)), ElementsAre("k0=v"));
  const Reply compacted = Ask(slow, WatchOp{"k", present + 1, true});
  EXPECT_EQ(compacted.status.code(), StatusCode::kCompacted);
  EXPECT_EQ(compacted.number, static_cast<std::int64_t>(present + 3));
  EXPECT_THAT(Texts(Ask(slow, WatchOp{"k", present + 3, true})),
              ElementsAre("k2=v", "k3=v", "k4=v", "k5=v"));
}

TEST_F(Watches, Batches_AreBounded) {
  const ConnectionId connection = OpenRequest(1);
  const std::uint64_t present = Present(connection);
  const std::string large(kWatchBatchBytesMax / 2 + 1, 'x');
  for (int i = 0; i < 5; ++i) Ask(connection, SetOp{"k", large});
  std::size_t told = 0;
  for (std::uint64_t from = present + 1; told < 5;) {
    const Reply batch = Ask(connection, WatchOp{"k", from, true});
    ASSERT_GT(batch.events.size(), 0u);
    EXPECT_LE(batch.events.size(), 2u);
    EXPECT_EQ(batch.events.front().revision, from);
    told += batch.events.size();
    from = batch.revision + 1;
  }
  EXPECT_EQ(told, 5u);
}

TEST_F(Watches, LostConnection_IsArmedAgainWhereItWas) {
  const ConnectionId first = OpenRequest(1);
  const ConnectionId other = OpenRequest(2);
  const std::uint64_t present = Present(other);
  Send(first, WatchOp{"k", present + 1, true}, 1);
  Close(first);
  Ask(other, SetOp{"k", "meanwhile"});
  const ConnectionId second = OpenRequest(1);
  EXPECT_THAT(Texts(Ask(second, WatchOp{"k", present + 1, true}, 2)), ElementsAre("k=meanwhile"));
}

TEST_F(Watches, Revisions_SurviveARestartAndTheLogDoesNot) {
  const ConnectionId before = OpenRequest(1);
  const std::uint64_t present = Present(before);
  Ask(before, SetOp{"k", "1"});
  const std::uint64_t set = Ask(before, SetOp{"k", "2"}).revision;
  EXPECT_EQ(set, present + 2);
  Recover();
  const ConnectionId connection = OpenRequest(1);
  EXPECT_EQ(Ask(connection, WatchOp{"k", set, true}).status.code(), StatusCode::kCompacted);
  const Reply listed = Ask(connection, ListKeysOp{"", "", true});
  EXPECT_EQ(listed.revision, set);
  EXPECT_THAT(Texts(listed), ElementsAre("k=2"));
  // Nothing was missed: it goes on.
  Send(connection, WatchOp{"k", set + 1, true}, 100);
  ASSERT_FALSE(TakeReply(connection, 100));
  EXPECT_EQ(Ask(connection, SetOp{"k", "3"}).revision, set + 1);
  EXPECT_THAT(Texts(*TakeReply(connection, 100)), ElementsAre("k=3"));
}

TEST_F(Watches, OfARound_EndWithItsFence) {
  const std::vector<ConnectionId> control = Run(2, std::chrono::seconds(60));
  const ConnectionId request = OpenRequest(0);
  const std::uint64_t present = Ask(request, ListKeysOp{"", "", true}, {}, 1, 1).revision;
  Send(request, WatchOp{"", present + 1, true}, 100, 1, 1);
  Send(request, WatchOp{"", present + 1, true}, 101, 0, 0);
  Ask(request, SetOp{"k", "v"});
  EXPECT_FALSE(TakeReply(request, 100));
  EXPECT_THAT(Texts(*TakeReply(request, 101)), ElementsAre("k=v"));
  Advance(std::chrono::seconds(6), {control[0]});
  const std::optional<Reply> ended = TakeReply(request, 100);
  ASSERT_TRUE(ended);
  EXPECT_EQ(ended->status.code(), StatusCode::kRankLost);
  // And one of the generation that is over is not begun.
  EXPECT_EQ(Ask(request, WatchOp{"", present + 1, true}, {}, 1, 1).status.code(),
            StatusCode::kStaleGeneration);
}

TEST_F(Watches, ANewLife_MakesThemListAnew) {
  Run(1);
  const ConnectionId watcher = OpenRequest(7);
  const std::uint64_t present = Present(watcher);
  Ask(watcher, SetOp{"k", "v"});
  Send(watcher, WatchOp{"k", present + 2, true}, 100);
  Advance(std::chrono::seconds(6));  // The only member is lost.
  ASSERT_FALSE(TakeReply(watcher, 100));
  const ConnectionId control = OpenControl(3);
  Send(control, JoinOp{JoinOf(0, 1)});
  const std::optional<Reply> ended = TakeReply(watcher, 100);
  ASSERT_TRUE(ended);
  EXPECT_EQ(ended->status.code(), StatusCode::kCompacted);
  EXPECT_THAT(Ask(watcher, ListKeysOp{"", "", true}).events, IsEmpty());
}

TEST_F(Watches, Cancel_EndsThem) {
  const ConnectionId connection = OpenRequest(1);
  const std::uint64_t present = Present(connection);
  Send(connection, WatchOp{"k", present + 1, true}, 100);
  Send(connection, CancelOp{100}, 0);
  EXPECT_EQ(TakeReply(connection, 100)->status.code(), StatusCode::kCancelled);
  Ask(connection, SetOp{"k", "v"});
  EXPECT_FALSE(TakeReply(connection, 100));
}

TEST(ChangeLog, KeepsNothingBeforeItBegins_AndNoMoreThanItMay) {
  ChangeLog log(3, 4096);
  log.Note(1, 0, "a", "x");
  EXPECT_EQ(log.size(), 0u);
  log.Begin(1);
  log.Begin(7);  // Once.
  EXPECT_EQ(log.Since(1, 0, "", 1).compacted, 2u);
  EXPECT_EQ(log.Since(2, 0, "", 1).compacted, 0u);
  for (std::uint64_t i = 2; i < 6; ++i) log.Note(i, 0, "a", "x");
  EXPECT_EQ(log.size(), 3u);
  EXPECT_EQ(log.Since(2, 0, "", 5).compacted, 3u);
  log.Note(6, 0, "b", std::string(4000, 'x'));
  EXPECT_LE(log.bytes(), 4096u);
  log.Note(7, 0, "c", std::string(5000, 'x'));  // More than it keeps at all.
  EXPECT_EQ(log.size(), 0u);
  EXPECT_EQ(log.Since(7, 0, "", 7).compacted, 8u);
  log.Note(8, 2, "d", "x");
  log.NoteDrop(9, 2);
  EXPECT_EQ(log.Since(8, 2, "", 9).compacted, 10u);
  EXPECT_EQ(log.Since(8, 0, "", 9).compacted, 0u);
}

// What all jobs keep is bounded, and a job that changes little keeps what its watches need.
TEST(ChangeLog, JobsThatChangeMuch_LeaveTheOthersTheirs) {
  Pool all{.most = 4000};
  ChangeLog greedy(1000, 3000, &all);
  ChangeLog other(1000, 3000, &all);
  ChangeLog third(1000, 3000, &all);
  for (ChangeLog* log : {&greedy, &other, &third}) log->Begin(0);
  for (std::uint64_t i = 1; i < 100; ++i) greedy.Note(i, 0, "a", std::string(100, 'x'));
  EXPECT_LE(greedy.bytes(), 3000u);
  for (std::uint64_t i = 100; i < 200; ++i) other.Note(i, 0, "a", std::string(100, 'x'));
  EXPECT_GE(other.bytes(), 1000u);
  third.Note(200, 0, "a", std::string(800, 'x'));
  EXPECT_EQ(third.size(), 1u);
  EXPECT_LE(all.taken, 2 * all.most);
}

// A change is looked up among prefixes, and not compared with each. As by comparing with each.
TEST(Keyspace, WatchesOfEachPrefixOfAKey_AreAnswered) {
  std::mt19937 random(7);
  const auto name = [&random](std::size_t longest) {
    std::string text;
    for (std::size_t left = random() % (longest + 1); left > 0; --left) {
      text.push_back(static_cast<char>('a' + random() % 3));
    }
    return text;
  };
  for (int round = 0; round < 300; ++round) {
    Keyspace keys;
    keys.BeginWatches();
    std::map<std::uint64_t, std::string> prefixes;
    for (std::uint64_t seq = 1; seq <= 12; ++seq) {
      ASSERT_TRUE(keys.AddWatch({1, seq}, 0, prefixes[seq] = name(4)).ok());
    }
    const std::string key = name(6);
    std::vector<EndedWait> ended;
    ASSERT_TRUE(keys.Set(0, key, "v", ended).ok());
    keys.AnswerWatches(ended);
    std::vector<std::uint64_t> expected;
    for (const auto& [seq, prefix] : prefixes) {
      if (key.starts_with(prefix)) expected.push_back(seq);
    }
    std::vector<std::uint64_t> answered;
    for (const EndedWait& end : ended) answered.push_back(end.wait.seq);
    EXPECT_EQ(answered, expected) << "key " << key;
  }
}

}  // namespace
}  // namespace resilient::store
