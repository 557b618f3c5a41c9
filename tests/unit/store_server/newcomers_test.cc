// Goal: connections that say nothing keep nobody out, and a rank that only takes its time keeps its
// place while there is room. Method: the table alone, with a clock of numbers.

#include "store/server/newcomers.h"

#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace resilient::store {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Instant At(int milliseconds) { return Instant(std::chrono::milliseconds(milliseconds)); }

class NewcomersTest : public ::testing::Test {
 protected:
  std::optional<ConnectionId> WhoGoesAt(int milliseconds) const {
    return newcomers_.WhoGoes(At(milliseconds),
                              [this](ConnectionId id) { return spoken_.contains(id); });
  }

  Newcomers newcomers_{4, std::chrono::seconds(5)};
  std::set<ConnectionId> spoken_;
};

TEST_F(NewcomersTest, WhileThereIsRoom_OnlyTheOverdueEnd) {
  newcomers_.Add(1, "10.0.0.1:1000", At(0));
  newcomers_.Add(2, "10.0.0.1:1001", At(1));
  EXPECT_FALSE(newcomers_.Full());
  EXPECT_THAT(newcomers_.Overdue(At(4999)), IsEmpty());
  EXPECT_THAT(newcomers_.Overdue(At(5000)), ElementsAre(1));
}

TEST_F(NewcomersTest, WhenFull_ASilentOneGoesAfterATenthOfASecond) {
  for (ConnectionId id = 1; id <= 4; ++id) newcomers_.Add(id, "10.0.0.1:1", At(0));
  EXPECT_TRUE(newcomers_.Full());
  spoken_ = {1, 3};
  EXPECT_EQ(WhoGoesAt(99), std::nullopt);
  EXPECT_EQ(WhoGoesAt(100), 2u);
  newcomers_.Remove(2);
  EXPECT_EQ(WhoGoesAt(100), 4u);
  newcomers_.Remove(4);
  EXPECT_EQ(WhoGoesAt(999), std::nullopt);
  EXPECT_EQ(WhoGoesAt(1000), 1u) << "half a handshake is no reason to stay for ever";
}

TEST_F(NewcomersTest, WhenFull_TheAddressWithMostGivesUpOnes) {
  newcomers_.Add(1, "10.0.0.1:1", At(0));
  newcomers_.Add(2, "[2001:db8::1]:1", At(0));
  newcomers_.Add(3, "10.0.0.2:1", At(50));
  newcomers_.Add(4, "10.0.0.2:2", At(60));
  EXPECT_EQ(WhoGoesAt(149), std::nullopt);
  EXPECT_EQ(WhoGoesAt(150), 3u) << "the oldest of all is of an address that has only one";
}

TEST_F(NewcomersTest, WhoseNameIsNotKnown_IsChargedTogether) {
  newcomers_.Add(1, "unknown peer", At(0));
  newcomers_.Add(2, "10.0.0.1:1", At(0));
  newcomers_.Add(3, "unknown peer", At(0));
  EXPECT_EQ(WhoGoesAt(100), 1u);
  newcomers_.Clear();
  EXPECT_EQ(WhoGoesAt(100), std::nullopt);
}

}  // namespace
}  // namespace resilient::store
