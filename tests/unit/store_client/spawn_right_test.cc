// Goal: of the processes of one user one may start the store of an address, and no other user can
// keep them all from it. Method: rights within this process, and sockets that it binds to their
// name as another user.
#include "store/client/spawn_right.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "runtime/net/unix_address.h"
#include "tests/support/as_user.h"

namespace resilient::store {
namespace {

NameOwners NobodyKnows(int, std::string_view) { return {}; }

class SpawnRights : public testing::Test {
 protected:
  // A socket of this process with the name of the right.
  FileDescriptor Bound() const {
    FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::bind(socket.get(), address_->get(), address_->size()), 0);
    return socket;
  }
  FileDescriptor BoundAsNobody() const {
    const AsUser other(kNobody);
    return Bound();
  }
  // As many have connected as the queue of `listener` takes.
  std::vector<FileDescriptor> Fill(const FileDescriptor& listener) const {
    EXPECT_EQ(::listen(listener.get(), 0), 0);
    std::vector<FileDescriptor> queue;
    do {
      queue.emplace_back(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    } while (::connect(queue.back().get(), address_->get(), address_->size()) == 0);
    EXPECT_EQ(errno, EAGAIN);
    return queue;
  }

  const HostPort store_{StrCat("spawn-right-test-", getpid()), 29500};
  const std::optional<UnixAddress> address_ =
      UnixAddress::Abstract(SpawnRightName(geteuid(), store_));
};

TEST_F(SpawnRights, OneAtATimeHasIt) {
  std::optional<SpawnRight> first(std::in_place, store_);
  EXPECT_TRUE(first->may_start());
  EXPECT_FALSE(SpawnRight(store_).may_start());
  EXPECT_FALSE(SpawnRight(store_, NobodyKnows).may_start());
  EXPECT_TRUE(SpawnRight({store_.host, 29501}).may_start());
  first.reset();
  const SpawnRight next(store_);
  EXPECT_TRUE(next.may_start());
  EXPECT_EQ(next.other_user(), std::nullopt);
}

TEST_F(SpawnRights, HoweverManyHaveAsked_ItIsTheHolders) {
  const SpawnRight first(store_);
  for (int asked = 0; asked < 200; ++asked) {
    ASSERT_FALSE(SpawnRight(store_, NobodyKnows).may_start()) << asked;
  }
  EXPECT_FALSE(SpawnRight(store_).may_start());
}

TEST_F(SpawnRights, OneOfThisUserThatDoesNotListenYet_HasIt) {
  const FileDescriptor socket = Bound();
  EXPECT_FALSE(SpawnRight(store_).may_start());
}

TEST_F(SpawnRights, AnotherUserWhoListens_KeepsNobodyFromIt) {
  SKIP_UNLESS_ROOT();
  const FileDescriptor socket = BoundAsNobody();
  {
    const AsUser other(kNobody);
    ASSERT_EQ(::listen(socket.get(), 1), 0);
  }
  const SpawnRight right(store_, NobodyKnows);
  EXPECT_TRUE(right.may_start());
  EXPECT_EQ(right.other_user(), kNobody);
}

TEST_F(SpawnRights, AnotherUserWhoDoesNotListen_KeepsNobodyFromIt) {
  SKIP_UNLESS_ROOT();
  const FileDescriptor socket = BoundAsNobody();
  const SpawnRight right(store_);
  EXPECT_TRUE(right.may_start());
  EXPECT_EQ(right.other_user(), kNobody);
}

TEST_F(SpawnRights, AnotherUserWhoseQueueIsFull_KeepsNobodyFromIt) {
  SKIP_UNLESS_ROOT();
  const FileDescriptor socket = BoundAsNobody();
  const std::vector<FileDescriptor> queue = Fill(socket);
  EXPECT_EQ(SpawnRight(store_).other_user(), kNobody);
}

// It may be one of ours that is about to listen, or of whom many have asked.
TEST_F(SpawnRights, OneOfWhomNobodyCanTellWhoseItIs_HasIt) {
  const FileDescriptor socket = Bound();
  EXPECT_FALSE(SpawnRight(store_, NobodyKnows).may_start());
  const std::vector<FileDescriptor> queue = Fill(socket);
  EXPECT_FALSE(SpawnRight(store_, NobodyKnows).may_start());
}

TEST_F(SpawnRights, NamesOfUsersPortsAndHosts_AreTheirOwn) {
  EXPECT_EQ(SpawnRightName(7, {"host", 29500}), "resilient-spawn-7-29500-host");
  const std::string host(200, 'h');
  EXPECT_EQ(SpawnRightName(7, {host, 1}).size(), UnixAddress::kNameMax);
  EXPECT_NE(SpawnRightName(7, {host, 1}), SpawnRightName(7, {host, 2}));
}

}  // namespace
}  // namespace resilient::store
