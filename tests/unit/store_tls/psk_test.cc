// Goal: two who share a key reach each other, and neither takes a certificate, or another key, in
// its place. Method: both ends in memory, against ends that have something else.
#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/tls/library.h"
#include "runtime/tls/psk_context.h"
#include "store/server/tls_functions.h"
#include "store/tls/context.h"
#include "tests/support/certificates.h"

namespace resilient::store {
namespace {

const std::string kKey(kPskBytes, 'k');

class Psk : public ::testing::Test {
 protected:
  // What one says reaches the other, until neither says more. How both have ended.
  static std::pair<Status, Status> Meet(TlsStream& client, TlsStream& server, std::string* heard) {
    std::string none;
    Status at_client = client.Receive({}, none);
    Status at_server;
    while (true) {
      const std::string there = client.TakeOutput();
      if (!there.empty()) at_server = server.Receive(there, *heard);
      const std::string back = server.TakeOutput();
      if (!back.empty()) at_client = client.Receive(back, none);
      if (there.empty() && back.empty()) return {at_client, at_server};
    }
  }

  // The one of the library that is found, and the one that is linked: as in different processes.
  const std::shared_ptr<const PskContext> context_ = PskContext::Make(LinkedTlsFunctions());
};

TEST_F(Psk, SharedKey_Opens) {
  const auto functions = LoadTlsLibrary("a test");
  ASSERT_TRUE(functions.ok()) << functions.status().ToString();
  const auto client = PskContext::Make(*functions)->NewStream(TlsRole::kClient, kKey);
  const auto server = context_->NewStream(TlsRole::kServer, kKey);
  std::string heard;
  EXPECT_TRUE(client->Send("hello").ok());
  const auto [at_client, at_server] = Meet(*client, *server, &heard);
  EXPECT_TRUE(at_client.ok() && at_server.ok()) << at_client.ToString() << at_server.ToString();
  EXPECT_TRUE(client->established() && server->established());
  EXPECT_EQ(heard, "hello");
}

TEST_F(Psk, AnotherKey_OpensNothing) {
  const auto client = context_->NewStream(TlsRole::kClient, std::string(kPskBytes, 'x'));
  const auto server = context_->NewStream(TlsRole::kServer, kKey);
  std::string heard;
  EXPECT_TRUE(client->Send("hello").ok());
  const auto [at_client, at_server] = Meet(*client, *server, &heard);
  EXPECT_FALSE(at_client.ok());
  EXPECT_FALSE(at_server.ok());
  EXPECT_FALSE(client->established() || server->established());
  EXPECT_EQ(heard, "");
}

// Somebody on the way has one that any CA has signed.
TEST_F(Psk, ACertificateInPlaceOfTheKey_OpensNothing) {
  const TlsDirectory folder;
  const TestCa ca;
  const auto certified = TlsContext::Open(LinkedTlsFunctions(), TlsRole::kServer,
                                          folder.Write("server", ca.Issue(), ""));
  ASSERT_TRUE(certified.ok());
  const auto client = context_->NewStream(TlsRole::kClient, kKey);
  const auto server = (*certified)->NewStream("");
  std::string heard;
  EXPECT_TRUE(client->Send("hello").ok());
  const auto [at_client, at_server] = Meet(*client, *server, &heard);
  EXPECT_FALSE(at_client.ok());
  EXPECT_FALSE(client->established());
  EXPECT_EQ(heard, "");
}

TEST_F(Psk, AClientWithoutTheKey_OpensNothing) {
  const TlsDirectory folder;
  const TestCa ca;
  const auto trusting = TlsContext::Open(
      LinkedTlsFunctions(), TlsRole::kClient,
      {.certificate = "", .key = "", .authority = folder.Write("ca.pem", ca.certificate())});
  ASSERT_TRUE(trusting.ok());
  const auto client = (*trusting)->NewStream("127.0.0.1");
  const auto server = context_->NewStream(TlsRole::kServer, kKey);
  std::string heard;
  EXPECT_TRUE(client->Send("hello").ok());
  const auto [at_client, at_server] = Meet(*client, *server, &heard);
  EXPECT_FALSE(at_server.ok());
  EXPECT_FALSE(server->established());
  EXPECT_EQ(heard, "");
}

}  // namespace
}  // namespace resilient::store
