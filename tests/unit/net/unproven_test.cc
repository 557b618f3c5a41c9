// Goal: one address that opens connections without end loses its own, and no other address any.
// Method: the table alone, against a plain list of what is in it.

#include "runtime/net/unproven.h"

#include <algorithm>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/random.h"

namespace resilient {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Instant At(int seconds) { return Instant(std::chrono::seconds(seconds)); }

TEST(UnprovenConnections, Empty_HasNobodyToClose) {
  UnprovenConnections table;
  EXPECT_THAT(table.OfHeaviest(), IsEmpty());
  EXPECT_THAT(table.AcceptedBy(At(100)), IsEmpty());
  EXPECT_FALSE(table.OldestAccepted().has_value());
  table.Remove(7);
}

TEST(UnprovenConnections, AddressWithMost_LosesItsOldest) {
  UnprovenConnections table;
  table.Add(1, "rank", At(1));
  for (UnprovenConnections::Id id = 2; id < 6; ++id) table.Add(id, "stranger", At(2));
  table.Add(6, "rank", At(3));
  EXPECT_THAT(table.OfHeaviest(), ElementsAre(2, 3, 4, 5));
  table.Remove(2);
  table.Remove(3);
  // Two each: the older one.
  EXPECT_THAT(table.OfHeaviest(), ElementsAre(1, 6));
  EXPECT_EQ(table.CountOf("stranger"), 2u);
  EXPECT_EQ(table.CountOf("nobody"), 0u);
}

TEST(UnprovenConnections, AcceptedBy_NamesTheOldest) {
  UnprovenConnections table;
  table.Add(3, "a", At(1));
  table.Add(5, "b", At(1));
  table.Add(9, "a", At(4));
  EXPECT_THAT(table.AcceptedBy(At(0)), IsEmpty());
  EXPECT_THAT(table.AcceptedBy(At(1)), ElementsAre(3, 5));
  EXPECT_THAT(table.AcceptedBy(At(9)), ElementsAre(3, 5, 9));
  table.Remove(3);
  EXPECT_EQ(table.OldestAccepted(), At(1));
  table.Remove(5);
  EXPECT_EQ(table.OldestAccepted(), At(4));
}

TEST(UnprovenConnections, FloodOfOneAddress_TakesNothingFromOthers) {
  constexpr std::size_t kPlaces = 16;
  UnprovenConnections table;
  UnprovenConnections::Id next = 1;
  for (int rank = 0; rank < 8; ++rank) table.Add(next++, "rank " + std::to_string(rank), At(0));
  for (int i = 0; i < 1000; ++i) {
    table.Add(next++, "stranger", At(i));
    while (table.size() > kPlaces) table.Remove(*table.OfHeaviest().begin());
  }
  EXPECT_EQ(table.CountOf("stranger"), 8u);
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(table.CountOf("rank " + std::to_string(rank)), 1u);
  }
}

TEST(UnprovenConnections, RandomSteps_AgreeWithAList) {
  Random random(1);
  UnprovenConnections table;
  std::map<UnprovenConnections::Id, std::string> list;
  UnprovenConnections::Id next = 1;
  for (int step = 0; step < 5000; ++step) {
    if (list.empty() || random.Below(5) < 3) {
      const std::string address(1, static_cast<char>('a' + random.Below(4)));
      list[next] = address;
      table.Add(next++, address, At(step));
    } else {
      const auto gone = std::next(list.begin(), static_cast<int>(random.Below(list.size())));
      table.Remove(gone->first);
      list.erase(gone);
    }
    ASSERT_EQ(table.size(), list.size());
    std::map<std::string, std::size_t> count;
    for (const auto& [id, address] : list) ++count[address];
    std::size_t most = 0;
    for (const auto& [address, n] : count) {
      ASSERT_EQ(table.CountOf(address), n);
      most = std::max(most, n);
    }
    ASSERT_EQ(table.OfHeaviest().size(), most);
    if (most == 0) continue;
    // The oldest of all those that belong to an address with so many.
    const auto first =
        std::ranges::find_if(list, [&](const auto& entry) { return count[entry.second] == most; });
    ASSERT_EQ(*table.OfHeaviest().begin(), first->first);
  }
}

TEST(ChargedAddress, OfIpv6TheNetwork) {
  EXPECT_EQ(ChargedAddress("10.1.2.3"), "10.1.2.3");
  EXPECT_EQ(ChargedAddress("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::/64");
  EXPECT_EQ(ChargedAddress("2001:db8:1:2:ffff::1"), "2001:db8:1:2::/64");
  EXPECT_EQ(ChargedAddress("fe80::1%eth0"), "fe80::/64");
  EXPECT_EQ(ChargedAddress("::ffff:10.1.2.3"), "10.1.2.3");
  EXPECT_EQ(ChargedAddress("a name"), "a name");
}

}  // namespace
}  // namespace resilient
