// Goal: ranks count as present only while they may still come to the init that asks. Method: this
// process binds the names of others.
#include "runtime/net/presence.h"

#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "runtime/net/socket.h"
#include "runtime/net/unix_address.h"

namespace resilient {
namespace {

using Ranks = std::vector<int>;

class Presence : public testing::Test {
 protected:
  // As the process does that its launcher calls `rank`.
  void Bind(const std::string& name) {
    FileDescriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    const auto address = UnixAddress::Abstract(StrCat(names_.job, "/", name));
    ASSERT_EQ(::bind(socket.get(), address->get(), address->size()), 0) << name;
    bound_.push_back(std::move(socket));
  }

  Ranks Present(int self) const { return PresentRanks(names_, 3, self); }

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

}  // namespace
}  // namespace resilient
