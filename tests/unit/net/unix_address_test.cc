// Goal: a unix socket is found under the name that it was bound to, and a name that does not fit is
// none. Method: datagram sockets of this process.
#include "runtime/net/unix_address.h"

#include <unistd.h>

#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "runtime/net/socket.h"

namespace resilient {
namespace {

FileDescriptor Datagram() {
  return FileDescriptor(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
}

bool Bind(const FileDescriptor& socket, const UnixAddress& to) {
  return ::bind(socket.get(), to.get(), to.size()) == 0;
}

bool IsBound(const UnixAddress& address) {
  return ::connect(Datagram().get(), address.get(), address.size()) == 0;
}

TEST(UnixAddress, AbstractNameIsTakenUntilItsSocketCloses) {
  std::string name = "resilient-test-" + std::to_string(getpid()) + "-";
  name.append(UnixAddress::kNameMax - name.size(), 'x');
  const auto address = UnixAddress::Abstract(name);
  const auto prefix = UnixAddress::Abstract(name.substr(0, name.size() - 1));
  ASSERT_TRUE(address && prefix);
  FileDescriptor socket = Datagram();
  ASSERT_TRUE(Bind(socket, *address));
  EXPECT_FALSE(Bind(Datagram(), *address));
  EXPECT_TRUE(IsBound(*address));
  EXPECT_FALSE(IsBound(*prefix));
  socket.Reset();
  EXPECT_FALSE(IsBound(*address));
}

TEST(UnixAddress, PathIsAFile) {
  const std::string path = ::testing::TempDir() + "unix-address." + std::to_string(getpid());
  const auto address = UnixAddress::Path(path);
  ASSERT_TRUE(address);
  const FileDescriptor socket = Datagram();
  ASSERT_TRUE(Bind(socket, *address));
  EXPECT_TRUE(IsBound(*address));
  EXPECT_TRUE(std::filesystem::remove(path));
  EXPECT_FALSE(IsBound(*address));
}

TEST(UnixAddress, NameThatDoesNotFit_IsNone) {
  const std::string longest(UnixAddress::kNameMax, 'x');
  EXPECT_TRUE(UnixAddress::Abstract(longest));
  EXPECT_FALSE(UnixAddress::Abstract(longest + "x"));
  EXPECT_TRUE(UnixAddress::Path(longest));
  EXPECT_FALSE(UnixAddress::Path(longest + "x"));
}

}  // namespace
}  // namespace resilient
