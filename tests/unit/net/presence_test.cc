// Goal: ranks count as present only while they may still come to the init that asks, and only by
// names that their own user has bound. Method: this process binds the names of others, as itself
// and as another user, and has what the kernel says of owners replaced.
#include "runtime/net/presence.h"

#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "runtime/net/socket.h"
#include "runtime/net/unix_address.h"
#include "tests/support/as_user.h"

namespace resilient {
namespace {

using Ranks = std::vector<int>;

class Presence : public testing::Test {
 protected:
  // As the process does that its launcher calls `rank`.
  void Bind(const std::string& name, int type = SOCK_DGRAM) {
    FileDescriptor socket(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
    const auto address = UnixAddress::Abstract(StrCat(names_.job, "/", name));
    ASSERT_EQ(::bind(socket.get(), address->get(), address->size()), 0) << name;
    bound_.push_back(std::move(socket));
  }

  void BindAs(uid_t user, const std::string& name, int type = SOCK_DGRAM) {
    const AsUser other(user);
    Bind(name, type);
  }

  // None is unverified, where the kernel tells the owners.
  Ranks Present(int self) const {
    const RanksOnHost ranks = PresentRanks(names_, 3, self);
    EXPECT_EQ(ranks.unverified, Ranks());
    return ranks.present;
  }

  const PresenceNames names_{StrCat("resilient-presence-test/", getpid()), "ours"};

 private:
  std::vector<FileDescriptor> bound_;
};

TEST_F(Presence, OfThoseThatLiveAndAreInNoInit) {
  EXPECT_EQ(Present(0), Ranks());
  Bind("1");
  EXPECT_EQ(Present(0), Ranks{1});
  EXPECT_EQ(Present(1), Ranks());
  Bind("2");
  EXPECT_EQ(Present(0), (Ranks{1, 2}));
}

TEST_F(Presence, OfOneThatIsInThisInit) {
  Bind("1");
  Bind("1/ours/1");
  Bind("1/init");
  EXPECT_EQ(Present(0), Ranks{1});
}

TEST_F(Presence, OfOneThatIsInThisInitByItsLaunchersVariables) {
  Bind("1");
  Bind("1/ours/any");
  Bind("1/init");
  EXPECT_EQ(Present(0), Ranks{1});
}

TEST_F(Presence, NotOfOneThatIsInAnotherInit) {
  Bind("1");
  Bind("1/theirs/1");
  Bind("1/init");
  Bind("2");
  Bind("2/theirs/any");
  Bind("2/init");
  EXPECT_EQ(Present(0), Ranks());
}

TEST_F(Presence, NotOfOneThatIsInThisInitAsAnotherRank) {
  Bind("0");  // The caller's own name: it has come as rank 1, and misses rank 0.
  Bind("0/ours/1");
  Bind("0/init");
  EXPECT_EQ(Present(1), Ranks());
}

TEST_F(Presence, NotOfANameThatAnotherUserHas) {
  SKIP_UNLESS_ROOT();
  BindAs(kNobody, "1");
  Bind("2");
  EXPECT_EQ(Present(0), Ranks{2});
}

TEST_F(Presence, OfOneOfWhichAnotherUserSaysThatItIsInAnotherInit) {
  SKIP_UNLESS_ROOT();
  Bind("1");
  BindAs(kNobody, "1/init");
  EXPECT_EQ(Present(0), Ranks{1});
}

TEST_F(Presence, NotOfOneOfWhichAnotherUserSaysThatItIsInThisInit) {
  SKIP_UNLESS_ROOT();
  Bind("1");
  Bind("1/theirs/1");
  Bind("1/init");
  BindAs(kNobody, "1/ours/1");
  EXPECT_EQ(Present(0), Ranks());
}

// A name of another type of socket is another name.
TEST_F(Presence, OfOneWhoseNameAnotherUserHasForAStream) {
  SKIP_UNLESS_ROOT();
  Bind("1");
  BindAs(kNobody, "1", SOCK_STREAM);
  BindAs(kNobody, "2", SOCK_STREAM);
  EXPECT_EQ(Present(0), Ranks{1});
  EXPECT_EQ(OwnersOfNames(SOCK_DGRAM, names_.job + "/2"), NameOwners());
  EXPECT_EQ(OwnersOfNames(SOCK_STREAM, names_.job + "/2"),
            (NameOwners{{names_.job + "/2", kNobody}}));
}

TEST_F(Presence, WhereTheKernelTellsNothing_AllAreUnverified) {
  Bind("1");
  Bind("2");
  Bind("2/theirs/2");
  Bind("2/init");
  const RanksOnHost ranks =
      PresentRanks(names_, 3, 0, [](int, std::string_view) { return NameOwners(); });
  EXPECT_EQ(ranks.present, Ranks());
  EXPECT_EQ(ranks.unverified, Ranks{1});
}

TEST_F(Presence, OwnersAreAskedForOnceAndOnlyIfAnyNameIsBound) {
  int asked = 0;
  const auto count = [&](int type, std::string_view prefix) {
    ++asked;
    EXPECT_EQ(type, SOCK_DGRAM);
    return OwnersOfNames(type, prefix);
  };
  PresentRanks(names_, 3, 0, count);
  EXPECT_EQ(asked, 0);
  Bind("1");
  Bind("1/init");
  Bind("2");
  const RanksOnHost ranks = PresentRanks(names_, 3, 0, count);
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(ranks.present, Ranks{2});
}

TEST_F(Presence, OwnersOfMoreSocketsThanOneReadTells) {
  for (int rank = 0; rank < 800; ++rank) Bind(StrCat(rank, "/of-a-name-that-takes-some-room"));
  const NameOwners owners = OwnersOfNames(SOCK_DGRAM, names_.job + "/");
  EXPECT_EQ(owners.size(), 800u);
  for (const auto& [name, user] : owners) EXPECT_EQ(user, geteuid()) << name;
}

}  // namespace
}  // namespace resilient
