// Goal: what a keyspace notes is what it holds: played back into an empty map it gives the rows of
// its own dump, and a keyspace restored from them answers alike. Method: random operations from
// seeds, checked at every step.
#include <map>
#include <optional>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "runtime/base/random.h"
#include "store/core/keyspace.h"
#include "store/core/storage.h"

namespace resilient::store {
namespace {

using Ended = std::vector<EndedWait>;

class Script {
 public:
  Script(Keyspace& keys, std::uint64_t seed) : keys_(keys), random_(seed) {}

  void Step() {
    const std::uint64_t scope = Below(3);
    const std::string key = Key();
    switch (Below(14)) {
      case 0:
        return (void)keys_.Set(scope, key, Value(), ended_);
      case 1:
        return (void)keys_.Add(scope, key, 1, ended_);
      case 2:
        return (void)keys_.Append(scope, key, Value(), ended_);
      case 3:
        return (void)keys_.CompareSet(scope, key, Value(), Value(), ended_);
      case 4:
        return (void)keys_.MultiSet(scope, {key, Key(), Key()}, {Value(), Value(), Value()},
                                    ended_);
      case 5:
        return (void)keys_.Delete(scope, key);
      case 6:
      case 7:
      case 8:
        return (void)keys_.Push(scope, key, Value(), ended_);
      case 9:
      case 10:
        if (!keys_.Pop(scope, key)) (void)keys_.AddPop({1 + Below(2), Below(4)}, scope, key);
        return;
      case 11:
        return (void)keys_.ArriveAtBarrier({3 + Below(3), 1}, scope, BarrierOp{key, 2}, ended_,
                                           rival_);
      case 12:
        return keys_.DropWaits(1 + Below(5));
      default:
        break;
    }
    // Seldom: it empties the keyspace.
    if (Below(8) != 0) return;
    keys_.EndWaits(scope, Status(StatusCode::kRankLost, "rank 2 is lost"), true, ended_);
    keys_.DropKeys(scope);
  }

 private:
  std::uint64_t Below(std::uint64_t most) { return random_.Next() % most; }
  // Names that only a careful encoding tells apart.
  std::string Key() {
    const std::string names[] = {"", "a", std::string("a\0", 2), "aa", std::string(1, '\xff')};
    return names[Below(5)];
  }
  std::string Value() { return std::string(Below(3), 'v'); }

  Keyspace& keys_;
  Random random_;
  Ended ended_;
  SessionId rival_ = 0;
};

Rows Dump(const Keyspace& keys) {
  Rows rows;
  keys.AppendRows(rows);
  return rows;
}

void Play(Journal& journal, Rows& rows) {
  for (Write& write : journal.Take()) {
    if (write.value) {
      rows[write.row] = std::move(*write.value);
    } else {
      ASSERT_EQ(rows.erase(write.row), 1u) << PrintableRow(write.row);
    }
  }
}

TEST(KeyspaceRows, Notes_GiveWhatIsHeld) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    Journal journal(true);
    Keyspace keys({.keys = 9, .bytes = 4000, .queue_items = 4}, "job", &journal);
    Script script(keys, seed);
    Rows rows;
    for (int step = 0; step < 100; ++step) {
      script.Step();
      ASSERT_NO_FATAL_FAILURE(Play(journal, rows)) << "seed " << seed << " step " << step;
      ASSERT_EQ(rows, Dump(keys)) << "seed " << seed << " step " << step;
    }
  }
}

// By row: the order within one step is of no account, since all of it is kept or nothing.
std::multimap<std::string, std::optional<std::string>> Taken(Journal& journal) {
  std::multimap<std::string, std::optional<std::string>> taken;
  for (Write& write : journal.Take()) taken.emplace(write.row, std::move(write.value));
  return taken;
}

TEST(KeyspaceRows, ARestoredKeyspace_GoesOnAlike) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Journal journal(true);
    Keyspace keys({}, "job", &journal);
    Script before(keys, seed);
    for (int step = 0; step < 60; ++step) before.Step();
    for (SessionId session = 1; session <= 5; ++session) keys.DropWaits(session);
    Journal noted(true);
    Keyspace restored({}, "job", &noted);
    for (const auto& [row, value] : Dump(keys)) {
      const std::optional<RowName> name = ParseRowName(row);
      ASSERT_TRUE(name);
      ASSERT_TRUE(restored.Restore(*name, value).ok());
    }
    EXPECT_TRUE(noted.Take().empty());
    EXPECT_EQ(restored.keys(), keys.keys());
    EXPECT_EQ(restored.bytes(), keys.bytes());
    journal.Take();
    Script after(keys, seed + 1000);
    Script same(restored, seed + 1000);
    for (int step = 0; step < 60; ++step) {
      after.Step();
      same.Step();
      ASSERT_EQ(Taken(journal), Taken(noted)) << "seed " << seed << " step " << step;
    }
    EXPECT_EQ(Dump(restored), Dump(keys));
  }
}

TEST(KeyspaceRows, RowsThatDoNotFit_AreRefused) {
  Keyspace keys({}, "job");
  const auto restore = [&](const std::string& row) {
    return keys.Restore(*ParseRowName(row), "v").code();
  };
  EXPECT_EQ(restore(KeyRow("job", 0, "k")), StatusCode::kOk);
  EXPECT_EQ(restore(KeyRow("job", 0, "k")), StatusCode::kInternal);
  EXPECT_EQ(restore(QueueRow("job", 0, "q", 7)), StatusCode::kOk);
  EXPECT_EQ(restore(QueueRow("job", 0, "q", 8)), StatusCode::kOk);
  EXPECT_EQ(restore(QueueRow("job", 0, "q", 10)), StatusCode::kInternal);
  EXPECT_EQ(restore(JobRow("job")), StatusCode::kInternal);
}

TEST(KeyspaceRows, InMemory_NothingIsNoted) {
  Journal journal(false);
  Keyspace keys({}, "job", &journal);
  Script script(keys, 1);
  for (int step = 0; step < 100; ++step) script.Step();
  EXPECT_TRUE(journal.Take().empty());
}

}  // namespace
}  // namespace resilient::store
