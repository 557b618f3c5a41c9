// Goal: the mesh listens where RESILIENT_SOCKET_IFNAME says, and a name that does not exist is told
// with those that do. Method: a table over made-up interfaces, and this host's loopback.
#include "runtime/net/interfaces.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/net/socket.h"

namespace resilient {
namespace {

using ::testing::HasSubstr;

const std::vector<InterfaceAddress> kPresent = {{"lo", "127.0.0.1", false},
                                                {"ib0", "2001:db8::7", true},
                                                {"eth0", "2001:db8::1", true},
                                                {"eth0", "10.0.0.1", false},
                                                {"eth0", "10.0.0.2", false}};

TEST(ChooseInterfaceAddress, Table) {
  const std::pair<const char*, const char*> kTable[] = {
      {"lo", "127.0.0.1"},         {"eth0", "10.0.0.1"},       {"ib0", "2001:db8::7"},
      {"ib0,eth0", "2001:db8::7"}, {"wlan0,eth0", "10.0.0.1"}, {",eth0", "10.0.0.1"}};
  for (const auto& [names, expected] : kTable) {
    const Result<std::string> address = ChooseInterfaceAddress(names, kPresent);
    ASSERT_TRUE(address.ok()) << address.status().message();
    EXPECT_EQ(*address, expected) << names;
  }
}

TEST(ChooseInterfaceAddress, UnknownName_IsToldWithThoseThatExist) {
  for (const char* names : {"wlan0", "eth", "eth0:1", "wlan0,wlan1", ","}) {
    const Status status = ChooseInterfaceAddress(names, kPresent).status();
    EXPECT_EQ(status.code(), StatusCode::kSetting) << names;
    EXPECT_THAT(status.message(), HasSubstr(std::string("=\"") + names + "\""));
    EXPECT_THAT(status.message(), HasSubstr("lo (127.0.0.1), ib0 (2001:db8::7), eth0"));
  }
  EXPECT_THAT(ChooseInterfaceAddress("eth0", {}).status().message(), HasSubstr("there are none"));
}

TEST(ListInterfaceAddresses, OneCanBeListenedOn) {
  const Result<std::vector<InterfaceAddress>> present = ListInterfaceAddresses();
  ASSERT_TRUE(present.ok());
  const Result<std::string> address = ChooseInterfaceAddress("lo", *present);
  ASSERT_TRUE(address.ok()) << address.status().message();
  EXPECT_TRUE(ListenTcp({.host = *address, .port = 0}, 1).ok());
}

}  // namespace
}  // namespace resilient
