// Goal: a lease ends when its holder is silent for the TTL of awake time, and not before.
// Method: LeaseTable and AwakeClock alone, with times in milliseconds.
#include <gtest/gtest.h>

#include "store/core/lease_table.h"

namespace resilient::store {
namespace {

Instant At(int ms) { return Instant(Millis(ms)); }

std::vector<SessionId> Ids(const std::vector<LeaseTable::Expired>& expired) {
  std::vector<SessionId> ids;
  for (const auto& one : expired) ids.push_back(one.session);
  return ids;
}

TEST(LeaseTable, SilentHolder_ExpiresInTwoPhases) {
  LeaseTable leases(Millis(1000));
  leases.Grant(1, At(0));
  EXPECT_TRUE(leases.Tick(At(999), true).empty());
  EXPECT_TRUE(leases.Tick(At(1000), true).empty());  // Suspect.
  EXPECT_TRUE(leases.Has(1));
  const auto expired = leases.Tick(At(1050), true);
  ASSERT_EQ(expired.size(), 1u);
  EXPECT_EQ(expired[0].silent, Millis(1050));
  EXPECT_FALSE(leases.Has(1));
}

TEST(LeaseTable, UnreadInput_HoldsExpiryBack) {
  LeaseTable leases(Millis(1000));
  leases.Grant(1, At(0));
  for (int ms = 1000; ms < 5000; ms += 50) EXPECT_TRUE(leases.Tick(At(ms), false).empty());
  leases.Renew(1, At(5000));  // It was in the unread input.
  EXPECT_TRUE(leases.Tick(At(5050), true).empty());
  EXPECT_TRUE(leases.Tick(At(5100), true).empty());
}

TEST(LeaseTable, Suspect_IsClearedByASign) {
  LeaseTable leases(Millis(1000));
  leases.Grant(1, At(0));
  EXPECT_TRUE(leases.Tick(At(1000), true).empty());
  leases.Renew(1, At(1001));
  EXPECT_TRUE(leases.Tick(At(1999), true).empty());
  EXPECT_TRUE(leases.Tick(At(2001), true).empty());  // Suspect anew.
  EXPECT_EQ(Ids(leases.Tick(At(2051), true)), (std::vector<SessionId>{1}));
}

TEST(LeaseTable, Expired_ComeLongestSilentFirst) {
  LeaseTable leases(Millis(1000));
  leases.Grant(1, At(20));
  leases.Grant(2, At(10));
  leases.Grant(3, At(900));
  EXPECT_TRUE(leases.Tick(At(1100), true).empty());
  EXPECT_EQ(Ids(leases.Tick(At(1200), true)), (std::vector<SessionId>{2, 1}));
  EXPECT_EQ(leases.size(), 1u);
}

TEST(LeaseTable, HeldLease_RunsAgainWithAFullTtl) {
  LeaseTable leases(Millis(1000));
  leases.Grant(1, At(0));
  leases.Hold(1);
  leases.Renew(1, At(100));
  for (int ms = 1000; ms < 9000; ms += 50) EXPECT_TRUE(leases.Tick(At(ms), true).empty());
  leases.Resume(1, At(9000));
  EXPECT_TRUE(leases.Tick(At(9999), true).empty());
  EXPECT_TRUE(leases.Tick(At(10000), true).empty());  // Suspect.
  EXPECT_EQ(Ids(leases.Tick(At(10050), true)), (std::vector<SessionId>{1}));
  leases.Grant(2, At(0));
  leases.Hold(2);
  leases.Remove(2);
  leases.Resume(2, At(1));
  EXPECT_EQ(leases.size(), 0u);
}

TEST(LeaseTable, Remove_AndUnknown_AreHarmless) {
  LeaseTable leases(Millis(1000));
  leases.Grant(1, At(0));
  leases.Remove(1);
  leases.Remove(1);
  leases.Renew(1, At(10));
  EXPECT_FALSE(leases.Has(1));
  EXPECT_EQ(leases.LastSeen(1), std::nullopt);
  leases.Grant(2, At(10));
  leases.Renew(2, At(5));  // Never backwards.
  EXPECT_EQ(leases.LastSeen(2), At(10));
}

TEST(AwakeClock, Pause_CountsAsOneStep) {
  AwakeClock clock(At(0), Millis(200));
  EXPECT_EQ(clock.Tick(At(50)), At(50));
  EXPECT_EQ(clock.At(At(100)), At(100));
  EXPECT_EQ(clock.At(At(60000)), At(250));
  EXPECT_EQ(clock.Tick(At(60000)), At(250));
  EXPECT_EQ(clock.Tick(At(60050)), At(300));
  EXPECT_EQ(clock.At(At(60000)), At(300));  // Never back.
}

TEST(AwakeClock, PausedServer_ExpiresNobody) {
  AwakeClock clock(At(0), Millis(200));
  LeaseTable leases(Millis(1000));
  leases.Grant(1, clock.At(At(0)));
  EXPECT_TRUE(leases.Tick(clock.Tick(At(100000)), true).empty());
  EXPECT_TRUE(leases.Tick(clock.Tick(At(100050)), true).empty());
  leases.Renew(1, clock.At(At(100060)));
  EXPECT_EQ(leases.LastSeen(1), At(260));
}

}  // namespace
}  // namespace resilient::store
