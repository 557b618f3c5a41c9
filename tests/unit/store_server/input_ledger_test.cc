// Goal: what has come of requests that are not whole is counted, and who has begun first is known.
// Method: the ledger alone.

#include "store/server/input_ledger.h"

#include <gtest/gtest.h>

namespace resilient::store {
namespace {

TEST(InputLedger, Total_FollowsWhatHasCome) {
  InputLedger ledger;
  EXPECT_FALSE(ledger.Oldest());
  ledger.Note(1, 100);
  ledger.Note(2, 50);
  ledger.Note(1, 300);
  EXPECT_EQ(ledger.total(), 350u);
  EXPECT_EQ(ledger.Of(1), 300u);
  ledger.Note(3, 0);
  ledger.Note(1, 0);
  EXPECT_EQ(ledger.total(), 50u);
  EXPECT_EQ(ledger.Of(1), 0u);
}

// More bytes make nobody younger; a whole request does.
TEST(InputLedger, Oldest_IsWhoBeganFirst) {
  InputLedger ledger;
  ledger.Note(1, 10);
  ledger.Note(2, 10);
  ledger.Note(1, 4000);
  EXPECT_EQ(ledger.Oldest(), 1u);
  ledger.Note(1, 0);
  ledger.Note(1, 10);
  EXPECT_EQ(ledger.Oldest(), 2u);
  ledger.Note(2, 0);
  EXPECT_EQ(ledger.Oldest(), 1u);
  ledger.Note(1, 0);
  EXPECT_FALSE(ledger.Oldest());
}

}  // namespace
}  // namespace resilient::store
