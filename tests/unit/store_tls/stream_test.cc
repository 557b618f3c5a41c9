// Goal: two ends of TLS agree and carry bytes of every size in every cut; what a certificate does
// not allow fails on both ends with a word of what to do; nothing unfinished takes more than the
// limit. Method: both ends in memory, the client's from the library found at run time, the server's
// linked; certificates made here.
#include <openssl/ssl.h>

#include <memory>
#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/tls/library.h"
#include "store/server/tls_functions.h"
#include "store/tls/context.h"
#include "tests/support/certificates.h"

namespace resilient::store {
namespace {

using ::testing::HasSubstr;

constexpr char kHost[] = "127.0.0.1";

class TlsStreams : public ::testing::Test {
 protected:
  struct Wishes {
    bool mutual = false;
    bool client_certificate = false;
    std::string host = kHost;
  };

  void SetUp() override {
    server_files_ = folder_.Write("server", ca_.Issue(), "");
    client_files_.authority = folder_.Write("ca.pem", ca_.certificate());
  }

  void Make(const Wishes& wishes) {
    if (wishes.mutual) server_files_.authority = folder_.Write("ca.pem", ca_.certificate());
    if (wishes.client_certificate && client_files_.certificate.empty()) {
      client_files_ = folder_.Write("client", ca_.Issue({.names = ""}), ca_.certificate());
    }
    const auto functions = LoadTlsLibrary("RESILIENT_TLS_CA");
    ASSERT_TRUE(functions.ok()) << functions.status().ToString();
    auto client = TlsContext::Open(*functions, TlsRole::kClient, client_files_);
    auto server = TlsContext::Open(LinkedTlsFunctions(), TlsRole::kServer, server_files_);
    ASSERT_TRUE(client.ok()) << client.status().ToString();
    ASSERT_TRUE(server.ok()) << server.status().ToString();
    client_.reset();  // Before its context.
    server_.reset();
    client_context_ = std::move(*client);
    server_context_ = std::move(*server);
    client_ = client_context_->NewStream(wishes.host);
    server_ = server_context_->NewStream("");
    client_status_ = client_->Receive({}, client_text_);
  }

  // What one says reaches the other, in pieces of `cut`, until neither says more.
  void Run(std::size_t cut = 1u << 20) {
    while (true) {
      const std::string to_server = client_->TakeOutput();
      const std::string to_client = server_->TakeOutput();
      if (to_server.empty() && to_client.empty()) return;
      Hand(to_server, cut, *server_, server_text_, server_status_);
      Hand(to_client, cut, *client_, client_text_, client_status_);
    }
  }
  static void Hand(std::string_view bytes, std::size_t cut, TlsStream& to, std::string& text,
                   Status& status) {
    while (!bytes.empty() && status.ok()) {
      status = to.Receive(bytes.substr(0, cut), text);
      bytes.remove_prefix(std::min(cut, bytes.size()));
    }
  }
  void ExpectBothWork() {
    EXPECT_TRUE(client_status_.ok()) << client_status_.ToString();
    EXPECT_TRUE(server_status_.ok()) << server_status_.ToString();
    EXPECT_TRUE(client_->established());
    EXPECT_TRUE(server_->established());
  }

  const TlsDirectory folder_;
  const TestCa ca_;
  TlsFiles server_files_;
  TlsFiles client_files_;
  std::shared_ptr<const TlsContext> client_context_;
  std::shared_ptr<const TlsContext> server_context_;
  std::unique_ptr<TlsStream> client_;
  std::unique_ptr<TlsStream> server_;
  std::string client_text_;
  std::string server_text_;
  Status client_status_;
  Status server_status_;
};

TEST_F(TlsStreams, EverySize_GoesBothWays) {
  Make({.mutual = true, .client_certificate = true});
  Run();
  ExpectBothWork();
  for (const std::size_t size :
       {std::size_t{1}, std::size_t{16384}, std::size_t{16385}, std::size_t{8} << 20}) {
    const std::string text(size, static_cast<char>('a' + size % 26));
    client_text_.clear();
    server_text_.clear();
    EXPECT_TRUE(client_->Send(text).ok());
    EXPECT_TRUE(server_->Send(text).ok());
    const std::string sent = client_->TakeOutput();
    // One byte is among the encrypted ones by chance.
    EXPECT_TRUE(size == 1 || sent.find(text) == std::string::npos);
    Hand(sent, 60000, *server_, server_text_, server_status_);
    Run(60000);
    EXPECT_TRUE(server_text_ == text) << size << " bytes to the server";
    EXPECT_TRUE(client_text_ == text) << size << " bytes to the client";
  }
  ExpectBothWork();
}

TEST_F(TlsStreams, ByteByByte_IsTheSame) {
  Make({.mutual = true, .client_certificate = true});
  EXPECT_TRUE(client_->Send("said before the handshake").ok());
  EXPECT_TRUE(server_->Send("said before it, too").ok());
  Run(1);
  ExpectBothWork();
  EXPECT_TRUE(client_->Send(", and after").ok());
  Run(1);
  EXPECT_EQ(server_text_, "said before the handshake, and after");
  EXPECT_EQ(client_text_, "said before it, too");
}

TEST_F(TlsStreams, End_IsSeenAfterWhatWasSaid) {
  Make({});
  Run();
  EXPECT_TRUE(server_->Send("the last word").ok());
  server_->End();
  EXPECT_FALSE(client_->ended());
  Run();
  EXPECT_TRUE(client_->ended());
  EXPECT_EQ(client_text_, "the last word");
  EXPECT_TRUE(client_status_.ok());
  EXPECT_FALSE(server_->ended()) << "each side ends by itself";
}

TEST_F(TlsStreams, NamesAndNumbers_AreThoseOfTheCertificate) {
  server_files_ = folder_.Write(
      "server", ca_.Issue({.names = "DNS:store.example,DNS:*.train.example,IP:::1"}), "");
  for (const char* host : {"store.example", "STORE.example.", "a7.train.example", "::1"}) {
    Make({.host = host});
    Run();
    ExpectBothWork();
  }
  for (const char* host :
       {"127.0.0.1", "a.b.train.example", "train.example", "stores.example", "of a test"}) {
    client_status_ = server_status_ = Status();
    Make({.host = host});
    Run();
    EXPECT_EQ(client_status_.code(), StatusCode::kAuth) << host;
    EXPECT_THAT(client_status_.message(), HasSubstr(std::string("does not name ") + host));
    EXPECT_THAT(client_status_.message(), HasSubstr("subjectAltName"));
    EXPECT_EQ(server_status_.code(), StatusCode::kAuth) << server_status_.ToString();
    EXPECT_THAT(server_status_.message(), HasSubstr("it refused the certificate of this store"));
    EXPECT_FALSE(server_->established());
  }
}

TEST_F(TlsStreams, ServerOfAnotherCa_IsNotBelieved) {
  const TestCa stranger;
  server_files_ = folder_.Write("server", stranger.Issue(), "");
  Make({});
  EXPECT_TRUE(client_->Send("a secret").ok());
  Run();
  EXPECT_EQ(client_status_.code(), StatusCode::kAuth);
  EXPECT_THAT(client_status_.message(), HasSubstr("no CA of " + client_files_.authority));
  EXPECT_EQ(server_text_, "");
  EXPECT_EQ(client_->Receive("more", client_text_).message(), client_status_.message());
  EXPECT_FALSE(client_->Send("more").ok());
}

TEST_F(TlsStreams, CertificateOfAnotherTime_IsNotBelieved) {
  server_files_ = folder_.Write("server", ca_.Issue({.valid_until_s = -60}), "");
  Make({});
  Run();
  EXPECT_EQ(client_status_.code(), StatusCode::kAuth);
  EXPECT_THAT(client_status_.message(), HasSubstr("has expired; renew it"));
  client_status_ = server_status_ = Status();
  server_files_ = folder_.Write("server", ca_.Issue({.valid_from_s = 3600}), "");
  Make({});
  Run();
  EXPECT_THAT(client_status_.message(), HasSubstr("is a clock wrong?"));
}

// The client believes the server first; the answer to what it shows comes after that.
TEST_F(TlsStreams, ClientWithoutCertificate_IsRefusedAndTold) {
  Make({.mutual = true});
  EXPECT_TRUE(client_->Send("a request").ok());
  Run();
  EXPECT_EQ(server_status_.code(), StatusCode::kAuth);
  EXPECT_THAT(server_status_.message(), HasSubstr("it showed no certificate"));
  EXPECT_EQ(server_text_, "");
  EXPECT_EQ(client_status_.code(), StatusCode::kAuth);
  EXPECT_THAT(client_status_.message(), HasSubstr("set RESILIENT_TLS_CERT and RESILIENT_TLS_KEY"));
}

TEST_F(TlsStreams, ClientWithAWrongCertificate_IsRefusedAndTold) {
  const TestCa stranger;
  const std::pair<TestCertificate, std::string> cases[] = {
      {stranger.Issue(), "no CA of "},
      {ca_.Issue({.valid_until_s = -60}), "has expired"},
      {ca_.Issue({.usage = "serverAuth"}), "clientAuth"}};
  for (const auto& [certificate, mention] : cases) {
    client_status_ = server_status_ = Status();
    client_files_ = folder_.Write("client", certificate, ca_.certificate());
    Make({.mutual = true});
    Run();
    EXPECT_EQ(server_status_.code(), StatusCode::kAuth);
    EXPECT_THAT(server_status_.message(), HasSubstr(mention));
    EXPECT_EQ(client_status_.code(), StatusCode::kAuth);
    EXPECT_THAT(client_status_.message(), HasSubstr("it refused the certificate of this process"));
  }
}

TEST_F(TlsStreams, ServerWithACertificateForClients_IsNotBelieved) {
  server_files_ = folder_.Write("server", ca_.Issue({.usage = "clientAuth"}), "");
  Make({});
  Run();
  EXPECT_EQ(client_status_.code(), StatusCode::kAuth);
  EXPECT_THAT(client_status_.message(), HasSubstr("serverAuth"));
}

TEST_F(TlsStreams, Handshake_HasALimitThatChainsFitInto) {
  for (const auto& [length, fits] : {std::pair(6, true), std::pair(60, false)}) {
    client_status_ = server_status_ = Status();
    TestCertificate chain = ca_.Issue();
    for (int i = 1; i < length; ++i) chain.certificate += ca_.Issue().certificate;
    client_files_ = folder_.Write("client", chain, ca_.certificate());
    Make({.mutual = true});
    Run(1000);
    EXPECT_EQ(server_status_.ok(), fits) << length << ": " << server_status_.ToString();
  }
  EXPECT_EQ(server_status_.code(), StatusCode::kProtocol);
  EXPECT_THAT(server_status_.message(), HasSubstr("the limit is 16384"));
}

TEST_F(TlsStreams, StoreWithoutTls_IsTold) {
  for (const std::size_t cut : {std::size_t{1}, std::size_t{8}}) {
    client_status_ = Status();
    Make({});
    Hand(std::string("RSL1\1\0\1\0", 8), cut, *client_, client_text_, client_status_);
    EXPECT_EQ(client_status_.code(), StatusCode::kProtocol);
    EXPECT_THAT(client_status_.message(), HasSubstr("speaks the plain store protocol"));
  }
}

TEST_F(TlsStreams, WhatIsNoTls_IsToldApart) {
  for (const char* text :
       {"HTTP/1.1 400 Bad Request\r\n", "RSA is not the magic", "SSH-2.0-x\r\n"}) {
    client_status_ = Status();
    Make({});
    Hand(text, 3, *client_, client_text_, client_status_);
    EXPECT_EQ(client_status_.code(), StatusCode::kProtocol) << text;
    EXPECT_THAT(client_status_.message(), HasSubstr("does not speak TLS")) << text;
  }
}

TEST_F(TlsStreams, OlderTls_IsRefused) {
  Make({});
  const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> old(SSL_CTX_new(TLS_method()), &SSL_CTX_free);
  SSL_CTX_set_max_proto_version(old.get(), TLS1_2_VERSION);
  const std::unique_ptr<SSL, void (*)(SSL*)> ssl(SSL_new(old.get()), &SSL_free);
  BIO* out = BIO_new(BIO_s_mem());
  SSL_set_bio(ssl.get(), BIO_new(BIO_s_mem()), out);
  EXPECT_LE(SSL_connect(ssl.get()), 0);
  char* data = nullptr;
  const long size = BIO_get_mem_data(out, &data);
  const Status status = server_->Receive({data, static_cast<std::size_t>(size)}, server_text_);
  EXPECT_EQ(status.code(), StatusCode::kProtocol);
  EXPECT_THAT(status.message(), HasSubstr("speaks no TLS 1.3"));
  EXPECT_EQ(server_->TakeOutput().front(), '\x15') << "an alert";
}

TEST_F(TlsStreams, ChangedBytes_EndIt) {
  Make({});
  Run();
  EXPECT_TRUE(client_->Send("a request").ok());
  std::string bytes = client_->TakeOutput();
  bytes.back() ^= 1;
  Hand(bytes, bytes.size(), *server_, server_text_, server_status_);
  EXPECT_EQ(server_status_.code(), StatusCode::kProtocol) << server_status_.ToString();
  EXPECT_EQ(server_text_, "");
  Run();
  EXPECT_FALSE(client_status_.ok()) << "it is told";
}

}  // namespace
}  // namespace resilient::store
